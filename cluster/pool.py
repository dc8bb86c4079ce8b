"""The rollout pool: calls in order, each done by a worker that has proved to hold the weights that the call names.

A call is done once: by the worker that got it, by another one when that was lost, or by both when it was slow and
somebody idled (same seeds, same answer; the first one counts). Its slices always travel together, since the shape
of a network batch must not depend on who died when.

A worker answers a push of weights with (version, checksum of the tensors that its module now computes with). A
mismatch is retried once; then the worker is quarantined. If no other is left, the run stops: elsewhere,
runs have trained for weeks on weights that had never arrived.
"""

import logging
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.backend import Backend, Future, PartLost, WeightsAnswer
from cluster.config import FaultsConfig
from cluster.crew import Crew, Member
from cluster.events import Events
from rollout.records import WeightReport

log = logging.getLogger(__name__)

CALLS_PER_WORKER = 2
"""One is computed while the next already waits in the worker's queue, so that it never idles on the controller."""
FEWEST_TIMES = 5
"""Calls that must have been timed before one is called slow."""


class WeightsNeverArrived(RuntimeError):
    """No worker holds the published weights, although all were sent them twice."""


class WeightsLost(PartLost):
    """Published weights went away with the machine that had made them."""


@dataclass(eq=False, slots=True)
class Worker(Member):
    """A rollout worker, as the pool sees it."""

    holds: WeightsAnswer | None = None
    """Proved; None before the first handshake and while one is under way."""
    loading: bool = False
    mismatches: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Call:
    """One unit of a worker's time."""

    name: str
    """For messages."""
    weights: WeightsAnswer | None
    """What the worker must hold; None: whatever it holds."""
    start: Callable[[int], Future]
    """Worker id -> future."""
    on_answer: Callable[["Call", Any], None]
    """Told this call, too: a call that held itself would keep its answer alive until a full collection."""
    kind: str = "sample"
    """Calls of a kind take about as long."""
    done: bool = False
    answer: Any = None
    num_failed: int = 0
    num_lost_data: int = 0
    """How often its answer's data was lost."""
    workers: list[Worker] = field(default_factory=list)
    """Who computes it now."""


