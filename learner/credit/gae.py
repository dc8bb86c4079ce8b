"""Generalised advantage estimation over the gains."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from learner.config import CreditConfig
from learner.credit.base import ScoredStates
from learner.credit.gain import segment_gains, spread


@dataclass(frozen=True)
class Gae:
    """Raw credit A_j = sum_{l >= 0} lambda^l gain_{j+l} (docs/papers.md section 1, "variants": the value
    of a state is its clean estimate's reward, discount 1).

    lambda = 0 gives the gains, lambda = 1 the image's reward minus the state's. When only some
    states are scored the sum runs over segments (one factor lambda each), and every transition of a
    segment carries the segment's A; transitions before the first scored state have none (NaN).
    Raises ValueError when gae_lambda isn't in [0, 1].
    """

    gae_lambda: float

    def __post_init__(self) -> None:
        if not 0 <= self.gae_lambda <= 1:
            raise ValueError(f"gae_lambda = {self.gae_lambda} must be in [0, 1]")

    @property
    def scored_states(self) -> ScoredStates:
        """Every state, as for the gains."""
        return "all"

    @classmethod
    def from_config(cls, config: CreditConfig) -> Self:
        """Reads `gae_lambda`."""
        return cls(config.gae_lambda)

    def __call__(self, reward_values: Tensor) -> Tensor:
        """Raw credit [G, N, T] of rewards [G, N, T+1]; raises ValueError when the image's is NaN."""
        gains, states = segment_gains(reward_values)
        credit = torch.empty_like(gains)
        tail = torch.zeros_like(reward_values[..., 0])
        for segment in reversed(range(gains.shape[-1])):
            tail = gains[..., segment] + self.gae_lambda * tail
            credit[..., segment] = tail
        return spread(credit, states)
