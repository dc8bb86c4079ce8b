"""Working, validating stand-ins for the parts of the system: they check what they are given."""

import asyncio
import threading
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rewards.base import Canaries, HasCanaries, Reward, RewardCall, evaluate_checked
from rewards.canaries import CanaryResult, canary_call, judge_canaries

# ------------------------------------------------------------------------------------------ rewards


def reward_call(
    values: list[int], *, group_id: int = 0, prompt: str = "a red circle", size: int = 4
) -> RewardCall:
    """A call of flat images, uint8 [len(values), size, size, 3]; image i has grey value values[i].

    BrightnessReward gives values[i] / 255 for it, exactly.
    """
    num = len(values)
    grey = np.array(values, np.uint8)
    return RewardCall(
        images=np.broadcast_to(grey[:, None, None, None], (num, size, size, 3)).copy(),
        prompts=[prompt] * num,
        metadata=[{} for _ in range(num)],
        group_ids=np.full(num, group_id, np.int64),
        samples=np.arange(num, dtype=np.int32),
        states=np.zeros(num, np.int32),
    )


def judge_own_canaries(reward: Reward) -> CanaryResult:
    """The reward's canaries, scored without a server."""
    canaries = reward.canaries() if isinstance(reward, HasCanaries) else None
    answer = None if canaries is None else evaluate_checked(reward, canary_call(canaries))
    return judge_canaries(reward.name, canaries, answer)


class BrightnessReward:
    """Mean brightness in [0, 1] of each image (flat images: exactly grey / 255).

    A second column, "brightness_first", is the first pixel's red. `batches` lists the number of
    images of every call that it got.
    """

    name = "brightness"

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(
        self, images: NDArray[np.uint8], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> dict[str, NDArray[np.float64]]:
        self._validate(images, prompts, metadata)
        self.batches.append(len(images))
        return {
            self.name: images.mean(axis=(1, 2, 3), dtype=np.float64) / 255,
            "brightness_first": images[:, 0, 0, 0].astype(np.float64),
        }

    def canaries(self) -> Canaries:
        """Black is 0, white is 1."""
        call = reward_call([0, 255])
        bounds = np.array([0.0, 1.0])
        return Canaries(
            images=call.images,
            prompts=call.prompts,
            metadata=call.metadata,
            low=bounds,
            high=bounds,
        )

    def _validate(
        self, images: NDArray[np.uint8], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> None:
        assert isinstance(images, np.ndarray), type(images)
        assert images.dtype == np.uint8, images.dtype
        assert images.ndim == 4, images.shape
        assert images.shape[3] == 3, images.shape
        assert not images.flags.writeable, "a reward must not be able to change the caller's images"
        assert len(prompts) == len(metadata) == len(images) > 0
        assert all(isinstance(prompt, str) for prompt in prompts)
        assert all(isinstance(entry, dict) for entry in metadata)


FaultMode = Literal[
    "none",
    "nan",
    "wrong_count",
    "raises",
    "exits",
    "cancels",
    "hangs",
    "wrong_type",
    "no_own_column",
]


class FaultyReward(BrightnessReward):
    """Brightness, except that a batch with a prompt that holds `marker` goes wrong.

    nan: that image's value is NaN | wrong_count: one value too few | raises: ZeroDivisionError |
    exits: SystemExit | cancels: asyncio.CancelledError | hangs: until `release` is set |
    wrong_type: a list instead of columns | no_own_column: only the recorded column. `marker` = ""
    hits every batch. `entered` is set once a hang has begun.
    """

    def __init__(self, mode: FaultMode, marker: str = "bad") -> None:
        super().__init__()
        self.mode: FaultMode = mode
        self.marker = marker
        self.entered = threading.Event()
        self.release = threading.Event()

    def __call__(
        self, images: NDArray[np.uint8], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> dict[str, NDArray[np.float64]]:
        columns = super().__call__(images, prompts, metadata)
        hit = np.array([self.marker in prompt for prompt in prompts])
        if not hit.any():
            return columns
        match self.mode:
            case "none":
                pass
            case "nan":
                columns[self.name][hit] = np.nan
            case "wrong_count":
                columns[self.name] = columns[self.name][:-1]
            case "raises":
                raise ZeroDivisionError("the reward model is broken")
            case "exits":
                raise SystemExit(3)
            case "cancels":
                raise asyncio.CancelledError
            case "hangs":
                self.entered.set()
                self.release.wait()
            case "wrong_type":
                return columns[self.name].tolist()
            case "no_own_column":
                del columns[self.name]
        return columns
