"""PPO's clipped surrogate."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from learner.config import ObjectiveConfig
from learner.objective.base import ObjectiveOutput

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-this before exp, which float32 would overflow at 88."""


@dataclass(frozen=True)
class PpoClip:
    """loss = max(-A min(r, m), -A clip(r, 1 - c, 1 + c)), r = exp(log_prob - old_log_prob).

    c is clip_range, m is max_ratio; None stands for no bound. Source: docs/papers.md section 5.
    Where A > 0 the clip bounds the loss already, so m only matters where A < 0, beyond r = m: there
    the loss is the constant -A m.

    A finite log-ratio beyond +-MAX_LOG_RATIO is clamped and counted as clipped. One that isn't
    finite gives a loss of NaN, whatever the clip makes of it, so that the caller's check for a
    non-finite loss sees it. Raises ValueError unless clip_range > 0 and max_ratio > 1 + clip_range:
    a lower one would put itself in the clip's place.
    """

    clip_range: float
    max_ratio: float | None = None

    def __post_init__(self) -> None:
        if not self.clip_range > 0:
            raise ValueError(f"clip_range = {self.clip_range} must be > 0")
        if self.max_ratio is not None and not self.max_ratio > 1 + self.clip_range:
            raise ValueError(
                f"objective.max_ratio = {self.max_ratio} must be above 1 + objective.clip_range = "
                f"{1 + self.clip_range}, where the clip takes over; raise it, or leave it out"
            )

    @classmethod
    def from_config(cls, config: ObjectiveConfig) -> Self:
        """Reads `clip_range` and `max_ratio`."""
        return cls(config.clip_range, config.max_ratio)

    def __call__(
        self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor
    ) -> ObjectiveOutput:
        """All arguments [B]; log_prob carries the gradient."""
        assert log_prob.shape == old_log_prob.shape == advantage.shape, "arguments must all be [B]"
        log_ratio = log_prob - old_log_prob
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        bounded = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        truncated = ratio if self.max_ratio is None else ratio.clamp(max=self.max_ratio)
        loss = torch.maximum(-advantage * truncated, -advantage * bounded)
        with torch.no_grad():
            beyond = ratio > truncated
            outside = torch.where(advantage > 0, ratio > bounded, (ratio < bounded) | beyond)
            clipped = (outside & (advantage != 0)) | (log_ratio.abs() > MAX_LOG_RATIO)
            zero_or_nan = log_ratio - log_ratio
        return ObjectiveOutput(
            loss=loss + zero_or_nan,
            ratio=ratio.detach(),
            clipped=clipped.detach(),
            truncated=beyond,
        )
