"""What the tests of the reward server share."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from rewards.base import FailureKind, RewardFailure, RewardValues
from rewards.server import MicroBatcher
from tests.fakes import BrightnessReward

LONG_S = 3600.0
Answer = RewardValues | RewardFailure


def serve(
    reward: BrightnessReward,
    use: Callable[[MicroBatcher], Coroutine[Any, Any, Any]],
    **settings: float,
) -> MicroBatcher:
    """Run `use` with a batcher, close it, and return it for its stats."""

    async def main() -> MicroBatcher:
        options: dict[str, Any] = {"max_batch": 16, "max_wait_s": 0.0} | settings
        batcher = MicroBatcher(reward, **options)
        await use(batcher)
        await batcher.close()
        return batcher

    return asyncio.run(asyncio.wait_for(main(), 30))


async def turn_loop() -> None:
    """Let everything run that can run without waiting."""
    for _ in range(20):
        await asyncio.sleep(0)


def assert_brightness(answer: Answer, values: list[int]) -> None:
    assert isinstance(answer, RewardValues), answer
    np.testing.assert_array_equal(answer.columns["brightness"], np.array(values) / 255)
    np.testing.assert_array_equal(answer.columns["brightness_first"], values)


def assert_failure(answer: Answer, kind: FailureKind, num_images: int) -> None:
    assert isinstance(answer, RewardFailure), answer
    assert (answer.kind, answer.num_images) == (kind, num_images)
    assert answer.reward == "brightness"
