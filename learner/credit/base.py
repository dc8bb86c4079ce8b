"""The contract of a credit rule, and checks that every rule needs."""

from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from learner.config import CreditConfig

ScoredStates = Literal["all", "trained", "final"]
"""Every state | both ends of each trained transition, and the image | the image alone."""


class CreditRule(Protocol):
    """From the rewards of a trajectory's states to the raw credit of its transitions.

    `reward_values` [G, N, T+1] in float64: G groups of N trajectories, state 0 = pure noise, state T =
    image, NaN where a state was not scored. The result [G, N, T] holds in column j the credit of
    the transition from state j to state j + 1, NaN where the scored states say nothing about it
    (the normaliser refuses that at a trained step). Raises ValueError when a state that every
    transition needs is NaN.
    """

    @property
    def scored_states(self) -> ScoredStates:
        """States that `scored_states = "auto"` scores for this rule."""
        ...

    @classmethod
    def from_config(cls, config: CreditConfig) -> Self:
        """The rule with the settings it reads from `config`."""
        ...

    def __call__(self, reward_values: Tensor) -> Tensor:
        """Raw credit [G, N, T]."""
        ...


def check_rewards(reward_values: Tensor) -> Tensor:
    """Which states are scored, bool [T+1].

    Raises ValueError when a reward is infinite, or a state is scored for some trajectories only.
    """
    assert reward_values.ndim == 3, f"{tuple(reward_values.shape)} is not [G, N, T+1]"
    if bool(reward_values.isinf().any()):
        raise ValueError(
            f"infinite reward at (group, sample, state) {_first(reward_values.isinf())}"
        )
    missing = reward_values.isnan().flatten(0, 1)
    mixed = missing.any(dim=0) & ~missing.all(dim=0)
    if bool(mixed.any()):
        raise ValueError(
            f"states {_indices(mixed)} are scored for some trajectories and NaN for others; "
            f"first NaN at (group, sample, state) {_first(reward_values.isnan() & mixed)}"
        )
    return ~missing.all(dim=0)


def require_scored(scored: Tensor, *states: int) -> None:
    """Raise ValueError, naming them, when some of `states` are not among the `scored` [T+1]."""
    lacking = [state for state in states if not scored[state]]
    if lacking:
        raise ValueError(
            f"states {lacking} must be scored (0 = pure noise, {len(scored) - 1} = image); "
            f"scored states are {_indices(scored)}"
        )


def _indices(mask: Tensor) -> list[int]:
    return [int(i) for i in torch.nonzero(mask).flatten()]


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.nonzero(mask)[0])
