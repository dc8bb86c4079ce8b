"""Micro-batching of one reward across callers: the asyncio core of a reward server, without ray.

submit -> CallQueue of pieces -> dispatcher: fill, take, serve -> compute thread -> answers

loop        consumes          waits for                            unblocked by
submit      a call            the answers of its pieces            dispatcher
dispatcher  queued pieces     a full batch, or max_wait_s since    submit, the clock
                              the oldest piece; then the reward    compute thread, timeout_s
"""

import asyncio
import logging
import time
from functools import partial

from rewards.base import Reward, evaluate_checked
from rewards.call_queue import Answer, CallQueue, OpenCall, Piece, settle
from rewards.compute_thread import ComputeThread
from rewards.records import FailureKind, RewardCall, RewardFailure
from rewards.stats import RewardStats

logger = logging.getLogger(__name__)


class MicroBatcher:
    """Merges the calls of many callers into batches of one reward.

    Invariant: every submitted call is answered exactly once, with the values of its own images in
    their order or with a failure; a failure other than a timeout is the call's own, whatever it
    was merged with.

    A batch takes pieces (calls, cut to max_batch) in the order of arrival while they fit in
    `max_batch` images and share height and width. A merged batch that fails is computed again,
    each piece alone. A batch that passes `timeout_s` fails for every call in it (its callers must
    not wait for a hang tried again piece by piece), and as many pieces as it had are then taken
    unmerged, so that a caller who tries again fails by its own images only.

    The hung thread is abandoned and a new one takes its place, so the reward object may then be
    inside two threads at once, and never in more: when the new one hangs too while the first still
    runs, the server is stuck, and every batch waits up to `timeout_s` for either of them to end
    before it fails.

    It belongs to one event loop. Attributes: `reward`; `stats`, whose `snapshot()` that loop reads.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        max_batch: int = 256,
        max_wait_s: float = 0.02,
        timeout_s: float = 60.0,
    ) -> None:
        """Raises ValueError unless max_batch >= 1 images, max_wait_s >= 0 and timeout_s > 0."""
        if not (max_batch >= 1 and max_wait_s >= 0 and timeout_s > 0):
            raise ValueError(
                f"reward {reward.name!r}: max_batch = {max_batch}, max_wait_s = {max_wait_s}, "
                f"timeout_s = {timeout_s}; they must be >= 1, >= 0 and > 0"
            )
        self.reward = reward
        self.stats = RewardStats()
        self._max_wait_s = max_wait_s
        self._timeout_s = timeout_s
        self._queue = CallQueue(max_batch)
        self._wake = asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Future[Answer]] = set()
        self._closing = False
        self._num_alone = 0  # pieces to take unmerged
        self._thread = self._new_thread()
        self._running: asyncio.Future[Answer] | None = None  # the last call in _thread
        self._abandoned: asyncio.Future[Answer] | None = None  # the call of the abandoned thread

    async def submit(self, call: RewardCall) -> Answer:
        """Score a call of any number of images, in batches with others'.

        Cancelling it drops what is still queued. Raises RuntimeError after close().
        """
        if self._closing:
            raise RuntimeError(f"the server of reward {self.reward.name!r} is closed")
        if self._dispatcher is None:
            self._dispatcher = asyncio.create_task(self._dispatch())
            self._dispatcher.add_done_callback(self._dispatcher_ended)
        self.stats.num_calls += 1
        self.stats.num_images += call.num_images
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        owner = self._queue.put(call, answer, time.monotonic())
        self.stats.queued_images = self._queue.num_images
        self._waiting.add(answer)
        self._wake.set()
        try:
            return await answer
        finally:
            self._waiting.discard(answer)
            if answer.cancelled():
                self._discard(owner)

    async def close(self) -> None:
        """Answer what is queued without waiting for more, then stop; later submits raise.

        Closing twice is fine.
        """
        self._closing = True
        self._wake.set()
        if self._dispatcher is not None:
            await asyncio.wait([self._dispatcher])
        self._thread.close()
        for hung in self._hung():
            hung.cancel()  # its answer would reach a loop that has ended

    async def _dispatch(self) -> None:
        while await self._fill():
            await self._serve(self._take())

    async def _fill(self) -> bool:
        """Wait until a batch is due; False when closed and empty."""
        while True:
            self._wake.clear()
            num_pieces, full = self._queue.head()
            if full or self._closing or (num_pieces and self._num_alone):
                return num_pieces > 0
            remaining_s = None
            oldest_s = self._queue.oldest_s
            if oldest_s is not None:
                remaining_s = oldest_s + self._max_wait_s - time.monotonic()
                if remaining_s <= 0:
                    return True
            try:
                await asyncio.wait_for(self._wake.wait(), remaining_s)
            except TimeoutError:
                continue  # the oldest is due now, or its caller is gone

    def _take(self) -> list[Piece]:
        """Remove the next batch from the queue."""
        batch = self._queue.take(alone=self._num_alone > 0)
        self._num_alone = max(self._num_alone - 1, 0)
        now = time.monotonic()
        self.stats.queued_images = self._queue.num_images
        self.stats.wait_s += sum(now - piece.submitted_s for piece in batch)
        return batch

    async def _serve(self, batch: list[Piece]) -> None:
        """Compute a batch and answer its pieces; when that fails, compute each piece alone."""
        answer = await self._compute(RewardCall.join([piece.call for piece in batch]))
        if not isinstance(answer, RewardFailure):
            first = 0
            for piece in batch:
                stop = first + piece.call.num_images
                self._settle(piece, answer.part(first, stop))
                first = stop
        elif len(batch) == 1 or answer.kind is FailureKind.TIMEOUT:
            if len(batch) > 1:
                self._num_alone = len(batch)
            for piece in batch:
                self._settle(piece, answer)
        else:
            logger.warning("%s; now trying the %d parts of this batch alone", answer, len(batch))
            for piece in batch:
                if not piece.owner.answer.done():
                    self.stats.num_retries += 1
                    self._settle(piece, await self._compute(piece.call))

    def _settle(self, piece: Piece, answer: Answer) -> None:
        failure = settle(piece, answer, self.reward.name)
        if failure is not None:
            self._discard(piece.owner)
            self.stats.num_failures[failure.kind] += 1
            logger.warning("%s", failure)

    def _discard(self, owner: OpenCall) -> None:
        self._queue.discard(owner)
        self.stats.queued_images = self._queue.num_images

    async def _compute(self, call: RewardCall) -> Answer:
        """One call of the reward, off the event loop, under the time limit."""
        if not self._free_thread():
            await asyncio.wait(
                self._hung(), timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not self._free_thread():
                return self._timeout(
                    call,
                    "the server is stuck: two calls hang in the reward, and neither ended while "
                    f"this batch waited for timeout_s = {self._timeout_s:g}",
                )
        start = time.monotonic()
        self.stats.num_batches += 1
        self.stats.max_batch_images = max(self.stats.max_batch_images, call.num_images)
        future = self._thread.submit(partial(evaluate_checked, self.reward, call))
        self._running = asyncio.wrap_future(future)
        await asyncio.wait([self._running], timeout=self._timeout_s)
        self.stats.compute_s += time.monotonic() - start
        if self._running.done():
            return self._running.result()
        if not self._free_thread():
            logger.error("reward %r is stuck: two of its calls hang", self.reward.name)
        return self._timeout(
            call,
            f"a batch of {call.num_images} images took longer than timeout_s = "
            f"{self._timeout_s:g}; raise it, or lower max_batch",
        )

    def _hung(self) -> list[asyncio.Future[Answer]]:
        """The calls that are inside the reward, once the time limit of each has passed."""
        return [call for call in (self._abandoned, self._running) if call and not call.done()]

    def _free_thread(self) -> bool:
        """Abandon the thread if it hangs; False when another one that was abandoned still does."""
        if self._running is None or self._running.done():
            return True
        if self._abandoned is not None and not self._abandoned.done():
            return False
        self._thread.close()
        self._thread = self._new_thread()
        self._abandoned, self._running = self._running, None
        self.stats.num_abandoned_threads += 1
        logger.error("reward %r hangs: its compute thread was abandoned", self.reward.name)
        return True

    def _timeout(self, call: RewardCall, message: str) -> RewardFailure:
        return RewardFailure(
            kind=FailureKind.TIMEOUT,
            reward=self.reward.name,
            message=message,
            num_images=call.num_images,
        )

    def _dispatcher_ended(self, task: asyncio.Task[None]) -> None:
        """A bug in the dispatcher reaches every caller, so that none waits for ever."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        self._closing = True
        waiting = [answer for answer in self._waiting if not answer.done()]
        if waiting or not task.cancelled():  # the end of the loop cancels everybody: no fault
            logger.critical("the server of reward %r broke", self.reward.name, exc_info=error)
        for answer in waiting:
            answer.set_exception(RuntimeError(f"the reward server broke: {error!r}"))

    def _new_thread(self) -> ComputeThread[Answer]:
        return ComputeThread(f"reward-{self.reward.name}")
