"""A run whose rollout workers are scaled up, rung by rung, while it trains; and what its records say of each rung.

    scale to 1 -> all ready -> settle_s -> window_s, measured -> scale to 2 -> ...

One run, one config: only the number of workers changes. Works on real Ray and on tests/fake_backend.py alike; seconds
are those of the backend's clock.
"""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.books import check_books
from cluster.config import RunConfig
from cluster.controller import Controller
from cluster.costs import step_plan
from cluster.events import StopRequested
from cluster.fleet import Fleet, make_fleet, start_fleet
from cluster.iteration import IterationRecord
from cluster.metrics_row import metrics_row
from rollout.prompts import PromptSource

TICK_S = 0.2
"""So often the climb looks whether it can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A worker's answer to one sampling call, when the controller took it."""

    worker: int
    at_s: float
    images: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The controller's counters at one moment."""

    at_s: float
    busy_s: float
    """Seconds in its handlers (`cluster.events.Events.busy_s`)."""
    cpu_s: float
    """CPU seconds of its process, all threads."""
    answers: int
    """Answers taken, of every kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A window in which the number of workers stood still."""

    workers: int
    begin: Reading
    end: Reading

    @property
    def window_s(self) -> float:
        return self.end.at_s - self.begin.at_s

    def per_s(self, counter: str) -> float:
        """How fast one of a Reading's counters grew."""
        return (getattr(self.end, counter) - getattr(self.begin, counter)) / self.window_s

    def has(self, at_s: float) -> bool:
        return self.begin.at_s < at_s <= self.end.at_s


@dataclass(slots=True)
class Log:
    """What happened in a run."""

    answers: list[Answer] = field(default_factory=list)
    pushes: list[float] = field(default_factory=list)
    """When each worker's answer to a push of weights came."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """metrics.jsonl's, but elapsed_s is the backend's clock when the version was out."""
    rungs: list[Rung] = field(default_factory=list)
    num_lost: int = 0
    """Workers lost on the way."""


class Metered:
    """A backend that writes down who answered when."""

    def __init__(self, backend: Any, log: Log) -> None:
        self._backend, self._log = backend, log
        self._sampling: dict[Any, int] = {}
        self.num_answers = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def sample(self, worker: int, requests: Any) -> Any:
        future = self._backend.sample(worker, requests)
        self._sampling[future] = worker
        return future

    def result(self, future: Any) -> Any:
        self.num_answers += 1
        worker = self._sampling.pop(future, None)
        answer = self._backend.result(future)
        if worker is not None:
            images = answer.stats.num_images
            self._log.answers.append(Answer(worker=worker, at_s=self.now(), images=images))
        return answer


class Climber:
    """Takes a fleet through numbers of workers; asks the run to stop after the last."""

    def __init__(
        self, fleet: Fleet, log: Log, counts: Sequence[int], settle_s: float, window_s: float
    ) -> None:
        self.fleet, self.events, self.log = fleet, fleet.events, log
        self.settle_s, self.window_s = settle_s, window_s
        self._counts = list(counts)
        self._ready_s: float | None = None
        self._begin: Reading | None = None

    def start(self) -> None:
        """Ask for the next number of workers, and wait for them."""
        self._ready_s = self._begin = None
        self.fleet.pool.crew.resize(self._counts[0])
        self.events.after(TICK_S, self._look, background=True)

    def _look(self) -> None:
        """Go on as far as the time allows; a worker that is lost begins the rung anew."""
        now = self.events.now
        if len(self.fleet.pool.crew.ready) != self._counts[0]:
            self._ready_s = self._begin = None
        elif self._ready_s is None:
            self._ready_s = now
        elif self._begin is None:
            if now - self._ready_s >= self.settle_s:
                self._begin = self._read()
        elif now - self._begin.at_s >= self.window_s:
            self._finish(Rung(workers=self._counts.pop(0), begin=self._begin, end=self._read()))
            return
        self.events.after(TICK_S, self._look, background=True)

    def _finish(self, rung: Rung) -> None:
        self.log.rungs.append(rung)
        print(f"  {rung.workers} workers measured", flush=True)
        if self._counts:
            self.start()
        else:
            self.events.stop_requested = True

    def _read(self) -> Reading:
        meter: Any = self.fleet.backend
        return Reading(
            at_s=self.events.now,
            busy_s=self.events.busy_s,
            cpu_s=time.process_time(),
            answers=meter.num_answers,
        )


def start_parts(config: RunConfig, fleet: Fleet) -> None:
    """Start the learner and the config's workers and servers; return when work can begin."""
    started: list[Any] = []
    fleet.events.expect(fleet.backend.start_learner(), started.append)
    start_fleet(config, fleet)
    fleet.events.until(lambda: bool(started))


