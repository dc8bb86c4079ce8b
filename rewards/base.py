"""What a reward is, and the one checked way to call it. Imports no torch.

A new reward is one file with one class, and one line in `rewards.registry.REWARDS` (or
"my.module:Class" in the TOML). `rewards/jpeg.py` is the smallest example.
"""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rewards.records import FailureKind, RewardCall, RewardFailure, RewardValues

__all__ = [
    "Canaries",
    "FailureKind",
    "HasCanaries",
    "Reward",
    "RewardCall",
    "RewardFailure",
    "RewardValues",
    "evaluate_checked",
]


@runtime_checkable
class Reward(Protocol):
    """Images and prompts in, numbers out. It has no state that one call leaves for the next."""

    name: str
    """Names the column that is trained on; unique in a run."""

    def __call__(
        self, images: NDArray[np.uint8], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> dict[str, NDArray[np.float64]]:
        """Score a batch.

        Args:
            images: uint8 [B, H, W, 3], RGB, read-only (copy before changing).
            prompts: [B].
            metadata: [B]; the prompt lines' other fields, a shallow copy for each image.

        Returns:
            Columns, each float64 [B] and finite. The one called `name` is trained on; further ones
            (such as "shapes_strict") are recorded. The value of an image must not depend on the
            others of its batch, which come from any group. Raising is allowed: the call becomes a
            typed failure.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Canaries:
    """K inputs whose value is known well enough to notice a broken reward before a run starts."""

    images: NDArray[np.uint8]
    """uint8 [K, H, W, 3]"""
    prompts: list[str]
    """[K]"""
    metadata: list[dict[str, Any]]
    """[K]"""
    low: NDArray[np.float64]
    """float64 [K]; the trained-on value must be >= low."""
    high: NDArray[np.float64]
    """float64 [K]; and <= high."""

    def __post_init__(self) -> None:
        num = len(self.images)
        for field in ("prompts", "metadata", "low", "high"):
            if len(getattr(self, field)) != num:
                found = len(getattr(self, field))
                raise ValueError(f"canaries have {num} images but {found} {field}")
        if num == 0:
            raise ValueError("canaries hold no image; leave out `canaries` instead")
        if not np.all(np.asarray(self.low) <= np.asarray(self.high)):
            raise ValueError(f"canaries need low <= high, got {self.low} and {self.high}")


@runtime_checkable
class HasCanaries(Protocol):
    """A reward may also offer canaries; `rewards.canaries` runs them at start-up."""

    def canaries(self) -> Canaries: ...


class _BadAnswer(Exception):
    """The reward returned something that is not one finite number per image and column."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def evaluate_checked(reward: Reward, call: RewardCall) -> RewardValues | RewardFailure:
    """Call a reward; what comes back is checked values or a typed failure, and never an exception.

    Every column, recorded ones too, must be float-convertible, [B] and finite.
    """
    images = call.images.view()
    images.flags.writeable = False
    metadata = [
        dict(entry) for entry in call.metadata
    ]  # a group's images share one; so does a retry
    try:
        answer = cast(object, reward(images, list(call.prompts), metadata))
        return RewardValues(columns=_checked_columns(reward.name, answer, call))
    except _BadAnswer as error:
        kind, message = error.kind, str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # supervision boundary: a plug-in's code may raise anything
        kind, message = FailureKind.EXCEPTION, traceback.format_exc()
    return RewardFailure(kind=kind, reward=reward.name, message=message, num_images=call.num_images)


def _checked_columns(name: str, answer: object, call: RewardCall) -> dict[str, NDArray[np.float64]]:
    """The reward's answer as float64 columns [B]; raises _BadAnswer."""
    if not isinstance(answer, Mapping):
        raise _BadAnswer(
            FailureKind.WRONG_TYPE,
            f"returned {type(answer).__name__}, not a dict of columns {{{name!r}: float64 [B]}}",
        )
    items = cast(Mapping[object, object], answer)
    if name not in items:
        names = sorted(map(str, items))
        message = f"own column {name!r} is missing; it returned {names}"
        raise _BadAnswer(FailureKind.WRONG_TYPE, message)
    columns: dict[str, NDArray[np.float64]] = {}
    for column, values in items.items():
        if not isinstance(column, str):
            raise _BadAnswer(FailureKind.WRONG_TYPE, f"column name {column!r} is not a str")
        columns[column] = _checked_column(column, values, call)
    return columns


def _checked_column(column: str, values: object, call: RewardCall) -> NDArray[np.float64]:
    """One column as a fresh float64 [B]; raises _BadAnswer."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; tensors on a GPU
        message = f"column {column!r} does not convert to an array: {error}"
        raise _BadAnswer(FailureKind.WRONG_TYPE, message) from error
    if array.dtype.kind not in "biuf":
        raise _BadAnswer(
            FailureKind.WRONG_TYPE,
            f"column {column!r} has dtype {array.dtype}, no real number; return float64 [B]",
        )
    if array.shape != (call.num_images,):
        raise _BadAnswer(
            FailureKind.WRONG_COUNT,
            f"column {column!r} has shape {list(array.shape)} for {call.num_images} images; "
            f"expected [{call.num_images}]",
        )
    checked = array.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(checked))
    if bad.size:
        raise _BadAnswer(
            FailureKind.NON_FINITE,
            f"column {column!r} has {bad.size} non-finite of {call.num_images} values; "
            f"the first is {checked[bad[0]]} for {call.describe(int(bad[0]))}",
        )
    return checked
