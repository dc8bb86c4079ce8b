"""LearnerWorker on groups that the real RolloutWorker sampled: gates, failures, numbers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from learner.checks import NonFiniteLoss, RatioGateError
from learner.config import CreditConfig, ObjectiveConfig
from rollout.config import ModelConfig
from rollout.trajectory import RecordBatch, read_group, read_ipc, write_ipc
from tests.unit.learner.helpers import (
    NUM_SAMPLES,
    NUM_STEPS,
    learner_config,
    make_learner,
    make_rollout,
    relative_difference,
    same_bits,
    sample_groups,
)

FULL = {"adapter": "full", "lr": 1e-4}


@pytest.mark.parametrize("settings", [{}, FULL], ids=["lora", "full"])
def test_rollout_and_learner_agree_on_log_probs_iteration_after_iteration(
    model: Path, settings: dict
) -> None:
    """The learner's batch shape differs from the rollout's; version 1 and 2 have moved weights."""
    config = learner_config(micro_batch=5, **settings)
    worker, sampler = make_learner(model, config), make_rollout(model, config)
    for version in range(3):
        groups = sample_groups(sampler, worker.weights(), first_group=10 * version)
        stats = worker.step(groups)
        assert stats.on_policy
        assert stats.policy_version == version
        assert stats.max_abs_log_ratio < 5e-6
        assert worker.version == version + 1


def test_the_ratio_gate_fires_when_a_version_never_arrived(
    model: Path, groups: list[RecordBatch]
) -> None:
    """One step at a small learning rate lies between version 0 and 1; the rollout says that it
    holds 1 and samples with 0."""
    worker = make_learner(model, learner_config(lr=1e-4))
    _, stale, checksum = worker.weights()
    worker.step(groups)
    before = worker.engine.full_tensors()
    late = sample_groups(make_rollout(model), (1, stale, checksum), first_group=10)
    with pytest.raises(RatioGateError) as caught:
        worker.step(late)
    text = str(caught.value)
    assert "on-policy ratio gate at policy version 1: |log ratio| reaches" in text
    assert "learner.ratio_tolerance is 5e-05" in text
    assert "group " in text
    assert "transition " in text
    assert "the published weights never reached the rollout's live module" in text
    assert same_bits(worker.engine.full_tensors(), before), "nothing was stepped"


def test_the_gate_leaves_older_groups_alone(model: Path, groups: list[RecordBatch]) -> None:
    worker = make_learner(model)
    worker.step(groups)
    stats = worker.step(groups)
    assert not stats.on_policy
    assert stats.max_abs_log_ratio > 5e-5
    assert stats.policy_version == 0


def test_recorded_batches_train_without_any_rollout_actor(model: Path, tmp_path: Path) -> None:
    """Under the same rule a recording leads, to the bit, where the live run went, and says of
    itself that nothing was gated; under another rule it trains on, elsewhere."""
    live, sampler = make_learner(model), make_rollout(model)
    for version in range(3):
        groups = sample_groups(sampler, live.weights(), first_group=10 * version)
        assert live.step(groups).on_policy
        write_ipc(tmp_path / f"batch_{version}.arrow", groups)
    again = make_learner(model)
    outcome = CreditConfig(rule="outcome", normaliser="group")
    other = make_learner(model, credit=outcome)
    for version in range(3):
        recording = read_ipc(tmp_path / f"batch_{version}.arrow")
        stats = [learner.step(recording, recorded=True) for learner in (again, other)]
        assert [s.on_policy for s in stats] == [False, False]
        assert [s.policy_version for s in stats] == [version, version]
        assert stats[0].max_abs_log_ratio < 5e-6, "the same weights as the live run's"
    assert again.weights()[::2] == live.weights()[::2]
    assert other.version == 3
    assert stats[1].max_abs_log_ratio > 5e-5, "a live batch would have been stopped"
    start = make_learner(model).weights()[1]
    assert relative_difference(other.weights()[1], start) > 1e-3
    assert relative_difference(other.weights()[1], live.weights()[1]) > 1e-3


def test_recorded_batches_train_in_any_order(model: Path) -> None:
    """A later version than the learner's is no mistake there."""
    worker = make_learner(model)
    _, tensors, checksum = worker.weights()
    future = sample_groups(make_rollout(model), (3, tensors, checksum))
    stats = worker.step(future, recorded=True)
    assert (stats.on_policy, stats.policy_version, worker.version) == (False, 3, 1)


