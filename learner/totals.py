"""Sums over the micro-batches of an update, then over the ranks, then the step's LearnerStats."""

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.batching import Update
from learner.credit_batch import CreditBatch, mean_gain_per_step
from learner.engine import Engine
from learner.loss import LossTerms
from learner.stats import LearnerStats


class UpdateTotals:
    """Collects LossTerms without waiting for the device; `reduce` makes numbers of them, the same
    on every rank."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        self._worst = torch.zeros(2, device=device)
        self._log_ratios: list[Tensor] = []
        self.loss = self.kl = 0.0
        """Means over the update's transitions."""
        self.ratio_sum = self.num_clipped = self.num_truncated = 0.0
        self.max_abs_log_ratio = self.max_ratio_deviation = 0.0

    def add(self, terms: LossTerms, weight: Tensor) -> None:
        """Take in one micro-batch; rows of weight 0 repeat others and only count in the maxima."""
        counted = weight > 0
        ratio_sum, num_clipped = (terms.ratio * counted).sum(), (terms.clipped & counted).sum()
        num_truncated = (terms.truncated & counted).sum()
        sums = (terms.loss, terms.kl, ratio_sum, num_clipped, num_truncated)
        self._sums += torch.stack([value.double() for value in sums])
        self._log_ratios.append(terms.log_ratio.abs())
        maxima = torch.stack([self._log_ratios[-1].max(), (terms.ratio - 1).abs().max()])
        self._worst = torch.maximum(self._worst, maxima)

    def reduce(self, engine: Engine) -> None:
        """Combine over the ranks and fill the public fields."""
        sums = engine.all_reduce(self._sums, "sum")
        self.loss, self.kl, self.ratio_sum, self.num_clipped, self.num_truncated = sums.tolist()
        worst = engine.all_reduce(self._worst, "max")
        self.max_abs_log_ratio, self.max_ratio_deviation = worst.tolist()

    def worst(self, update: Update) -> tuple[int, int]:
        """Return (trajectory, step) of this rank's largest |log ratio|."""
        flat = int(torch.stack(self._log_ratios).argmax())
        micro, row = divmod(flat, len(self._log_ratios[0]))
        batch = update.micro_batches[micro]
        return int(batch.trajectories[row]), int(batch.steps[row])


def learner_stats(
    batch: CreditBatch,
    updates: Sequence[Update],
    totals: Sequence[UpdateTotals],
    *,
    on_policy: bool,
    grad_norm: list[float],
    num_ranks: int,
    num_network_calls: int,
    seconds: dict[str, float],
) -> LearnerStats:
    """Put a step's numbers together. num_network_calls are this rank's, filled-up rows included."""
    num_transitions = sum(update.num_transitions for update in updates)
    rows = [len(micro.weights) for update in updates for micro in update.micro_batches]
    calls_per_row = num_network_calls // sum(rows)
    images = batch.rewards[..., -1]
    return LearnerStats(
        policy_version=min(group.policy_version for group in batch.groups),
        on_policy=on_policy,
        loss=sum(total.loss for total in totals) / len(totals),
        kl=sum(total.kl for total in totals) / len(totals),
        ratio_mean=sum(total.ratio_sum for total in totals) / num_transitions,
        ratio_max_deviation=max(total.max_ratio_deviation for total in totals),
        max_abs_log_ratio=totals[0].max_abs_log_ratio,
        clipped_frac=sum(total.num_clipped for total in totals) / num_transitions,
        truncated_frac=sum(total.num_truncated for total in totals) / num_transitions,
        grad_norm=grad_norm,
        reward_mean=float(images.mean()),
        reward_std=float(images.std(correction=0)),
        gain_per_step=mean_gain_per_step(batch.rewards),
        abs_advantage_per_step=batch.advantages.values.abs().mean(dim=(0, 1)).tolist(),
        zero_variance_frac=float(batch.advantages.zero_variance.double().mean()),
        num_groups=len(batch.groups),
        num_transitions=num_transitions,
        num_network_calls=num_transitions * calls_per_row,
        num_padding_calls=(sum(rows) * num_ranks - num_transitions) * calls_per_row,
        seconds=seconds,
    )
