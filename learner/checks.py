"""What must hold in a learner and in every step of it, and what is said and kept when it
doesn't."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from learner.config import LearnerConfig
from learner.credit_batch import CreditBatch
from rollout.config import ModelConfig
from rollout.trajectory import RecordBatch, write_ipc


class RatioGateError(RuntimeError):
    """On-policy, the ratio is not 1: rollout and learner do not compute the same policy."""


class NonFiniteLoss(RuntimeError):
    """A loss or gradient is NaN or infinite. The batch was dumped; this learner is of no more
    use."""


def find_device(config: LearnerConfig) -> torch.device:
    """The device of a rank; ValueError when a GPU is asked for that isn't there."""
    if config.gpus_per_rank == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"learner.gpus_per_rank = {config.gpus_per_rank:g}, but this process sees no GPU; "
            "set it to 0, or give the cluster GPUs"
        )
    return torch.device("cuda")


def check_precision(model: ModelConfig, config: LearnerConfig) -> None:
    """Check that live tensors are of the same dtype here as in the rollout; ValueError.

    A LoRA is float32 on both sides; a fully trained network has model.dtype in the rollout.
    """
    if config.adapter == "lora" and config.precision != "fp32":
        raise ValueError(
            f"learner.precision = {config.precision!r} has no meaning with adapter = 'lora': a LoRA "
            f"is float32 over a network of model.dtype (here {model.dtype!r}); set precision = 'fp32'"
        )
    wanted = {"float32": "fp32", "bfloat16": "bf16"}.get(model.dtype)
    if config.adapter == "full" and wanted is None:
        raise ValueError(
            f"adapter = 'full' can't train a network with model.dtype = {model.dtype!r}; "
            "use float32 or bfloat16"
        )
    if config.adapter == "full" and config.precision != wanted:
        raise ValueError(
            f"adapter = 'full' trains the network in its own dtype: model.dtype = {model.dtype!r} "
            f"needs learner.precision = {wanted!r}, not {config.precision!r}"
        )


def check_guidance(batch: CreditBatch, guidance_scale: float) -> None:
    """Check that the groups were sampled with the learner's guidance; ValueError."""
    recorded = batch.header.plan.guidance_scale
    if recorded != guidance_scale:
        raise ValueError(
            f"the groups were sampled with guidance_scale = {recorded:g}, the learner's is "
            f"{guidance_scale:g}; the ratio would compare two policies"
        )


def is_on_policy(batch: CreditBatch, version: int) -> bool:
    """Whether all groups come from weights `version`; ValueError when one is from a later one."""
    versions = {group.policy_version for group in batch.groups}
    if max(versions) > version:
        raise ValueError(
            f"a group was sampled with policy version {max(versions)}, the learner is at {version}: "
            "it belongs to another run (train on recorded groups with recorded=True), or the learner "
            "was rolled back"
        )
    return versions == {version}


def check_ratio(worst: float, tolerance: float, where: str, version: int) -> None:
    """The on-policy gate; RatioGateError. `where` names this rank's worst transition."""
    if worst <= tolerance:
        return
    raise RatioGateError(
        f"on-policy ratio gate at policy version {version}: |log ratio| reaches {worst:.3g} before "
        f"the first optimizer step (worst on this rank: {where}), learner.ratio_tolerance is "
        f"{tolerance:g}. Rollout and learner do not compute the same policy. Likely causes, in this "
        "order: the published weights never reached the rollout's live module (compare its "
        "checksums); the two sides differ in dtype (model.dtype, learner.precision) or in batch "
        "size, which moves bf16 numbers; guidance or the empty prompt differ; library versions "
        "differ between the machines"
    )


def non_finite_loss(what: str, value: float, folder: Path) -> NonFiniteLoss:
    """The error for a loss or norm of `value`; the batch lies in `folder`."""
    return NonFiniteLoss(
        f"the {what} is {value}; the batch and a report are in {folder}. Go on from the last "
        "checkpoint. Look for a reward that isn't finite, weights that grew (learner.lr too large), "
        "or float16"
    )


def dump_batch(folder: Path, batches: Sequence[RecordBatch], report: dict[str, Any]) -> None:
    """Write the groups (groups.arrow, Arrow IPC) and `report` (report.json) to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_ipc(folder / "groups.arrow", batches)
    text = json.dumps(report, indent=2)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
