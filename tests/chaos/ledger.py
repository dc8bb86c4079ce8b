"""Whether a run's books are right: which groups were consumed, what was counted, what the weights became. Pure.

The surviving history is `metrics.jsonl`, of which the last writing of an iteration counts
(`cluster.run_folder.read_metrics`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.books import check_books
from learner.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What was found; nothing is wrong when all three are empty."""

    lost: list[int]
    """Positions that no iteration consumed."""
    doubled: list[int]
    """Positions that were consumed more than once."""
    wrong: list[str]
    """Everything else that differs from the undisturbed run, in words."""

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)


def check_ledger(
    rows: Sequence[Mapping[str, Any]],
    calm: Sequence[Mapping[str, Any]],
    *,
    groups_per_batch: int,
    max_policy_lag: int,
    num_iterations: int,
) -> Ledger:
    """Compare the rows of a run with those of the undisturbed run of the same config."""
    books = check_books(rows, num_iterations * groups_per_batch)
    wrong = []
    if [row["iteration"] for row in rows] != list(range(1, num_iterations + 1)):
        wrong.append(f"iterations {[row['iteration'] for row in rows]}")
    if books.strangers:
        wrong.append(f"groups {books.strangers} are beyond the run's end")
    wrong += _order(rows)
    for row, twin in zip(rows, calm, strict=False):
        wrong += _differences(row, twin, max_policy_lag)
    return Ledger(lost=books.lost, doubled=books.doubled, wrong=wrong)


def _order(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A later iteration belongs to the same incarnation or a later one."""
    seen = [row["incarnation"] for row in rows]
    return [] if seen == sorted(seen) else [f"incarnations go back: {seen}"]


def _differences(row: Mapping[str, Any], twin: Mapping[str, Any], lag: int) -> list[str]:
    """What an iteration did otherwise than the undisturbed run's; numbers are compared to the bit."""
    where = f"iteration {row['iteration']}"
    version = max(0, row["iteration"] - 1 - lag)
    wrong = [
        f"{where}: {key} is {row[key]}, not {twin[key]}"
        for key in ("group_ids", "counts", "policy_version", "reward", "loss", "grad_norm")
        if row[key] != twin[key]
    ]
    if row["policy_version"] != version:
        wrong.append(f"{where}: sampled with version {row['policy_version']}, not {version}")
    return wrong


def check_weights(found: Checkpoint, calm: Checkpoint) -> list[str]:
    """Say which tensors of the last checkpoint differ from the undisturbed run's in any bit."""
    wrong = []
    numbers = [
        (kept.policy_version, kept.optimizer.step, kept.state["consumed"]) for kept in (found, calm)
    ]
    if numbers[0] != numbers[1]:
        wrong.append(f"version, optimizer step, iterations are {numbers[0]}, not {numbers[1]}")
    for name in ("weights", "ema", "exp_avg", "exp_avg_sq"):
        mine, other = _tensors(found, name), _tensors(calm, name)
        if mine.keys() != other.keys():
            wrong.append(f"{name}: other tensors {sorted(mine.keys() ^ other.keys())}")
        wrong += [
            f"{name}: {key} differs"
            for key in sorted(mine.keys() & other.keys())
            if not torch.equal(mine[key], other[key])
        ]
    return wrong


def _tensors(kept: Checkpoint, name: str) -> Mapping[str, Tensor]:
    if name in ("exp_avg", "exp_avg_sq"):
        return getattr(kept.optimizer, name)
    return getattr(kept, name) or {}


def check_counts(summary: Mapping[str, Any], calm: Mapping[str, Any]) -> list[str]:
    """Say where the run's totals, which a checkpoint carries over every roll-back, differ."""
    return [
        f"summary: {key} is {summary[key]}, not {calm[key]}"
        for key in ("status", "iterations", "counts", "evaluation_counts", "evaluation")
        if summary[key] != calm[key]
    ]