def climb(
    config: RunConfig, backend: Any, counts: Sequence[int], settle_s: float, window_s: float
) -> Log:
    """Train as `config` says while the workers climb through `counts`; return what happened.

    The caller ends the backend's actors. RuntimeError when the run ends before the last rung.
    """
    log = Log()
    metered: Any = Metered(backend, log)
    fleet = make_fleet(config, metered)
    start_parts(config, fleet)
    prompts = PromptSource(config.prompts.path, config.prompts.shuffle, config.run.seed)

    def note(record: IterationRecord) -> None:
        log.rows.append(metrics_row(record, 0, fleet.events.now))

    plan, _ = step_plan(config)
    controller = Controller(config, plan, fleet, prompts, note)
    clock = fleet.pool.on_pushed

    def pushed(seconds: float) -> None:
        clock(seconds)
        log.pushes.append(fleet.events.now)

    fleet.pool.on_pushed = pushed
    Climber(fleet, log, counts, settle_s, window_s).start()
    try:
        controller.run()
    except StopRequested:
        log.num_lost = fleet.pool.crew.num_lost
        return log
    raise RuntimeError("the run ended before the last rung was measured")


# what the records say


def rate(answers: Sequence[Answer], begin_s: float, end_s: float) -> float:
    """Images/s of the answers in (begin_s, end_s], added up over the workers.

    A worker's rate is that between its first and its last answer, so that it does not depend on where in a call the
    window begins and ends. A worker with fewer than two answers adds nothing.
    """
    by_worker: dict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        if begin_s < answer.at_s <= end_s:
            by_worker[answer.worker].append(answer)
    return sum(
        sum(answer.images for answer in own[1:]) / (own[-1].at_s - own[0].at_s)
        for own in by_worker.values()
        if len(own) > 1
    )


def rates(log: Log, rung: Rung, parts: int = 3) -> list[float]:
    """Images/s in each equal part of a rung's window; what came before and after is left out."""
    width = rung.window_s / parts
    edges = [rung.begin.at_s + number * width for number in range(parts + 1)]
    return [rate(log.answers, begin, end) for begin, end in itertools.pairwise(edges)]


def median_rate(log: Log, rung: Rung) -> float:
    """Images/s of a rung."""
    return statistics.median(rates(log, rung))


def publish_seconds(log: Log, rung: Rung) -> list[float]:
    """Seconds from each version that came out in a rung's window until the last worker had proved that it holds it.

    For runs without lag, in which every worker waits for the version: one that not all had proved before the next
    one came out is left out, as is the last.
    """
    out = [row["elapsed_s"] for row in log.rows if rung.has(row["elapsed_s"])]
    seconds = []
    for this, following in itertools.pairwise(out):
        proved = [at_s for at_s in log.pushes if this <= at_s < following]
        if len(proved) == rung.workers:
            seconds.append(proved[-1] - this)
    return seconds


def ledger(rows: Sequence[dict[str, Any]], groups_per_batch: int) -> dict[str, int]:
    """How many groups were trained on, and how many of the first ones are missing or came twice."""
    return check_books(rows, len(rows) * groups_per_batch).counts()
