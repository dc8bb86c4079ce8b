"""A failure reaches the caller whose images caused it and nobody else; a hang, its whole batch."""

import asyncio
import logging
import threading
from typing import Any

import numpy as np
import pytest

from rewards.base import FailureKind, RewardFailure
from rewards.server import MicroBatcher
from tests.fakes import BrightnessReward, FaultMode, FaultyReward, reward_call
from tests.unit.rewards.serving import (
    LONG_S,
    assert_brightness,
    assert_failure,
    serve,
    turn_loop,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["none", "nan", "wrong_count", "raises"])
def test_any_interleaving_gives_each_caller_exactly_its_own_answer(
    seed: int, mode: FaultMode
) -> None:
    """150 callers, each with up to 40 images (max_batch 16) after up to 5 turns of the loop."""
    rng = np.random.default_rng(seed)
    kinds = {
        "nan": FailureKind.NON_FINITE,
        "wrong_count": FailureKind.WRONG_COUNT,
        "raises": FailureKind.EXCEPTION,
    }

    async def caller(batcher: MicroBatcher, caller_id: int, num_images: int, turns: int) -> None:
        guilty = caller_id % 10 == 3
        values = [(caller_id * 31 + i * 7) % 256 for i in range(num_images)]
        call = reward_call(values, group_id=caller_id, prompt="bad" if guilty else "good")
        for _ in range(turns):
            await asyncio.sleep(0)
        answer = await batcher.submit(call)
        if guilty and mode != "none":
            assert_failure(answer, kinds[mode], num_images)
        else:
            assert_brightness(answer, values)

    async def use(batcher: MicroBatcher) -> None:
        nums, turns = rng.integers(1, 41, 150), rng.integers(0, 6, 150)
        await asyncio.gather(
            *(caller(batcher, i, int(nums[i]), int(turns[i])) for i in range(len(nums)))
        )

    reward = FaultyReward(mode)
    batcher = serve(reward, use, max_wait_s=0.001)
    assert max(reward.batches) <= 16
    assert len(reward.batches) == batcher.stats.num_batches
    assert batcher.stats.num_calls == 150
    assert sum(batcher.stats.num_failures.values()) == (0 if mode == "none" else 15)
    if mode == "none":
        assert sum(reward.batches) == batcher.stats.num_images
        assert batcher.stats.num_retries == 0


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("nan", FailureKind.NON_FINITE),
        ("wrong_count", FailureKind.WRONG_COUNT),
        ("raises", FailureKind.EXCEPTION),
        ("exits", FailureKind.EXCEPTION),
        ("cancels", FailureKind.EXCEPTION),
        ("wrong_type", FailureKind.WRONG_TYPE),
        ("no_own_column", FailureKind.WRONG_TYPE),
    ],
)
def test_a_failed_merged_batch_is_charged_to_the_guilty_caller_alone(
    mode: FaultMode, kind: FailureKind, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(batcher: MicroBatcher) -> None:
        answers = await asyncio.gather(
            batcher.submit(reward_call([1, 2])),
            batcher.submit(reward_call([3, 4, 5], prompt="bad", group_id=7)),
            batcher.submit(reward_call([6])),
        )
        assert_brightness(answers[0], [1, 2])
        assert_failure(answers[1], kind, 3)
        assert_brightness(answers[2], [6])

    reward = FaultyReward(mode)
    batcher = serve(reward, use)
    assert reward.batches == [6, 2, 3, 1]
    assert batcher.stats.num_retries == 3
    assert {k: n for k, n in batcher.stats.num_failures.items() if n} == {kind: 1}
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "now trying the 3 parts of this batch alone" in caplog.messages[0]


def test_a_part_whose_caller_has_gone_is_not_tried_again() -> None:
    class HoldsThenRaises(FaultyReward):
        def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
            self.entered.set()
            self.release.wait()
            return super().__call__(images, prompts, metadata)

    async def use(batcher: MicroBatcher) -> None:
        gone = asyncio.create_task(batcher.submit(reward_call([1, 2])))
        guilty = asyncio.create_task(batcher.submit(reward_call([3] * 3, prompt="bad")))
        await asyncio.to_thread(reward.entered.wait)
        gone.cancel()
        reward.release.set()
        assert_failure(await guilty, FailureKind.EXCEPTION, 3)

    reward = HoldsThenRaises("raises")
    batcher = serve(reward, use)
    assert reward.batches == [5, 3]
    assert batcher.stats.num_retries == 1


def test_an_exception_travels_with_its_traceback() -> None:
    async def use(batcher: MicroBatcher) -> None:
        answer = await batcher.submit(reward_call([1], prompt="bad"))
        assert isinstance(answer, RewardFailure)
        assert "ZeroDivisionError: the reward model is broken" in answer.message

    serve(FaultyReward("raises"), use)


def test_a_call_that_failed_in_one_piece_does_not_compute_the_others() -> None:
    async def use(batcher: MicroBatcher) -> None:
        answers = await asyncio.gather(
            batcher.submit(reward_call([1] * 40, prompt="bad")),
            batcher.submit(reward_call([2, 3])),
        )
        assert_failure(answers[0], FailureKind.EXCEPTION, 40)
        assert_brightness(answers[1], [2, 3])

    reward = FaultyReward("raises")
    batcher = serve(reward, use)
    assert reward.batches == [16, 2]
    assert batcher.stats.queued_images == 0
    assert batcher.stats.num_failures[FailureKind.EXCEPTION] == 1


def test_a_failure_in_the_last_piece_fails_the_whole_call_once() -> None:
    async def use(batcher: MicroBatcher) -> None:
        call = reward_call([1] * 40)
        call.prompts[-1] = "bad"
        assert_failure(await batcher.submit(call), FailureKind.NON_FINITE, 40)

    reward = FaultyReward("nan")
    batcher = serve(reward, use)
    assert reward.batches == [16, 16, 8]
    assert batcher.stats.num_failures[FailureKind.NON_FINITE] == 1


def test_columns_that_change_between_the_pieces_of_a_call_are_a_failure() -> None:
    class Moody(BrightnessReward):
        def __call__(self, *args: Any) -> Any:
            columns = super().__call__(*args)
            columns[f"extra_{len(self.batches)}"] = columns[self.name]
            return columns

    async def use(batcher: MicroBatcher) -> None:
        answer = await batcher.submit(reward_call([1] * 20))
        assert_failure(answer, FailureKind.WRONG_TYPE, 20)
        assert isinstance(answer, RewardFailure)
        assert "columns differ between batches" in answer.message

    serve(Moody(), use)


def test_a_hang_is_a_timeout_for_its_callers_and_later_callers_get_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(batcher: MicroBatcher) -> None:
        answers = await asyncio.gather(
            batcher.submit(reward_call([1, 2], prompt="bad")), batcher.submit(reward_call([3]))
        )
        assert_failure(answers[0], FailureKind.TIMEOUT, 2)
        assert_failure(answers[1], FailureKind.TIMEOUT, 1)
        assert isinstance(answers[0], RewardFailure)
        assert "a batch of 3 images took longer than timeout_s = 0.5" in answers[0].message
        assert_brightness(await batcher.submit(reward_call([4])), [4])
        reward.release.set()  # the abandoned thread now returns; nobody waits for it
        assert_brightness(await batcher.submit(reward_call([5])), [5])

    reward = FaultyReward("hangs")
    batcher = serve(reward, use, timeout_s=0.5)
    assert reward.batches == [3, 1, 1]
    assert batcher.stats.num_abandoned_threads == 1
    assert batcher.stats.num_failures[FailureKind.TIMEOUT] == 2
    assert batcher.stats.num_retries == 0
    assert "reward 'brightness' hangs: its compute thread was abandoned" in caplog.messages


class HangsByTurns(FaultyReward):
    """Each hang ends when the next one begins, or by `release`: slow rather than dead."""

    def __init__(self) -> None:
        super().__init__("hangs")
        self.first_prompts: list[str] = []

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        self.first_prompts.append(prompts[0])
        if any(self.marker in prompt for prompt in prompts):
            self.release.set()
            self.release = threading.Event()
        return super().__call__(images, prompts, metadata)


def test_a_hang_fails_those_it_was_merged_with_once_and_the_guilty_one_again() -> None:
    async def caller(batcher: MicroBatcher, i: int) -> bool:
        call = reward_call([i], prompt="bad" if i == 3 else f"good {i}")
        assert_failure(await batcher.submit(call), FailureKind.TIMEOUT, 1)
        answer = await batcher.submit(call)
        if not isinstance(answer, RewardFailure):
            assert_brightness(answer, [i])
        return isinstance(answer, RewardFailure)

    async def use(batcher: MicroBatcher) -> None:
        failed = await asyncio.gather(*(caller(batcher, i) for i in range(8)))
        assert [i for i in range(8) if failed[i]] == [3]
        # The others' turns alone are over: calls are merged again.
        await asyncio.gather(*(batcher.submit(reward_call([i])) for i in range(8)))

    reward = HangsByTurns()
    batcher = serve(reward, use, timeout_s=0.3)
    reward.release.set()
    assert reward.batches == [8, *[1] * 8, 8]
    assert batcher.stats.num_failures[FailureKind.TIMEOUT] == 9
    assert batcher.stats.num_abandoned_threads == 2


def test_pieces_to_be_taken_alone_do_not_wait_for_others() -> None:
    async def use(batcher: MicroBatcher) -> None:
        calls = [batcher.submit(reward_call([1] * 8, prompt=prompt)) for prompt in ("bad", "good")]
        for answer in await asyncio.gather(*calls):
            assert_failure(answer, FailureKind.TIMEOUT, 8)
        assert_brightness(await batcher.submit(reward_call([2])), [2])

    reward = FaultyReward("hangs")
    serve(reward, use, timeout_s=0.3, max_wait_s=LONG_S)
    reward.release.set()
    assert reward.batches == [16, 1]


def test_a_server_whose_two_threads_hang_starts_no_third_and_recovers_with_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(batcher: MicroBatcher) -> None:
        bad, good = reward_call([1], prompt="bad"), reward_call([2])
        for _ in range(2):
            assert_failure(await batcher.submit(bad), FailureKind.TIMEOUT, 1)
        assert "reward 'brightness' is stuck: two of its calls hang" in caplog.messages
        for call in (bad, good, good):
            answer = await batcher.submit(call)
            assert_failure(answer, FailureKind.TIMEOUT, 1)
            assert isinstance(answer, RewardFailure)
            assert "the server is stuck: two calls hang in the reward" in answer.message
        assert reward.batches == [1, 1]  # the others never reached the reward
        started = set(threading.enumerate()) - before
        assert [thread.name for thread in started] == ["reward-brightness"] * 2
        reward.release.set()
        for _ in range(3):
            assert_brightness(await batcher.submit(good), [2])

    reward = FaultyReward("hangs")
    before = set(threading.enumerate())
    batcher = serve(reward, use, timeout_s=0.2)
    assert reward.batches == [1, 1, 1, 1, 1]
    assert batcher.stats.num_batches == 5
    assert batcher.stats.num_abandoned_threads <= 2


def test_a_stuck_server_serves_the_waiting_call_as_soon_as_a_hang_ends() -> None:
    async def use(batcher: MicroBatcher) -> None:
        for _ in range(2):
            answer = await batcher.submit(reward_call([1], prompt="bad"))
            assert_failure(answer, FailureKind.TIMEOUT, 1)
        waiting = asyncio.create_task(batcher.submit(reward_call([2])))
        await turn_loop()
        assert not waiting.done()
        reward.release.set()
        assert_brightness(await waiting, [2])

    reward = FaultyReward("hangs")
    serve(reward, use, timeout_s=0.5)
    assert reward.batches == [1, 1, 1]


def test_a_server_is_closed_while_both_its_threads_hang() -> None:
    async def use(batcher: MicroBatcher) -> None:
        for _ in range(2):
            await batcher.submit(reward_call([1], prompt="bad"))

    reward = FaultyReward("hangs")
    serve(reward, use, timeout_s=0.1)
    reward.release.set()  # their answers find the loop gone, and nobody is told
    for thread in threading.enumerate():
        if thread.name == "reward-brightness":
            thread.join(10)
    assert reward.batches == [1, 1]


def test_the_event_loop_answers_while_the_reward_computes() -> None:
    async def use(batcher: MicroBatcher) -> None:
        slow = asyncio.create_task(batcher.submit(reward_call([1], prompt="bad")))
        await asyncio.to_thread(reward.entered.wait)
        for _ in range(100):
            await asyncio.sleep(0)
            assert batcher.stats.snapshot().num_batches == 1
        assert not slow.done()
        reward.release.set()
        assert_brightness(await slow, [1])

    reward = FaultyReward("hangs")
    serve(reward, use)


def test_a_bug_in_the_dispatcher_reaches_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise KeyError("ours")

    async def use(batcher: MicroBatcher) -> None:
        monkeypatch.setattr(batcher, "_take", broken)
        calls = [batcher.submit(reward_call([i])) for i in range(3)]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, RuntimeError)
            assert "the reward server broke: KeyError('ours')" in str(answer)
        with pytest.raises(RuntimeError, match="the server of reward 'brightness' is closed"):
            await batcher.submit(reward_call([1]))

    serve(BrightnessReward(), use)


def test_a_cancelled_dispatcher_reaches_every_caller() -> None:
    """As when a CancelledError escapes from what it awaits."""

    async def broken(_: Any) -> None:
        raise asyncio.CancelledError

    async def use(batcher: MicroBatcher) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batcher, "_compute", broken)
            calls = [batcher.submit(reward_call([i])) for i in range(3)]
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(answer, RuntimeError)
                assert "the reward server broke: CancelledError()" in str(answer)
        with pytest.raises(RuntimeError, match="the server of reward 'brightness' is closed"):
            await batcher.submit(reward_call([1]))

    serve(BrightnessReward(), use)
