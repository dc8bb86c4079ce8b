"""The engine against torch's AdamW by hand, on a network with odd sizes and a frozen part."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from learner.config import LearnerConfig
from learner.engine import Engine, deepspeed_config, init_distributed
from tests.unit.learner.helpers import relative_difference, same_bits

CONFIG = LearnerConfig(lr=1e-2, weight_decay=1e-2, max_grad_norm=0.5)
STAGES = (0, 1, 2, 3)


def make_network() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    network[2].requires_grad_(False)
    return network


def make_engine(zero_stage: int = 0, network: nn.Module | None = None, **changes: object) -> Engine:
    init_distributed(0, 1, gpu=False)
    config = CONFIG.model_copy(update={"zero_stage": zero_stage, **changes})
    return Engine(network or make_network(), config, rank=0, world_size=1)


def inputs(number: int) -> Tensor:
    return torch.randn(8, 7, generator=torch.Generator().manual_seed(number))


def train(engine: Engine, first: int, last: int) -> list[float]:
    """Steps first .. last - 1, each of two micro-batches; the losses are sums over a denominator of 8."""
    norms = []
    for number in range(first, last):
        for part, is_last in zip(inputs(number).chunk(2), (False, True), strict=True):
            engine.backward(engine.network(part).square().sum() / 8, last=is_last)
        norms.append(engine.step())
    return norms


def train_by_hand(last: int) -> tuple[dict[str, Tensor], list[float], torch.optim.AdamW, nn.Module]:
    network = make_network()
    live = {name: p for name, p in network.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        live.values(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2
    )
    norms = []
    for number in range(last):
        (network(inputs(number)).square().sum() / 8).backward()
        norms.append(float(nn.utils.clip_grad_norm_(live.values(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in live.items()}, norms, optimizer, network


@pytest.mark.parametrize("stage", STAGES)
def test_steps_are_those_of_torchs_adamw_with_clipping(stage: int) -> None:
    engine = make_engine(stage)
    norms = train(engine, 0, 3)
    by_hand, norms_by_hand, _, _ = train_by_hand(3)
    assert min(norms) > 0.5, "clipping should be at work"
    assert norms == pytest.approx(norms_by_hand, rel=1e-5)
    assert relative_difference(engine.full_tensors(), by_hand) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_state_is_torchs_by_parameter_name(stage: int) -> None:
    engine = make_engine(stage)
    train(engine, 0, 3)
    _, _, optimizer, network = train_by_hand(3)
    state = engine.optimizer_state()
    assert state.step == 3
    for key in ("exp_avg", "exp_avg_sq"):
        expected = {
            n: optimizer.state[p][key] for n, p in network.named_parameters() if p.requires_grad
        }
        assert relative_difference(getattr(state, key), expected) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_state_loaded_into_any_stage_goes_on_as_if_nothing_had_happened(stage: int) -> None:
    whole, half = make_engine(0), make_engine(0)
    train(whole, 0, 4)
    train(half, 0, 2)
    other = make_engine(stage)
    train(other, 0, 1)  # something to overwrite
    other.load_full_tensors(half.full_tensors())
    other.load_optimizer_state(half.optimizer_state())
    assert same_bits(other.full_tensors(), half.full_tensors())
    train(other, 2, 4)
    assert other.optimizer_state().step == 4
    assert relative_difference(other.full_tensors(), whole.full_tensors()) < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_state_loaded_before_the_first_step_counts(stage: int) -> None:
    whole = make_engine(0)
    train(whole, 0, 2)
    fresh = make_engine(stage)
    assert fresh.optimizer_state().step == 0
    assert all(not t.any() for t in fresh.optimizer_state().exp_avg.values())
    fresh.load_full_tensors(whole.full_tensors())
    fresh.load_optimizer_state(whole.optimizer_state())
    train(whole, 2, 3)
    train(fresh, 2, 3)
    assert relative_difference(fresh.full_tensors(), whole.full_tensors()) < 1e-6


@pytest.mark.parametrize("num_good", [0, 2])
@pytest.mark.parametrize(
    ("precision", "stage"),
    [*(("fp32", stage) for stage in STAGES), *(("bf16", stage) for stage in (1, 2, 3))],
)
def test_a_gradient_that_is_not_finite_moves_nothing(
    stage: int, precision: str, num_good: int
) -> None:
    """Before the first step there are no moments to spoil; after two there are. bf16 without ZeRO
    runs as stage 1."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    engine = make_engine(stage, make_network().to(dtype), precision=precision)

    def backward(number: int, factor: float) -> None:
        loss = engine.network(inputs(number).to(dtype)).float().square().sum() / 8
        engine.backward(loss * factor, last=True)

    for number in range(num_good):
        backward(number, 1.0)
        assert math.isfinite(engine.step())
    before, state = engine.full_tensors(), engine.optimizer_state()
    backward(num_good, math.inf)
    assert not math.isfinite(engine.step())
    after = engine.optimizer_state()
    assert same_bits(engine.full_tensors(), before)
    assert after.step == state.step == num_good
    assert same_bits(after.exp_avg, state.exp_avg)
    assert same_bits(after.exp_avg_sq, state.exp_avg_sq)


