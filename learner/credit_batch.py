"""From sealed groups to advantages: the part of a learner step that every rank does for ALL
groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.credit import Advantages, CreditAssigner
from rollout.flow.gaussian import LOG_PROB_REDUCTION
from rollout.trajectory import GroupTrajectories, Header, RecordBatch, read_group


@dataclass(frozen=True, slots=True)
class CreditBatch:
    """Sealed groups, equal in shape and step plan, and what their rewards say. G groups, M = G N
    trajectories.

    Trajectory g N + n is sample n of the g-th group.
    """

    groups: list[GroupTrajectories]
    rewards: Tensor
    """float64 [G, N, T + 1], NaN where unscored."""
    advantages: Advantages
    """values float64 [G, N, T]."""

    @property
    def header(self) -> Header:
        """How all of the groups were sampled."""
        return self.groups[0].header

    @property
    def valid(self) -> np.ndarray:
        """bool [M, T]: the transitions that are trained."""
        return np.tile(self.header.plan.trained, (self.rewards.shape[0] * self.rewards.shape[1], 1))

    def name(self, trajectory: int) -> str:
        """What a person calls a trajectory."""
        group, sample = divmod(trajectory, self.rewards.shape[1])
        return f"group {self.groups[group].group_id}, sample {sample}"


def read_batch(batches: Sequence[RecordBatch], credit: CreditAssigner) -> CreditBatch:
    """Read sealed groups and assign credit; latents stay where Arrow has them.

    Raises ValueError when there is no group, one isn't sealed, they differ in size or step plan,
    their log-probs are reduced in another way than ours, or the credit rule can't use the rewards.
    """
    if not batches:
        raise ValueError("a learner step needs at least one group")
    groups = [read_group(batch) for batch in batches]
    first = groups[0]
    for group in groups:
        if len(group.states) != len(first.states):
            raise ValueError(
                f"group {group.group_id} has {len(group.states)} trajectories, "
                f"group {first.group_id} has {len(first.states)}; "
                "all groups of a batch must be of one size"
            )
        if group.header != first.header:
            raise ValueError(
                f"groups {first.group_id} and {group.group_id} were sampled with different step "
                "plans or settings; one batch needs one"
            )
    if first.header.log_prob_reduction != LOG_PROB_REDUCTION:
        raise ValueError(
            f"log-probs were recorded with reduction {first.header.log_prob_reduction!r}, "
            f"this code uses {LOG_PROB_REDUCTION!r}"
        )
    totals = torch.from_numpy(np.stack([group.rewards for group in groups]))
    trained = torch.tensor(first.header.plan.trained)
    return CreditBatch(groups, totals, credit.assign(totals, trained))


def mean_gain_per_step(totals: Tensor) -> list[float | None]:
    """[T] for rewards `totals` [G, N, T + 1]: mean over trajectories of r(state j+1) - r(state j),
    None where one of them wasn't scored."""
    gains = totals.diff(dim=-1).mean(dim=(0, 1))
    return [None if gain != gain else gain for gain in gains.tolist()]
