"""benchmarks/sleeping.py: the sleepers keep the contracts, and sleep when and for as long as they say."""

import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from benchmarks.sleeping import BULK_CHUNK, SleepingReward, SleepSettings, parse_path
from rollout.config import ModelConfig
from rollout.families.base import Family
from rollout.families.registry import load_family
from rollout.families.trainable import checksum, make_trainable_full, trainable_tensors
from tests.contracts.family import FamilyContract
from tests.contracts.reward import RewardContract
from tests.unit.learner.helpers import learner_config, make_learner, make_rollout, sample_groups

FAMILY = "benchmarks.sleeping:SleepingFamily"
CPU = torch.device("cpu")


def model(path: str) -> ModelConfig:
    return ModelConfig(family=FAMILY, path=path)


class TestSleepingFamily(FamilyContract):
    name = FAMILY

    @classmethod
    def model_config(cls, folder: Path) -> ModelConfig:
        return model("sleep:latent=5,numel=7")


class TestSleepingReward(RewardContract):
    name = "benchmarks.sleeping:SleepingReward"
    options: ClassVar[dict[str, Any]] = {"call_s": 0.0001}

    def batch(self) -> Any:
        rng = np.random.default_rng(0)
        images = np.stack([rng.integers(0, high, (6, 6, 3), np.uint8) for high in (2, 90, 255)])
        return images, ["a", "b", "c"], [{}, {}, {}]


def test_the_path_says_everything() -> None:
    assert parse_path("sleep:") == SleepSettings()
    expected = SleepSettings(call_s=1.0, learn_call_s=0.25, latent=8, numel=10)
    assert parse_path("sleep:numel=10,latent=8,call_s=1.0,learn_call_s=.25") == expected


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("configs/model/shapes", "must begin with 'sleep:'"),
        ("sleep:call=1", "unknown key 'call'; known: call_s, learn_call_s, latent, numel"),
        ("sleep:call_s", "call_s = '' is not a number"),
        ("sleep:call_s=fast", "call_s = 'fast' is not a number"),
        ("sleep:latent=4.5", "latent = '4.5' is not a whole number"),
        ("sleep:latent=4,latent=4", "says latent twice"),
        ("sleep:latent=0", "latent = 0 must be finite and at least 1"),
        ("sleep:call_s=-1", "call_s = -1.0 must be finite and at least 0"),
        ("sleep:learn_call_s=inf", "learn_call_s = inf must be finite"),
        ("sleep:numel=-1", "numel = -1 must be finite and at least 0"),
    ],
)
def test_a_mistake_in_the_path_is_named(path: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        load_family(model(path), CPU, ())
    assert repr(path) in str(caught.value)


def test_half_precision_and_impossible_naps_are_refused() -> None:
    with pytest.raises(ValueError, match="only float32"):
        load_family(ModelConfig(family=FAMILY, path="sleep:", dtype="float16"), CPU)
    for call_s in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="call_s"):
            SleepingReward(call_s)


def seconds_of_a_call(family: Family, batch: int) -> float:
    x = torch.zeros(batch, *family.latent_shape)
    conditioning = family.encode_prompts(["a"] * batch)
    began = time.perf_counter()
    family.velocity(family.network, x, torch.ones(batch), conditioning)
    return time.perf_counter() - began


def test_a_network_call_sleeps_by_whether_it_is_trained_through() -> None:
    family = load_family(model("sleep:call_s=0.03,learn_call_s=0.15"), CPU)
    for batch in (1, 64):
        with torch.inference_mode():
            assert 0.03 <= seconds_of_a_call(family, batch) < 0.15
        with torch.no_grad():
            assert 0.03 <= seconds_of_a_call(family, batch) < 0.15
        assert seconds_of_a_call(family, batch) >= 0.15


def test_a_reward_call_sleeps_whatever_its_batch() -> None:
    reward = SleepingReward(call_s=0.05)
    for batch in (1, 64):
        began = time.perf_counter()
        reward(np.zeros((batch, 4, 4, 3), np.uint8), ["a"] * batch, [{}] * batch)
        assert time.perf_counter() - began >= 0.05


@pytest.mark.parametrize("numel", [0, 1, BULK_CHUNK, BULK_CHUNK + 3])
def test_numel_adds_weights_in_chunks_of_a_matrix_s_size(numel: int) -> None:
    small = load_family(model("sleep:"), CPU, ("network",)).network
    network = load_family(model(f"sleep:numel={numel}"), CPU, ("network",)).network
    make_trainable_full(network)
    sizes = [tensor.numel() for tensor in trainable_tensors(network).values()]
    assert sum(sizes) == numel + sum(tensor.numel() for tensor in small.parameters())
    assert max(sizes) <= max(BULK_CHUNK, 3 * 4 * 4 * 16)


def test_two_processes_make_the_same_network() -> None:
    sums = set()
    for _ in range(2):
        torch.manual_seed(len(sums))
        network = load_family(model("sleep:numel=9"), CPU, ("network",)).network
        make_trainable_full(network)
        sums.add(checksum(trainable_tensors(network)))
    assert len(sums) == 1


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_a_worker_samples_and_a_learner_trains_every_weight(adapter: Any) -> None:
    config = learner_config(adapter=adapter)
    place: dict[str, Any] = {"model_config": model("sleep:numel=5")}
    learner = make_learner(Path(), config, **place)
    _, old, _ = learner.weights()
    learner.step(sample_groups(make_rollout(Path(), config, **place), learner.weights()))
    version, new, _ = learner.weights()
    assert version == 1
    assert all(not torch.equal(tensor, old[name]) for name, tensor in new.items())
    assert ("bulk_0000" in new) == (adapter == "full")


@pytest.mark.slow
def test_a_learner_s_step_sleeps_for_each_micro_batch() -> None:
    config = learner_config(micro_batch=4)
    place: dict[str, Any] = {"model_config": model("sleep:learn_call_s=0.05")}
    learner = make_learner(Path(), config, **place)
    groups = sample_groups(make_rollout(Path(), config, **place), learner.weights())
    began = time.perf_counter()
    stats = learner.step(groups)
    calls = stats.num_network_calls // 4
    assert calls > 1
    assert 0.05 * calls <= time.perf_counter() - began