@pytest.mark.parametrize("stage", STAGES)
def test_discarded_gradients_are_forgotten(stage: int) -> None:
    engine, clean = make_engine(stage), make_engine(stage)
    engine.backward(engine.network(inputs(9)).square().sum(), last=True)
    engine.discard_gradients()
    assert train(engine, 0, 1) == train(clean, 0, 1)
    assert same_bits(engine.full_tensors(), clean.full_tensors())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bf16_weights_train_on_float32_masters(stage: int) -> None:
    """20 steps of 1e-4, each below bf16's resolution at 1: without masters nothing would move."""
    network = nn.Linear(4, 1, bias=False)
    nn.init.ones_(network.weight)
    changes = {"precision": "bf16", "lr": 1e-4, "weight_decay": 0.0}
    engine = make_engine(stage, network.bfloat16(), **changes)
    for _ in range(20):
        engine.backward(
            engine.network(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum(), last=True
        )
        engine.step()
    assert engine.dtypes == {"weight": torch.bfloat16}
    assert engine.full_tensors()["weight"].tolist() == [pytest.approx([1 - 20e-4] * 4, abs=1e-6)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_state_opens_in_another_engine(stage: int) -> None:
    source = make_engine(min(stage, 2), make_network().bfloat16(), precision="bf16")
    other = make_engine(stage, make_network().bfloat16(), precision="bf16")
    for number in range(2):
        source.backward(source.network(inputs(number).bfloat16()).float().square().sum(), last=True)
        source.step()
    other.load_full_tensors(source.full_tensors())
    other.load_optimizer_state(source.optimizer_state())
    assert same_bits(other.full_tensors(), source.full_tensors())
    assert same_bits(other.optimizer_state().exp_avg, source.optimizer_state().exp_avg)
    x = inputs(2).bfloat16()
    with torch.no_grad():
        assert torch.equal(other.network(x), source.network(x))


def test_a_frozen_network_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequential has no trainable parameter"):
        make_engine(network=make_network().requires_grad_(False))


def test_tensors_of_another_network_are_refused() -> None:
    engine = make_engine()
    tensors = {name + "x": tensor for name, tensor in engine.full_tensors().items()}
    with pytest.raises(ValueError, match="8 names differ from the network's trainable tensors"):
        engine.load_full_tensors(tensors)


def test_a_process_keeps_its_place_among_the_ranks() -> None:
    init_distributed(0, 1, gpu=False)
    with pytest.raises(ValueError, match="this process is rank 0 of 1 already, not 1 of 2"):
        init_distributed(1, 2, gpu=False)


def test_bf16_without_zero_runs_as_stage_one() -> None:
    config = CONFIG.model_copy(update={"precision": "bf16", "zero_stage": 0})
    assert deepspeed_config(config, 10)["zero_optimization"]["stage"] == 1


def test_no_compiler_is_needed(repo_root: Path) -> None:
    """A fresh process without compiler or cached builds joins, steps and gathers (ZeRO-0 and 1)."""
    code = (
        "from tests.unit.learner.test_engine import make_engine, train\n"
        "for stage in (0, 1):\n"
        "    engine = make_engine(stage)\n"
        "    train(engine, 0, 1)\n"
        "    assert engine.optimizer_state().step == 1\n"
    )
    environment = os.environ | {"PATH": "/nonexistent", "TORCH_EXTENSIONS_DIR": "/nonexistent"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
