"""Stepwise-Flow-GRPO's credit: the gain of each transition."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from learner.config import CreditConfig
from learner.credit.base import ScoredStates, check_rewards, require_scored


def segment_gains(reward_values: Tensor) -> tuple[Tensor, Tensor]:
    """Gains of the segments between successive scored states, and the segments' lengths.

    reward_values [G, N, T+1], NaN where not scored -> gains [G, N, S] and lengths, int64 [S] with sum T.
    When every state is scored, S = T, every length is 1 and

        gain_j = r(state j+1) - r(state j)          (docs/papers.md section 1: g_t = r_{t-1} - r_t)

    Raises ValueError unless states 0 and T are scored: a transition outside of all segments would
    have no credit.
    """
    scored = check_rewards(reward_values)
    require_scored(scored, 0, len(scored) - 1)
    states = torch.nonzero(scored).flatten()
    return reward_values[..., states].diff(dim=-1), states.diff()


@dataclass(frozen=True)
class Gain:
    """Raw credit = gain of the transition; when only some states are scored, every transition of a
    segment between two scored states carries the segment's whole gain."""

    @property
    def scored_states(self) -> ScoredStates:
        """Every state: each transition then has its own gain."""
        return "all"

    @classmethod
    def from_config(cls, config: CreditConfig) -> Self:
        """Reads nothing of `config`."""
        return cls()

    def __call__(self, reward_values: Tensor) -> Tensor:
        """Raw credit [G, N, T] of rewards [G, N, T+1]; raises ValueError on a NaN that it needs."""
        gains, lengths = segment_gains(reward_values)
        return gains.repeat_interleave(lengths, dim=-1)
