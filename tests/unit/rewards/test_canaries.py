"""A reward that does not give what it says that it gives is caught before a run starts."""

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from rewards.base import Canaries
from rewards.canaries import (
    CanaryError,
    canary_call,
    judge_canaries,
    raise_for_canaries,
)
from rewards.jpeg import JpegReward
from rewards.server import MicroBatcher
from tests.fakes import BrightnessReward, FaultyReward, judge_own_canaries


class Inverted(BrightnessReward):
    """White is dark."""

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> dict[str, Any]:
        columns = super().__call__(images, prompts, metadata)
        return {self.name: 1 - columns[self.name]}


class NoCanaries:
    name = "plain"

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> dict[str, Any]:
        return {self.name: np.zeros(len(images))}


def test_a_right_reward_passes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="rewards.canaries")
    result = judge_own_canaries(BrightnessReward())
    raise_for_canaries(result)
    assert (result.num_canaries, result.problems) == (2, [])
    assert caplog.messages == ["reward 'brightness': 2 canaries pass"]


def test_jpeg_passes() -> None:
    assert judge_own_canaries(JpegReward()).num_canaries == 2


def test_a_reward_without_canaries_passes_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    result = judge_own_canaries(NoCanaries())
    raise_for_canaries(result)
    assert (result.num_canaries, result.problems) == (0, [])
    assert str(result) == "reward 'plain': no canaries"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_wrong_value_is_reported_with_image_value_and_interval() -> None:
    result = judge_own_canaries(Inverted())
    assert result.problems == [
        "canary 0 (prompt 'a red circle'): value 1 lies outside [0, 0]",
        "canary 1 (prompt 'a red circle'): value 0 lies outside [1, 1]",
    ]
    with pytest.raises(CanaryError, match=r"(?s)2 canary problems.*value 1 lies.*would train on"):
        raise_for_canaries(result)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("nan", r"scoring the 2 canaries failed \(non_finite\): column 'brightness' has 2"),
        ("raises", r"(?s)failed \(exception\): Traceback.*ZeroDivisionError"),
    ],
)
def test_a_reward_that_fails_on_its_canaries_is_reported(mode: Any, message: str) -> None:
    result = judge_own_canaries(FaultyReward(mode, marker=""))
    with pytest.raises(CanaryError, match=message):
        raise_for_canaries(result)


def test_bounds_are_inclusive() -> None:
    canaries = BrightnessReward().canaries()
    assert isinstance(canaries, Canaries)
    np.testing.assert_array_equal(canaries.low, canaries.high)
    assert judge_own_canaries(BrightnessReward()).problems == []


def test_canaries_run_through_a_server_under_its_timeout() -> None:
    async def main() -> list[str]:
        batcher = MicroBatcher(reward, max_wait_s=0, timeout_s=0.05)
        canaries = reward.canaries()
        answer = await batcher.submit(canary_call(canaries))
        await batcher.close()
        return judge_canaries(reward.name, canaries, answer).problems

    reward = FaultyReward("hangs", marker="")
    try:
        (problem,) = asyncio.run(main())
    finally:
        reward.release.set()
    assert problem.startswith("scoring the 2 canaries failed (timeout): a batch of 2 images took")
