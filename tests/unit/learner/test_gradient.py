"""The accumulated gradient against the papers' formulas written slowly with plain autograd."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.config import CreditConfig, ObjectiveConfig
from learner.phases import Phases
from learner.worker import LearnerWorker
from rollout.config import ModelConfig
from rollout.families.registry import load_family
from rollout.families.trainable import attach_lora, load_tensors, trainable_tensors
from rollout.trajectory import RecordBatch, read_group, read_ipc, write_ipc
from tests.unit.learner.helpers import (
    SEED,
    learner_config,
    make_learner,
    make_rollout,
    relative_difference,
    sample_groups,
)

CLIP_RANGE = 2e-3
"""So narrow that the moved weights below are clipped in some transitions and not in others."""


def moved(learner_worker: LearnerWorker, scale: float = 0.05) -> dict[str, Tensor]:
    """Load weights at some distance from those that sampled, so that ratios differ from 1."""
    generator = torch.Generator().manual_seed(9)
    tensors = {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in learner_worker.engine.full_tensors().items()
    }
    learner_worker.engine.load_full_tensors(tensors)
    return tensors


Slow = Callable[[NDArray[np.float64], list[int]], NDArray[np.float64]]
"""(rewards [N, T + 1], trained steps) -> advantages [N, trained steps]."""


def joint_gains(rewards: NDArray[np.float64], steps: list[int]) -> NDArray[np.float64]:
    """docs/papers.md section 1: gains, one mean and std over all of a group's."""
    gains = np.diff(rewards, axis=1)[:, steps]
    return np.clip((gains - gains.mean()) / (gains.std() + 1e-4), -5, 5)


def group_outcome(rewards: NDArray[np.float64], steps: list[int]) -> NDArray[np.float64]:
    """docs/papers.md section 2: the image's reward, standardised in its group, at every step."""
    images = rewards[:, -1]
    values = np.clip((images - images.mean()) / (images.std() + 1e-4), -5, 5)
    return np.repeat(values[:, None], len(steps), axis=1)


def slow_gradient(
    model: Path,
    groups: list[RecordBatch],
    tensors: dict[str, Tensor],
    clip_range: float,
    *,
    advantages_of: Slow = joint_gains,
    guidance_scale: float = 1.0,
) -> tuple[dict[str, Tensor], int]:
    """One transition at a time: docs/papers.md section 1 and (c). Also counts clipped transitions."""
    family = load_family(ModelConfig(path=str(model)), torch.device("cpu"), parts=("network",))
    attach_lora(family.network, 4, 8.0, family.lora_targets, SEED)
    load_tensors(family.network, tensors)
    losses, num_clipped = [], 0
    for group in map(read_group, groups):
        plan = group.header.plan
        steps = [i for i in range(plan.num_steps) if plan.trained[i]]
        advantages = advantages_of(group.rewards, steps)
        prompt, empty = (
            {
                name.removeprefix(prefix): torch.tensor(value)[None]
                for name, value in group.embeddings.items()
                if name.startswith(prefix)
            }
            for prefix in ("conditioning.", "negative.")
        )
        for n in range(len(group.states)):
            for column, i in enumerate(steps):
                x, x_next = torch.tensor(group.states[n, i : i + 2])
                t, t_next, k, s = (
                    plan.times[i],
                    plan.times[i + 1],
                    plan.noise_coefficient[i],
                    plan.std[i],
                )
                v = family.velocity(family.network, x[None], torch.tensor([t]), prompt)[0]
                if guidance_scale != 1:
                    v_e = family.velocity(family.network, x[None], torch.tensor([t]), empty)[0]
                    v = v_e + guidance_scale * (v - v_e)
                mean = (1 - t_next) * (x - t * v) + k * (x + (1 - t) * v)
                squares = (x_next - mean) ** 2 / (2 * s**2)
                logp = (-squares - np.log(s) - 0.5 * np.log(2 * np.pi)).mean()
                ratio = (logp - group.log_probs[n, i]).exp()
                bounded = ratio.clamp(1 - clip_range, 1 + clip_range)
                advantage = advantages[n, column]
                losses.append(-torch.min(ratio * advantage, bounded * advantage))
                num_clipped += not torch.equal(ratio * advantage, -losses[-1])
    torch.stack(losses).mean().backward()
    live = trainable_tensors(family.network)
    return {name: p.grad for name, p in live.items() if p.grad is not None}, num_clipped


