"""The contract of an objective."""

from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from learner.config import ObjectiveConfig


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """Per transition, never reduced: the one global denominator is the caller's."""

    loss: Tensor
    """[B], differentiable; NaN or infinite when the log-probs or the advantage are."""
    ratio: Tensor
    """[B], detached: pi_new / pi_old, neither clipped nor truncated."""
    clipped: Tensor
    """bool [B], detached: transitions whose loss has no gradient."""
    truncated: Tensor | None = None
    """bool [B], detached: ratios above the largest that the objective takes; None stands for
    none."""


class Objective(Protocol):
    """From log-probs (mean over latent dimensions) and advantages to a loss to be minimised."""

    @classmethod
    def from_config(cls, config: ObjectiveConfig) -> Self:
        """The objective with the settings it reads from `config`."""
        ...

    def __call__(
        self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor
    ) -> ObjectiveOutput:
        """All arguments [B]; log_prob carries the gradient."""
        ...
