"""Flow-GRPO's credit: the final image's reward, for every transition."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from learner.config import CreditConfig
from learner.credit.base import ScoredStates, check_rewards, require_scored


@dataclass(frozen=True)
class Outcome:
    """Raw credit r_0 (the image's reward, state T here) for each transition (docs/papers.md section
    2)."""

    @property
    def scored_states(self) -> ScoredStates:
        """The image only."""
        return "final"

    @classmethod
    def from_config(cls, config: CreditConfig) -> Self:
        """Reads nothing of `config`."""
        return cls()

    def __call__(self, reward_values: Tensor) -> Tensor:
        """Raw credit [G, N, T] of rewards [G, N, T+1]; raises ValueError on a NaN that it needs."""
        num_steps = reward_values.shape[-1] - 1
        require_scored(check_rewards(reward_values), num_steps)
        return reward_values[..., -1:].repeat(1, 1, num_steps)
