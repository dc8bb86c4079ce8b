"""Sealed groups made by the real RolloutWorker on a tiny SD3, and learners to train on them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from learner.config import CreditConfig, LearnerConfig, ObjectiveConfig
from learner.worker import LearnerWorker
from rollout.config import ModelConfig, RolloutConfig, SamplingConfig
from rollout.records import AdapterSpec, GroupRequest, SliceRequest
from rollout.trajectory import RecordBatch, seal_group
from rollout.worker import RolloutWorker

PROMPTS = ("a red circle", "two blue squares", "a star", "a green ring")
NUM_STEPS, NUM_SAMPLES = 4, 4
SEED = 5


def learner_config(**changes: Any) -> LearnerConfig:
    """Small steps that move the weights visibly."""
    settings: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0, "micro_batch": 16, "lr": 1e-3}
    return LearnerConfig(**(settings | changes))


def make_learner(
    model: Path,
    config: LearnerConfig | None = None,
    *,
    credit: CreditConfig | None = None,
    objective: ObjectiveConfig | None = None,
    guidance_scale: float = 1.0,
    model_config: ModelConfig | None = None,
    **place: Any,
) -> LearnerWorker:
    return LearnerWorker(
        model_config or ModelConfig(path=str(model)),
        config or learner_config(),
        credit or CreditConfig(),
        objective or ObjectiveConfig(clip_range=0.1),
        guidance_scale=guidance_scale,
        run_seed=SEED,
        **place,
    )


def make_rollout(
    model: Path,
    config: LearnerConfig | None = None,
    *,
    model_config: ModelConfig | None = None,
    **sampling: Any,
) -> RolloutWorker:
    config = config or learner_config()
    settings: dict[str, Any] = {"num_steps": NUM_STEPS, "eta": 0.7}
    return RolloutWorker(
        model_config or ModelConfig(path=str(model)),
        SamplingConfig(**(settings | sampling)),
        RolloutConfig(),
        AdapterSpec(adapter=config.adapter, rank=config.lora_rank, alpha=config.lora_alpha),
        SEED,
    )


def sample_groups(
    worker: RolloutWorker,
    weights: tuple[int, Mapping[str, Tensor], str],
    *,
    num_groups: int = 2,
    num_samples: int = NUM_SAMPLES,
    first_group: int = 0,
) -> list[RecordBatch]:
    """Load a version into the worker and let it sample groups; rewards are drawn from the group's number."""
    version, tensors, checksum = weights
    assert worker.load_weights(version, tensors).checksum == checksum
    requests = [
        SliceRequest(
            group=GroupRequest(
                group_id=first_group + i,
                prompt=PROMPTS[i % len(PROMPTS)],
                metadata={},
                num_samples=num_samples,
                run_seed=SEED,
                policy_version=version,
            ),
            first=0,
            count=num_samples,
            score_initial=True,
        )
        for i in range(num_groups)
    ]
    slices = worker.sample(requests).slices
    return [seal(piece, first_group + i, num_samples) for i, piece in enumerate(slices)]


def seal(piece: RecordBatch, group_id: int, num_samples: int) -> RecordBatch:
    """Random rewards at every state; x_T is shared, and so is its reward."""
    rewards = np.random.default_rng(group_id).random((num_samples, NUM_STEPS + 1))
    rewards[:, 0] = rewards[0, 0]
    return seal_group([piece], rewards, {"fake": rewards})


def relative_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors together."""
    assert a.keys() == b.keys()
    assert len(b) > 0
    squares = sum(float((a[n].double() - b[n].double()).square().sum()) for n in b)
    norm = sum(float(b[n].double().square().sum()) for n in b)
    assert norm > 0
    return (squares / norm) ** 0.5


def same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(bool((a[n] == b[n]).all()) for n in b)