def test_groups_of_a_later_version_are_refused(model: Path) -> None:
    worker = make_learner(model)
    _, tensors, checksum = worker.weights()
    future = sample_groups(make_rollout(model), (3, tensors, checksum))
    with pytest.raises(ValueError, match="sampled with policy version 3, the learner is at 0"):
        worker.step(future)
    assert worker.version == 0


def test_groups_sampled_with_other_guidance_are_refused(
    model: Path, groups: list[RecordBatch]
) -> None:
    worker = make_learner(model, guidance_scale=2.0)
    message = r"sampled with guidance_scale = 1, the learner's is 2"
    with pytest.raises(ValueError, match=message):
        worker.step(groups)


def test_truncated_ratios_are_counted(model: Path, groups: list[RecordBatch]) -> None:
    """On-policy none; after a large step some. Where the advantage is positive, the clip had them."""
    objective = ObjectiveConfig(clip_range=1e-5, max_ratio=1 + 2e-5)
    worker = make_learner(model, learner_config(lr=1e-2), objective=objective)
    assert worker.step(groups).truncated_frac == 0
    stats = worker.step(groups)
    assert 0 < stats.truncated_frac < 1
    # every truncated ratio is clipped, too, and so are those below the range where A < 0
    assert stats.clipped_frac >= stats.truncated_frac


@pytest.mark.parametrize("settings", [{"lr": 3e-3}, {**FULL, "lr": 3e-4}], ids=["lora", "full"])
def test_training_on_a_batch_makes_its_good_transitions_likelier(
    model: Path, groups: list[RecordBatch], settings: dict
) -> None:
    """The objective at the new weights, on the same batch, is lower than at the old ones (0)."""
    worker = make_learner(model, learner_config(**settings))
    first = worker.step(groups)
    second = worker.step(groups)
    assert abs(first.loss) < 1e-6, "advantages of a group have mean 0 and all ratios are 1"
    assert second.loss < first.loss - 1e-5
    assert second.ratio_max_deviation > 0


def test_a_batch_split_into_updates_steps_once_for_each(model: Path) -> None:
    config = learner_config(updates_per_batch=4)
    worker = make_learner(model, config)
    stats = worker.step(sample_groups(make_rollout(model, config), worker.weights()))
    assert len(stats.grad_norm) == 4
    assert worker.engine.optimizer_state().step == 4
    assert worker.version == 1
    assert stats.max_abs_log_ratio < 5e-6, "that of the first update"
    assert stats.ratio_max_deviation > 5e-6, "the later updates have moved on"


def test_stats_say_what_the_rewards_say(model: Path, groups: list[RecordBatch]) -> None:
    stats = make_learner(model).step(groups)
    read = [read_group(batch) for batch in groups]
    rewards = np.stack([group.rewards for group in read])
    trained = sum(read[0].header.plan.trained)
    assert stats.num_transitions == len(groups) * NUM_SAMPLES * trained
    assert stats.num_network_calls == stats.num_transitions
    assert stats.num_padding_calls == 32 - stats.num_transitions
    assert stats.num_groups == len(groups)
    assert stats.reward_mean == pytest.approx(rewards[..., -1].mean())
    assert stats.reward_std == pytest.approx(rewards[..., -1].std())
    assert stats.gain_per_step == pytest.approx(list(np.diff(rewards, axis=2).mean(axis=(0, 1))))
    assert stats.zero_variance_frac == 0
    assert stats.ratio_mean == pytest.approx(1, abs=1e-6)
    assert stats.clipped_frac == 0
    untrained = [not flag for flag in read[0].header.plan.trained]
    assert [value == 0 for value in stats.abs_advantage_per_step] == untrained
    assert len(stats.abs_advantage_per_step) == NUM_STEPS
    assert set(stats.seconds) == {"credit", "load", "accumulate", "optimizer", "ema"}
    assert all(seconds >= 0 for seconds in stats.seconds.values())


