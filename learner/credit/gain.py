"""Stepwise-Flow-GRPO's credit: the gain of each transition."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from learner.config import CreditConfig
from learner.credit.base import ScoredStates, check_rewards, require_scored


def segment_gains(reward_values: Tensor) -> tuple[Tensor, Tensor]:
    """Gains of the segments between successive scored states, and those states.

    reward_values [G, N, T+1], NaN where not scored -> gains [G, N, S] and states, int64 [S+1]: segment s
    leads from states[s] to states[s+1]. When every state is scored, S = T and

        gain_j = r(state j+1) - r(state j)          (docs/papers.md section 1: g_t = r_{t-1} - r_t)

    Raises ValueError unless state T, the image, is scored.
    """
    scored = check_rewards(reward_values)
    require_scored(scored, len(scored) - 1)
    states = torch.nonzero(scored).flatten()
    return reward_values[..., states].diff(dim=-1), states


def spread(segment_values: Tensor, states: Tensor) -> Tensor:
    """[G, N, T] from [G, N, S]: every transition of a segment carries the segment's whole value.

    Transitions before the first scored state lie in no segment and get NaN: it isn't known what
    they did to the reward. No harm where they aren't trained.
    """
    inside = segment_values.repeat_interleave(states.diff(), dim=-1)
    return torch.nn.functional.pad(inside, (int(states[0]), 0), value=torch.nan)


@dataclass(frozen=True)
class Gain:
    """Raw credit = gain of the transition; when only some states are scored, every transition of a
    segment between two scored states carries the segment's whole gain, and transitions before the
    first scored state have none (NaN)."""

    @property
    def scored_states(self) -> ScoredStates:
        """Both ends of each trained transition, which then has its own gain."""
        return "trained"

    @classmethod
    def from_config(cls, config: CreditConfig) -> Self:
        """Reads nothing of `config`."""
        return cls()

    def __call__(self, reward_values: Tensor) -> Tensor:
        """Raw credit [G, N, T] of rewards [G, N, T+1]; raises ValueError when the image's is NaN."""
        return spread(*segment_gains(reward_values))