@pytest.fixture(scope="module")
def truth(model: Path, groups: list[RecordBatch]) -> dict[str, Tensor]:
    tensors = moved(make_learner(model))
    found, num_clipped = slow_gradient(model, groups, tensors, CLIP_RANGE)
    assert 0 < num_clipped < 24, "the example should have clipped and unclipped transitions"
    return found


# 24 transitions: one micro-batch too large, one exact, several, several with the last filled up.
@pytest.mark.parametrize("micro_batch", [32, 24, 8, 5])
def test_gradient_is_that_of_the_formula_whatever_the_micro_batch(
    model: Path, groups: list[RecordBatch], truth: dict[str, Tensor], micro_batch: int
) -> None:
    config = learner_config(micro_batch=micro_batch)
    worker = make_learner(model, config, objective=ObjectiveConfig(clip_range=CLIP_RANGE))
    moved(worker)
    assert relative_difference(worker.gradient(groups), truth) < 1e-5


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_gradient_is_the_same_under_every_zero_stage(
    model: Path, groups: list[RecordBatch], truth: dict[str, Tensor], zero_stage: int
) -> None:
    config = learner_config(micro_batch=8, zero_stage=zero_stage)
    worker = make_learner(model, config, objective=ObjectiveConfig(clip_range=CLIP_RANGE))
    moved(worker)
    assert relative_difference(worker.gradient(groups), truth) < 1e-5


def test_gradient_can_be_asked_for_twice_and_leaves_no_trace(
    model: Path, groups: list[RecordBatch]
) -> None:
    worker, untouched = make_learner(model), make_learner(model)
    first, second = worker.gradient(groups), worker.gradient(groups)
    assert relative_difference(first, second) == 0
    assert worker.step(groups).grad_norm == untouched.step(groups).grad_norm


def test_the_updates_of_a_batch_sum_up_to_its_gradient(
    model: Path, groups: list[RecordBatch]
) -> None:
    """Two updates of 12 transitions: the whole gradient is their mean, as long as nothing steps."""
    worker = make_learner(model)
    whole = worker.gradient(groups)
    work = worker._prepare(groups, 2, Phases(worker.engine.device))
    parts = []
    for number in range(2):
        worker._accumulate(work, number)
        parts.append(worker.engine.gradients())
        worker.engine.discard_gradients()
    mean = {name: (parts[0][name] + parts[1][name]) / 2 for name in whole}
    assert relative_difference(mean, whole) < 1e-5


def test_recorded_files_give_the_live_gradient(
    model: Path, groups: list[RecordBatch], tmp_path: Path
) -> None:
    write_ipc(tmp_path / "batch.arrow", groups)
    live = make_learner(model).gradient(groups)
    recorded = make_learner(model).gradient(read_ipc(tmp_path / "batch.arrow"))
    assert relative_difference(recorded, live) == 0


def test_recorded_files_give_another_credit_rules_gradient(
    model: Path, groups: list[RecordBatch], truth: dict[str, Tensor], tmp_path: Path
) -> None:
    write_ipc(tmp_path / "batch.arrow", groups)
    recording = read_ipc(tmp_path / "batch.arrow")
    worker = make_learner(
        model,
        credit=CreditConfig(rule="outcome", normaliser="group"),
        objective=ObjectiveConfig(clip_range=CLIP_RANGE),
    )
    expected, _ = slow_gradient(
        model, recording, moved(worker), CLIP_RANGE, advantages_of=group_outcome
    )
    assert relative_difference(worker.gradient(recording), expected) < 1e-5
    assert relative_difference(expected, truth) > 0.1, "the two rules agree on this example"


def test_gradient_of_guided_groups_goes_through_both_velocities(model: Path) -> None:
    sampler = make_rollout(model, guidance_scale=3.0, cfg_mode="train")
    worker = make_learner(model, guidance_scale=3.0, objective=ObjectiveConfig(clip_range=10.0))
    guided = sample_groups(sampler, worker.weights())
    start = worker.engine.full_tensors()
    expected, _ = slow_gradient(model, guided, moved(worker), 10.0, guidance_scale=3.0)
    assert relative_difference(worker.gradient(guided), expected) < 1e-5
    worker.engine.load_full_tensors(start)
    stats = worker.step(guided)
    assert stats.num_network_calls == 2 * stats.num_transitions