def test_steps_are_reproducible_to_the_bit(model: Path, groups: list[RecordBatch]) -> None:
    one, other = make_learner(model), make_learner(model)
    assert one.step(groups).loss == other.step(groups).loss
    assert one.weights()[2] == other.weights()[2]


@pytest.mark.parametrize("kl_form", ["exact", "without_dt", "velocity"])
@pytest.mark.parametrize("settings", [{}, FULL], ids=["lora", "full"])
def test_kl_pulls_towards_the_reference(
    model: Path, groups: list[RecordBatch], settings: dict, kl_form: str
) -> None:
    """After a step away from it, the policy returns when the KL outweighs the objective."""
    objective = ObjectiveConfig.model_validate(
        {"clip_range": 0.1, "kl_weight": 1e4, "kl_form": kl_form}
    )
    worker = make_learner(model, learner_config(**settings), objective=objective)
    first = worker.step(groups)
    assert first.kl == 0, "the policy starts as its reference"
    assert first.num_network_calls == 2 * first.num_transitions
    assert "reference" in first.seconds
    away = worker.step(groups).kl
    for _ in range(6):
        last = worker.step(groups).kl
    assert away > 0
    assert last < 0.7 * away


def test_a_reference_pass_leaves_zero_3_in_order(
    model: Path, groups: list[RecordBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The LoRA is off, then on again, between forwards of partitioned parameters."""
    monkeypatch.setattr("learner.engine.PERSISTENT_NUMEL", 0)
    objective = ObjectiveConfig(clip_range=0.1, kl_weight=1.0)
    stages = [
        make_learner(model, learner_config(zero_stage=stage, micro_batch=8), objective=objective)
        for stage in (0, 3)
    ]
    for _ in range(2):
        plain, cut = (worker.step(groups) for worker in stages)
        assert cut.kl == pytest.approx(plain.kl, rel=1e-4, abs=1e-12)
        assert cut.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert plain.kl > 0


def test_a_kl_weight_of_zero_makes_no_reference_pass(
    model: Path, groups: list[RecordBatch]
) -> None:
    stats = make_learner(model).step(groups)
    assert stats.kl == 0
    assert "reference" not in stats.seconds


@pytest.mark.parametrize("where", ["weight", "log_prob"])
def test_a_loss_that_is_not_finite_dumps_the_batch_and_raises(
    model: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_learner(model, dump_dir=str(tmp_path / "run"))
    groups = sample_groups(make_rollout(model), worker.weights())
    tensors = worker.engine.full_tensors()
    if where == "weight":
        tensors[min(tensors)].fill_(math.nan)
        worker.engine.load_full_tensors(tensors)
    else:
        monkeypatch.setattr(
            "learner.loss.log_prob", lambda x, mean, std: mean.flatten(1).sum(1) / 0
        )
    with pytest.raises(NonFiniteLoss, match="the loss of update 0 is nan; the batch and a report"):
        worker.step(groups)
    folder = tmp_path / "run" / "nonfinite_version_000000"
    report = json.loads((folder / "report.json").read_text())
    assert report["what"] == "loss of update 0"
    assert report["value"] == "nan"
    assert report["learner"]["lora_rank"] == 4
    dumped = [read_group(batch) for batch in read_ipc(folder / "groups.arrow")]
    assert [group.group_id for group in dumped] == [0, 1]
    assert np.array_equal(dumped[0].states, read_group(groups[0]).states)


def test_a_gradient_that_is_not_finite_raises_too(
    model: Path, groups: list[RecordBatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_learner(model, dump_dir=str(tmp_path))
    before = worker.engine.full_tensors()
    backward = worker.engine.backward
    monkeypatch.setattr(
        worker.engine, "backward", lambda loss, last: backward(loss * math.inf, last=last)
    )
    with pytest.raises(NonFiniteLoss, match="the gradient norm of update 0 is nan"):
        worker.step(groups)
    assert (tmp_path / "nonfinite_version_000000" / "report.json").is_file()
    assert same_bits(worker.engine.full_tensors(), before)


def test_ema_is_the_average_of_the_weights_after_each_optimizer_step(
    model: Path, groups: list[RecordBatch]
) -> None:
    worker = make_learner(model, learner_config(ema_decay=0.75))
    expected = worker.weights()[1]
    assert same_bits(worker.weights("ema")[1], expected)
    for _ in range(3):
        worker.step(groups)
        weights = worker.weights()[1]
        expected = {name: 0.75 * e + 0.25 * weights[name] for name, e in expected.items()}
    version, average, _ = worker.weights("ema")
    assert version == 3
    assert relative_difference(average, expected) < 1e-6
    assert relative_difference(average, weights) > 1e-3


def test_without_ema_averaged_weights_are_refused(model: Path) -> None:
    worker = make_learner(model, learner_config(ema_decay=0))
    with pytest.raises(ValueError, match=r"learner\.ema_decay = 0 keeps no averaged weights"):
        worker.weights("ema")


def test_weights_are_copies(model: Path, groups: list[RecordBatch]) -> None:
    worker = make_learner(model)
    _, raw, _ = worker.weights()
    _, average, _ = worker.weights("ema")
    kept = [{n: t.clone() for n, t in tensors.items()} for tensors in (raw, average)]
    worker.step(groups)
    assert same_bits(raw, kept[0])
    assert same_bits(average, kept[1])


@pytest.mark.parametrize("settings", [{}, FULL], ids=["lora", "full"])
def test_export_writes_what_diffusers_reads(
    model: Path, groups: list[RecordBatch], tmp_path: Path, settings: dict
) -> None:
    worker = make_learner(model, learner_config(**settings))
    worker.step(groups)
    worker.export(str(tmp_path / "weights"), "raw")
    trained = worker.weights()[1]
    if settings:
        file = tmp_path / "weights" / "transformer" / "diffusion_pytorch_model.safetensors"
        exported = load_file(file)
        assert same_bits({name: exported[name] for name in trained}, trained)
        return
    path = tmp_path / "weights" / "pytorch_lora_weights.safetensors"
    renamed = {f"transformer.{n.replace('.default.', '.')}": t for n, t in trained.items()}
    assert same_bits(load_file(path), renamed)
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (metadata["transformer.r"], metadata["transformer.lora_alpha"]) == (4, 8.0)


def test_bf16_weights_are_published_as_they_are_used(model: Path) -> None:
    """Full fine-tuning in bf16: live tensors equal on both sides, masters in the checkpoint."""
    config = learner_config(precision="bf16", ratio_tolerance=0.05, **FULL)
    place = ModelConfig(path=str(model), dtype="bfloat16")
    worker = make_learner(model, config, model_config=place)
    sampler = make_rollout(model, config, model_config=place)
    for version in range(2):
        groups = sample_groups(sampler, worker.weights(), first_group=10 * version)
        worker.step(groups)
    assert {tensor.dtype for tensor in worker.weights()[1].values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in worker.engine.full_tensors().values()} == {torch.float32}


def test_precision_must_fit_the_adapter_and_the_model(model: Path) -> None:
    with pytest.raises(ValueError, match="'bf16' has no meaning with adapter = 'lora'"):
        make_learner(model, learner_config(precision="bf16"))
    with pytest.raises(
        ValueError, match=r"model\.dtype = 'float32' needs learner\.precision = 'fp32'"
    ):
        make_learner(model, learner_config(precision="bf16", adapter="full"))
    half = ModelConfig(path=str(model), dtype="float16")
    with pytest.raises(ValueError, match=r"can't train a network with model\.dtype = 'float16'"):
        make_learner(model, learner_config(adapter="full"), model_config=half)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(model: Path) -> None:
    with pytest.raises(
        ValueError, match=r"learner\.gpus_per_rank = 1, but this process sees no GPU"
    ):
        make_learner(model, learner_config(gpus_per_rank=1))