class RolloutPool:
    """The queue of calls and the workers that empty it."""

    def __init__(self, events: Events, backend: Backend, faults: FaultsConfig):
        self.events, self.backend, self.faults = events, backend, faults
        self.crew: Crew[Worker] = Crew(
            "rollout worker",
            events,
            faults,
            make=Worker,
            start=backend.add_worker,
            end=backend.remove_worker,
            on_change=self.dispatch,
            on_lost=self._hand_back,
            timeout_s=faults.call_timeout_s,
        )
        self.on_pushed: Callable[[float], None] = lambda seconds: None
        """Told how long a worker took to answer a push of weights."""
        self.num_slow, self.num_reissued = 0, 0
        self._queue: deque[Call] = deque()
        self._running: dict[Call, None] = {}
        self._seconds: dict[str, deque[float]] = {}
        self._generation = 0
        """Counts the times that all was abandoned."""

    @property
    def num_calls(self) -> int:
        """Calls that wait or are computed."""
        return len(self._queue) + len(self._running)

    def submit(self, calls: list[Call], *, first: bool = False) -> None:
        """Queue calls, behind all others or before them, and give out what can be given."""
        if first:
            self._queue.extendleft(reversed(calls))
        else:
            self._queue.extend(calls)
        self.dispatch()

    def again(self, call: Call, answer: Any) -> None:
        """The data of a call's answer went away with its node: compute it once more, before all others."""
        if call.done and call.answer is answer:
            call.done, call.answer = False, None
            call.num_lost_data += 1
            self._failed(call, RuntimeError(f"the data of {call.name} was lost again and again"))
            self.dispatch()

    def abandon(self) -> None:
        """Forget all calls, and what the workers hold: the run goes back to a checkpoint."""
        self._generation += 1
        for call in [*self._queue, *self._running]:
            call.done = True
        self._queue.clear()
        self._running.clear()
        for worker in self.crew.members.values():
            worker.holds = None

    # giving out

    def dispatch(self) -> None:
        """Give every worker that has room its next call, after the weights that the call names."""
        while self._queue:
            worker = self._worker_for(self._queue[0].weights)
            if worker is None:
                return
            self._give(worker, self._queue.popleft())
        self._hedge()

    def _worker_for(self, weights: WeightsAnswer | None) -> Worker | None:
        """Return a worker that proved these weights and has room; start pushing them to idle ones that lack them.

        A worker gets a second call only when no other is about to be ready for its first.
        """
        ready = self.crew.ready
        if weights is not None:
            for worker in ready:
                if worker.holds is not weights and not worker.jobs and not worker.loading:
                    self._push(worker, weights)
        able = [
            w
            for w in ready
            if (weights is None or w.holds is weights) and len(w.jobs) < CALLS_PER_WORKER
        ]
        if not able:
            return None
        best = min(able, key=lambda worker: len(worker.jobs))
        if best.jobs and any(worker.loading for worker in ready):
            return None
        return best

    def _give(self, worker: Worker, call: Call) -> None:
        self.crew.given(worker, call)
        call.workers.append(worker)
        self._running[call] = None
        self.events.expect(
            call.start(worker.id),
            partial(self._on_answer, worker, call),
            lambda lost: self._on_lost(worker, call, lost),
            lambda error: self._on_error(worker, call, error),
        )

    def _on_answer(self, worker: Worker, call: Call, answer: Any) -> None:
        began = worker.progress_s
        if not self.crew.answered(worker, call):
            return
        worker.num_errors = 0
        call.workers.remove(worker)
        times = self._seconds.setdefault(call.kind, deque(maxlen=50))
        times.append(self.events.now - began)
        if not call.done:
            call.done, call.answer = True, answer
            self._running.pop(call, None)
            call.on_answer(call, answer)
        self.dispatch()

    # weights

    def _push(self, worker: Worker, weights: WeightsAnswer) -> None:
        worker.loading, worker.holds = True, None
        started, generation = self.events.now, self._generation

        def check(report: WeightReport) -> None:
            worker.loading = False
            if worker.gone:
                return
            self.on_pushed(self.events.now - started)
            self._compare(worker, report, weights)
            self.dispatch()

        def lost(lost: PartLost) -> None:
            worker.loading = False
            if not lost.is_data:
                self.crew.lose(worker, lost.reason)
            elif generation == self._generation:
                raise WeightsLost(f"the weights of policy version {weights.version}: {lost.reason}")
            else:  # the run went back to a checkpoint for it already
                self.dispatch()

        def failed(error: Exception) -> None:
            worker.loading = False
            self._mismatch(worker, weights, repr(error))
            self.dispatch()

        future = self.backend.load_weights(worker.id, weights.version, weights.tensors)
        self.events.expect(future, check, lost, failed, timeout_s=self.faults.call_timeout_s)

    def _compare(self, worker: Worker, report: WeightReport, wanted: WeightsAnswer) -> None:
        if (report.version, report.checksum) == (wanted.version, wanted.checksum):
            worker.holds, worker.mismatches, worker.proved = wanted, 0, True
        else:
            self._mismatch(worker, wanted, str(report))

    def _mismatch(self, worker: Worker, wanted: WeightsAnswer, found: str) -> None:
        if worker.gone:
            return
        worker.mismatches += 1
        log.warning(
            "rollout worker %d holds %s after a push of version %d (checksum %s)",
            worker.id, found, wanted.version, wanted.checksum,
        )  # fmt: skip
        if worker.mismatches < 2:
            return
        if self.crew.ready == [worker]:
            raise WeightsNeverArrived(
                f"no rollout worker holds policy version {wanted.version}: the last one answered {found}, "
                f"but the learner's checksum is {wanted.checksum}. The adapter may have bound to other "
                "modules (compare learner.lora_targets), or code or model differ between the machines."
            )
        self.crew.quarantine(worker, "it does not take up weights")

    # faults

    def _on_lost(self, worker: Worker, call: Call, lost: PartLost) -> None:
        if lost.is_data:
            self._on_error(worker, call, lost)
        else:
            self.crew.lose(worker, lost.reason)

    def _on_error(self, worker: Worker, call: Call, error: Exception) -> None:
        if not self.crew.answered(worker, call, well=False):
            return
        worker.num_errors += 1
        call.workers.remove(worker)
        log.warning("%s failed on rollout worker %d: %s", call.name, worker.id, error)
        self._failed(call, error)
        if worker.num_errors > 1 and not worker.gone:
            self.crew.quarantine(worker, f"{worker.num_errors} calls in a row failed")
        self.dispatch()

    def _hand_back(self, calls: list[Call]) -> None:
        """The calls of a lost worker: only the first one can have been its end."""
        for number, call in reversed(list(enumerate(calls))):
            call.workers = [worker for worker in call.workers if not worker.gone]
            if number == 0:
                self._failed(call, RuntimeError(f"{call.name} lost its worker again and again"))
            else:
                self._requeue(call)

    def _failed(self, call: Call, error: Exception) -> None:
        call.num_failed += 1
        if call.num_failed >= self.faults.call_attempts and not call.done:
            raise error
        self._requeue(call)

    def _requeue(self, call: Call) -> None:
        self._running.pop(call, None)
        if call.done:
            return
        if call.workers:
            self._running[call] = None  # somebody else computes it too
        else:
            self.num_reissued += 1
            self._queue.appendleft(call)

    def _hedge(self) -> None:
        """Give what takes much too long to somebody who idles, once."""
        idle = [worker for worker in self.crew.ready if not worker.jobs and not worker.loading]
        if not idle:
            return
        limits = self._slow_after_s()
        for call in list(self._running):
            if not self._is_slow(call, limits):
                continue
            able = [w for w in idle if call.weights is None or w.holds is call.weights]
            if not able:
                if call.weights is not None:
                    self._push(idle.pop(), call.weights)
                return
            log.warning(
                "%s takes long on rollout worker %d; worker %d computes it too",
                call.name, call.workers[0].id, able[0].id,
            )  # fmt: skip
            self.num_slow += 1
            idle.remove(able[0])
            self._give(able[0], call)
            if not idle:
                return

    def _slow_after_s(self) -> dict[str, float]:
        """Return how long a call of each kind may take; kinds that are not known well enough yet are left out."""
        return {
            kind: self.faults.straggler_factor * statistics.median(times)
            for kind, times in self._seconds.items()
            if len(times) >= FEWEST_TIMES
        }

    def _is_slow(self, call: Call, limits: dict[str, float]) -> bool:
        if call.kind not in limits or len(call.workers) != 1:
            return False
        return self.events.now - call.workers[0].progress_s > limits[call.kind]
