"""Every caller gets its own values, however calls are merged, split and timed.

Nothing here measures time: batches are held back by events or a long max_wait_s, and counted.
"""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from rewards.base import FailureKind, RewardCall
from rewards.server import MicroBatcher
from tests.fakes import BrightnessReward, FaultyReward, reward_call
from tests.unit.rewards.serving import LONG_S, assert_brightness, serve, turn_loop


def test_one_call_gets_its_values() -> None:
    async def use(batcher: MicroBatcher) -> None:
        assert_brightness(await batcher.submit(reward_call([0, 51, 255])), [0, 51, 255])

    serve(BrightnessReward(), use)


def test_calls_of_many_callers_fill_batches_and_the_rest_goes_after_max_wait() -> None:
    async def use(batcher: MicroBatcher) -> None:
        loads = [[10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3] for i in range(9)]
        answers = await asyncio.gather(*(batcher.submit(reward_call(load)) for load in loads))
        for answer, load in zip(answers, loads, strict=True):
            assert_brightness(answer, load)

    reward = BrightnessReward()
    batcher = serve(reward, use, max_wait_s=0.01)
    assert reward.batches == [16, 16, 4]
    assert batcher.stats.num_batches == 3
    assert batcher.stats.max_batch_images == 16


def test_a_batch_that_is_not_full_waits_for_more_callers() -> None:
    async def use(batcher: MicroBatcher) -> None:
        first = asyncio.create_task(batcher.submit(reward_call([1] * 10)))
        await turn_loop()
        assert reward.batches == []
        assert batcher.stats.snapshot().queued_images == 10
        answer = await batcher.submit(reward_call([2] * 6))
        assert_brightness(await first, [1] * 10)
        assert_brightness(answer, [2] * 6)
        assert batcher.stats.queued_images == 0

    reward = BrightnessReward()
    serve(reward, use, max_wait_s=LONG_S)
    assert reward.batches == [16]


def test_a_call_that_does_not_fit_any_more_closes_the_batch() -> None:
    async def use(batcher: MicroBatcher) -> None:
        first = asyncio.create_task(batcher.submit(reward_call([1] * 10)))
        second = asyncio.create_task(batcher.submit(reward_call([2] * 10)))
        assert_brightness(await first, [1] * 10)
        assert not second.done()
        third = asyncio.create_task(batcher.submit(reward_call([3] * 6)))
        assert_brightness(await second, [2] * 10)
        assert_brightness(await third, [3] * 6)

    reward = BrightnessReward()
    serve(reward, use, max_wait_s=LONG_S)
    assert reward.batches == [10, 16]


def test_a_call_larger_than_max_batch_is_split_and_put_together_in_order() -> None:
    async def use(batcher: MicroBatcher) -> None:
        large, small = list(range(37)), list(range(100, 110))
        answers = await asyncio.gather(
            batcher.submit(reward_call(large)), batcher.submit(reward_call(small))
        )
        assert_brightness(answers[0], large)
        assert_brightness(answers[1], small)

    reward = BrightnessReward()
    serve(reward, use)
    assert reward.batches == [16, 16, 15]


def test_calls_that_arrive_while_a_batch_computes_are_merged() -> None:
    async def use(batcher: MicroBatcher) -> None:
        slow = asyncio.create_task(batcher.submit(reward_call([9], prompt="bad")))
        await asyncio.to_thread(reward.entered.wait)
        later = [asyncio.create_task(batcher.submit(reward_call([i, i]))) for i in range(8)]
        await turn_loop()
        assert batcher.stats.snapshot().queued_images == 16
        assert not slow.done()
        reward.release.set()
        assert_brightness(await slow, [9])
        for i, answer in enumerate(await asyncio.gather(*later)):
            assert_brightness(answer, [i, i])

    reward = FaultyReward("hangs")
    serve(reward, use, max_wait_s=0)
    assert reward.batches == [1, 16]


def test_images_of_different_size_are_not_merged() -> None:
    async def use(batcher: MicroBatcher) -> None:
        calls = [reward_call([i], size=size) for i, size in enumerate([4, 4, 8, 4])]
        answers = await asyncio.gather(*(batcher.submit(call) for call in calls))
        for i, answer in enumerate(answers):
            assert_brightness(answer, [i])

    reward = BrightnessReward()
    serve(reward, use)
    assert reward.batches == [2, 1, 1]


