"""What travels to and from a reward: one call, its values, or a typed failure. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardCall:
    """Score these images; the tags say whose they are.

    Example: RewardCall(images=np.zeros((1, 32, 32, 3), np.uint8), prompts=["a red circle"],
    metadata=[{}], group_ids=np.array([7]), samples=np.array([0], np.int32),
    states=np.array([10], np.int32))

    Raises AssertionError when the fields do not fit together: a call is made by our own code.
    """

    images: NDArray[np.uint8]
    """uint8 [B, H, W, 3], RGB; previews or final images. B >= 1."""
    prompts: list[str]
    """[B]"""
    metadata: list[dict[str, Any]]
    """[B]; each prompt line's other fields."""
    group_ids: NDArray[np.int64]
    """int64 [B]"""
    samples: NDArray[np.int32]
    """int32 [B]; which trajectory of its group."""
    states: NDArray[np.int32]
    """int32 [B]; which state's clean estimate (0 = pure noise, T = image)."""

    def __post_init__(self) -> None:
        assert self.images.dtype == np.uint8, f"images are {self.images.dtype}, not uint8"
        shape = self.images.shape
        assert len(shape) == 4, f"images are {list(shape)}, not [B, H, W, 3]"
        assert shape[0] >= 1, "a call without images"
        assert shape[3] == 3, f"images are {list(shape)}, not [B, H, W, 3]"
        for field in ("prompts", "metadata", "group_ids", "samples", "states"):
            num = len(getattr(self, field))
            assert num == shape[0], f"{num} {field} for {shape[0]} images"

    @property
    def num_images(self) -> int:
        """B."""
        return len(self.images)

    def part(self, first: int, stop: int) -> "RewardCall":
        """Images first .. stop - 1 as a call of their own; arrays are views."""
        return RewardCall(
            images=self.images[first:stop],
            prompts=self.prompts[first:stop],
            metadata=self.metadata[first:stop],
            group_ids=self.group_ids[first:stop],
            samples=self.samples[first:stop],
            states=self.states[first:stop],
        )

    @staticmethod
    def join(calls: "Sequence[RewardCall]") -> "RewardCall":
        """One call with the images of all, in order; they share H and W."""
        assert calls, "nothing to join"
        if len(calls) == 1:
            return calls[0]
        return RewardCall(
            images=np.concatenate([call.images for call in calls]),
            prompts=[prompt for call in calls for prompt in call.prompts],
            metadata=[entry for call in calls for entry in call.metadata],
            group_ids=np.concatenate([call.group_ids for call in calls]),
            samples=np.concatenate([call.samples for call in calls]),
            states=np.concatenate([call.states for call in calls]),
        )

    def describe(self, index: int) -> str:
        """Names image `index` for a message."""
        return (
            f"image {index} (group {self.group_ids[index]}, sample {self.samples[index]}, "
            f"state {self.states[index]}, prompt {self.prompts[index]!r})"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardValues:
    """Every number that a reward gave, finite and one per image."""

    columns: dict[str, NDArray[np.float64]]
    """float64 [B] each; the one named like the reward is trained on, the others are recorded."""

    def part(self, first: int, stop: int) -> "RewardValues":
        """Values of images first .. stop - 1, copied."""
        parts = {name: values[first:stop].copy() for name, values in self.columns.items()}
        return RewardValues(columns=parts)

    @staticmethod
    def join(values: "Sequence[RewardValues]") -> "RewardValues":
        """The values of all, in order. Raises ValueError when their columns differ."""
        assert values, "nothing to join"
        if len(values) == 1:
            return values[0]
        names = list(values[0].columns)
        for other in values[1:]:
            if set(other.columns) != set(names):
                raise ValueError(
                    f"columns differ between batches: {sorted(names)} and {sorted(other.columns)}; "
                    "a reward must return the same columns every time"
                )
        return RewardValues(
            columns={name: np.concatenate([v.columns[name] for v in values]) for name in names}
        )


class FailureKind(StrEnum):
    """Why there are no values."""

    EXCEPTION = "exception"
    """The reward raised."""
    WRONG_COUNT = "wrong_count"
    """A column is not one number per image."""
    WRONG_TYPE = "wrong_type"
    """Not a dict of real-valued arrays, or the reward's own column is missing."""
    NON_FINITE = "non_finite"
    """NaN or infinity in a column."""
    TIMEOUT = "timeout"
    """The reward took longer than timeout_s."""
    SERVER_LOST = "server_lost"
    """The process that computes the reward was lost each time that it had these images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFailure:
    """No value for any image of the call, and why; never a silent 0."""

    kind: FailureKind
    reward: str
    """The reward's name."""
    message: str
    """For people; holds the traceback when the reward raised."""
    num_images: int
    """Images of the call that failed."""

    def __str__(self) -> str:
        where = f"reward {self.reward!r} failed on {self.num_images} images"
        return f"{where} ({self.kind}): {self.message}"
