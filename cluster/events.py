"""The event loop: futures and timers, and who is told. One thread; it blocks nowhere but in `turn`.

A future ends in one of three ways: an answer, a PartLost (whoever was to answer is gone, or has let its deadline
pass), or the error that the call raised. Whoever expects it says what each means; what nobody handles ends the loop.
Nobody handles the loss of what the learner was to answer: it ends a turn of the run, which goes back to a checkpoint.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.backend import Backend, Future, PartLost

LONGEST_WAIT_S = 1.0
"""So often the loop looks whether it was asked to stop: a signal's handler can't end a wait."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Who is told how a future ended."""

    on_answer: Callable[[Any], None]
    on_lost: Callable[[PartLost], None] | None
    on_error: Callable[[Exception], None] | None
    background: bool
    since_s: float
    timeout_s: float


class RanDry(RuntimeError):
    """Somebody waits for what nothing that is under way will bring: a bug of ours."""


class StopRequested(Exception):
    """SIGTERM or Ctrl-C: end in good order."""


class Events:
    """Futures and timers of one run."""

    def __init__(self, backend: Backend, learner_timeout_s: float = math.inf):
        """`learner_timeout_s` is the deadline of every future whose loss nobody handles."""
        self.backend, self._learner_timeout_s = backend, learner_timeout_s
        self.busy_s = 0.0
        """Seconds spent in handlers, on the process's own clock; the rest of a run is waiting."""
        self.stop_requested = False
        """Set by a signal's handler; `until` then raises StopRequested, once."""
        self._pending: dict[Future, Expected] = {}
        self._timers: list[tuple[float, int, Callable[[], None], bool]] = []
        self._count = itertools.count()
        self._next_look_s = 0.0

    @property
    def now(self) -> float:
        """Seconds on the backend's monotonic clock."""
        return self.backend.now()

    def expect(
        self,
        future: Future,
        on_answer: Callable[[Any], None],
        on_lost: Callable[[PartLost], None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
        *,
        background: bool = False,
        timeout_s: float = math.inf,
    ) -> None:
        """Say what happens when `future` ends, and how long it may take; it is lost when it takes longer.

        A background one alone does not keep the loop from running dry.
        """
        if on_lost is None and not background:
            timeout_s = min(timeout_s, self._learner_timeout_s)
        self._pending[future] = Expected(
            on_answer, on_lost, on_error, background, self.now, timeout_s
        )

    def answer(self, future: Future) -> Any:
        """Turn until `future` is answered, and return the answer; what else goes on goes on meanwhile."""
        answers: list[Any] = []
        self.expect(future, answers.append)
        self.until(lambda: bool(answers))
        return answers[0]

    def forget_unsupervised(self) -> None:
        """Forget every future whose loss nobody handles, the learner's: the run goes back to a checkpoint."""
        for future, entry in list(self._pending.items()):
            if entry.on_lost is None and not entry.background:
                del self._pending[future]
                self.backend.forget(future)

    def after(
        self, seconds: float, action: Callable[[], None], *, background: bool = False
    ) -> None:
        """Call `action` once, not before so many seconds have passed."""
        entry = (self.now + seconds, next(self._count), action, background)
        heapq.heappush(self._timers, entry)

    def until(self, done: Callable[[], bool]) -> None:
        """Turn until `done()`. Raises RanDry when nothing under way can change it, StopRequested once when asked."""
        while not done():
            if self.stop_requested:
                self.stop_requested = False
                raise StopRequested
            under_way = any(not entry.background for entry in self._pending.values())
            if not under_way and all(background for *_, background in self._timers):
                raise RanDry("the loop ran dry: nothing is under way, and somebody still waits")
            self.turn()

    def turn(self) -> None:
        """Wait for the next future or timer, and tell whoever expects it."""
        wait_s = LONGEST_WAIT_S
        if self._timers:
            wait_s = min(wait_s, max(0.0, self._timers[0][0] - self.now))
        ended = self.backend.wait(list(self._pending), wait_s)
        began = self.backend.busy_clock()
        for future in ended:
            self._end(future)
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()
        if self.now >= self._next_look_s:
            self._next_look_s = self.now + LONGEST_WAIT_S
            self._end_overdue()
        self.busy_s += self.backend.busy_clock() - began

    def _end_overdue(self) -> None:
        overdue = [
            future
            for future, entry in self._pending.items()
            if self.now - entry.since_s > entry.timeout_s
        ]
        for future in overdue:
            entry = self._pending.pop(future, None)
            if entry is None:  # another one's handler has forgotten it
                continue
            self.backend.forget(future)
            lost = PartLost(f"no answer for {entry.timeout_s:g} s")
            if entry.on_lost is None:
                raise lost
            entry.on_lost(lost)

    def _end(self, future: Future) -> None:
        expected = self._pending.pop(future)
        try:
            answer = self.backend.result(future)
        except PartLost as lost:
            if expected.on_lost is None:
                raise
            expected.on_lost(lost)
        except Exception as error:  # supervision boundary: the caller judges it
            if expected.on_error is None:
                raise
            expected.on_error(error)
        else:
            expected.on_answer(answer)