def test_the_reward_runs_in_one_thread_that_is_not_the_event_loops() -> None:
    class NotesThread(BrightnessReward):
        def __call__(self, *args: Any) -> Any:
            threads.add(threading.current_thread())
            return super().__call__(*args)

    async def use(batcher: MicroBatcher) -> None:
        for i in range(5):
            await batcher.submit(reward_call([i]))

    threads: set[threading.Thread] = set()
    serve(NotesThread(), use)
    (thread,) = threads
    assert thread is not threading.current_thread()
    assert thread.name == "reward-brightness"
    assert thread.daemon
    thread.join(timeout=10)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------ closing, cancelling


def test_close_answers_what_is_queued_without_waiting_for_more_and_then_refuses() -> None:
    async def use(batcher: MicroBatcher) -> None:
        queued = [asyncio.create_task(batcher.submit(reward_call([i] * 10))) for i in range(3)]
        await turn_loop()
        await batcher.close()
        for i, answer in enumerate(await asyncio.gather(*queued)):
            assert_brightness(answer, [i] * 10)
        with pytest.raises(RuntimeError, match="the server of reward 'brightness' is closed"):
            await batcher.submit(reward_call([1]))

    reward = BrightnessReward()
    serve(reward, use, max_wait_s=LONG_S)
    assert reward.batches == [10, 10, 10]


def test_closing_an_unused_batcher_ends_at_once() -> None:
    async def use(batcher: MicroBatcher) -> None:
        await batcher.close()

    assert serve(BrightnessReward(), use).stats.num_batches == 0


def test_a_cancelled_callers_images_are_dropped_and_the_others_go_on() -> None:
    async def use(batcher: MicroBatcher) -> None:
        gone = asyncio.create_task(batcher.submit(reward_call([1] * 10)))
        stays = asyncio.create_task(batcher.submit(reward_call([2] * 4)))
        await turn_loop()
        gone.cancel()
        await turn_loop()
        assert batcher.stats.queued_images == 4
        assert_brightness(await batcher.submit(reward_call([3] * 12)), [3] * 12)
        assert_brightness(await stays, [2] * 4)

    reward = BrightnessReward()
    serve(reward, use, max_wait_s=LONG_S)
    assert reward.batches == [16]


def test_a_caller_cancelled_during_its_batch_does_not_disturb_the_others() -> None:
    async def use(batcher: MicroBatcher) -> None:
        gone = asyncio.create_task(batcher.submit(reward_call([1], prompt="bad")))
        stays = asyncio.create_task(batcher.submit(reward_call([2])))
        await asyncio.to_thread(reward.entered.wait)
        gone.cancel()
        await turn_loop()
        reward.release.set()
        assert_brightness(await stays, [2])

    reward = FaultyReward("hangs")
    batcher = serve(reward, use)
    assert reward.batches == [2]
    assert sum(batcher.stats.num_failures.values()) == 0


# ------------------------------------------------------------------------------ stats, construction


def test_stats_count_calls_images_batches_and_time() -> None:
    async def use(batcher: MicroBatcher) -> None:
        before = batcher.stats.snapshot()
        await asyncio.gather(*(batcher.submit(reward_call([i] * 5)) for i in range(4)))
        await batcher.submit(reward_call([1] * 20, prompt="bad"))
        assert before.num_calls == 0
        assert before.num_failures == dict.fromkeys(FailureKind, 0)

    stats = serve(FaultyReward("nan"), use).stats.snapshot()
    assert (stats.num_calls, stats.num_images) == (5, 40)
    assert (stats.num_batches, stats.num_retries) == (3, 0)
    assert stats.max_batch_images == 16
    assert stats.num_failures[FailureKind.NON_FINITE] == 1
    assert stats.queued_images == 0
    assert stats.compute_s > 0
    assert stats.wait_s >= 0


@pytest.mark.parametrize(
    "settings", [{"max_batch": 0}, {"max_wait_s": -1.0}, {"timeout_s": 0.0}, {"timeout_s": np.nan}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(ValueError, match=rf"reward 'brightness': .*{name} = {value}"):
        MicroBatcher(BrightnessReward(), **settings)


def test_a_batch_keeps_the_tags_with_their_images() -> None:
    class Spy(BrightnessReward):
        def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
            seen.extend(zip(images[:, 0, 0, 0].tolist(), prompts, metadata, strict=True))
            return super().__call__(images, prompts, metadata)

    async def use(batcher: MicroBatcher) -> None:
        calls: list[RewardCall] = []
        for i in range(3):
            call = reward_call([i, i + 10], prompt=f"prompt {i}")
            for entry in call.metadata:
                entry["tag"] = i
            calls.append(call)
        await asyncio.gather(*(batcher.submit(call) for call in calls))

    seen: list[tuple[int, str, dict[str, Any]]] = []
    serve(Spy(), use)
    assert seen == [(v, f"prompt {i}", {"tag": i}) for i in range(3) for v in (i, i + 10)]
