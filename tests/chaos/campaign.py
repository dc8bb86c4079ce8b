"""Disturbs a run: waits for a phase, kills inside it, mends what a user or a cluster would mend, waits for recovery.

What comes back by itself (workers, servers, ranks) is left to the product. A killed node is replaced, as a cluster's
provider would, and a killed driver is started again with the same words, as whoever resubmits a job does.
"""

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster.run_folder import CHECKPOINTS, METRICS
from tests.chaos.history import History
from tests.chaos.machines import Machines, kill
from tests.chaos.marks import OFF, Mark, is_running, read_marks, sweep
from tests.chaos.plan import HANG, Aim, Leg
from tests.chaos.settings import CONFIG, WORKERS, overrides

POLL_S = 0.005
LIMIT_S = 300.0
"""Nothing that is waited for takes so long."""
DEATH_S = 10.0
"""Nor does dying of SIGKILL."""
LAST_QUIET = 3
"""Nobody is killed in the last iterations: the run must still be training while it recovers."""

Groups = list[list[int]]
"""Pids that die together."""


class Stuck(RuntimeError):
    """A run did not do what was waited for; the message has the end of its log."""


class Ended(Exception):
    """The run came to its end before what was waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One kill that was done."""

    kind: str
    phase: str
    iteration: int
    """The last one that had ended."""
    hit: bool
    """Whether the phase was under way when the part was killed."""
    recovery_s: float
    """From the kill to the next line of metrics.jsonl."""


@dataclass
class DisturbedRun:
    """One run of a leg, and its driver's process."""

    leg: Leg
    folder: Path
    machines: Machines
    calm: bool = False
    """Nothing lingers."""
    strikes: list[Strike] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.marks = self.folder / "marks"
        self.marks.mkdir(parents=True)
        self.words = [CONFIG, *overrides(self.leg, self.folder, None if self.calm else self.marks)]
        self.run_dir = self.folder / "run"
        self.history = History(self.run_dir / METRICS)
        self.driver: subprocess.Popen[bytes]

    def go(self, aims: deque[Aim]) -> None:
        """Train to the end, killing by `aims` while it trains; what was hit is taken from `aims`. Raises Stuck."""
        self._start_driver()
        try:
            try:
                self._until("checkpoint", self._has_checkpoint)
                while aims:
                    if self._strike(aims[0]):
                        aims.popleft()
            except Ended:
                pass  # another run goes on with what is left of the aims
            (self.marks / OFF).touch()
            self._until("end", lambda: self.driver.poll() == 0)
        finally:
            self.driver.kill()
            self.driver.wait()

    def _start_driver(self) -> None:
        self.driver = self.machines.driver(self.words, self.folder / "driver.log")

    def _has_checkpoint(self) -> bool:
        return any((self.run_dir / CHECKPOINTS).glob("step_*"))

    def _until(self, what: str, done: Callable[[], bool], poll_s: float = POLL_S) -> None:
        """Wait. Ended when the driver has ended well before, Stuck when it failed, or nothing comes."""
        deadline = time.monotonic() + LIMIT_S
        while not done():
            code = self.driver.poll()
            if code == 0:
                raise Ended
            if code is not None or time.monotonic() > deadline:
                tail = (self.folder / "driver.log").read_text(errors="replace")[-4000:]
                raise Stuck(f"{self.folder}: no {what}; the driver's exit code is {code}\n{tail}")
            time.sleep(poll_s)

    # one kill

    def _strike(self, aim: Aim) -> bool:
        """Kill once, and wait until the run has got over it; return whether the kill hit its phase."""
        self._until("full number of parts", self._is_complete, poll_s=0.2)
        sweep(self.marks)
        nodes = self.machines.nodes()
        groups = self._groups(aim.kind, nodes)
        mark = self._await_phase(aim)
        victims, watched = self._choose(aim, mark, groups)
        time.sleep(max(0.0, watched.at(aim.fraction) - time.monotonic()))
        before, lines, began = self.history.look().newest, self.history.num_lines, time.monotonic()
        kill(victims, signal.SIGSTOP if aim.kind == HANG else signal.SIGKILL)
        hit = self._was_under_way(watched, victims if aim.kind != HANG else [])
        self._mend(aim.kind, victims, nodes)
        self._until("line of metrics.jsonl", lambda: self.history.look().num_lines > lines)
        strike = Strike(
            kind=aim.kind,
            phase=aim.phase,
            iteration=before,
            hit=hit,
            recovery_s=time.monotonic() - began,
        )
        self.strikes.append(strike)
        print(f"{self.folder.name}: {strike}", flush=True)
        self._until("new iteration", lambda: self.history.look().newest > before)
        return hit

    def _is_complete(self) -> bool:
        found = {kind: len(pids) for kind, pids in self.machines.parts().items()}
        leg = self.leg
        return found == {"worker": WORKERS, "replica": leg.replicas, "rank": leg.num_ranks}

    def _groups(self, kind: str, nodes: dict[str, list[int]]) -> Groups:
        """The pids that die together, of each part that may be killed."""
        if kind == "node":
            return list(nodes.values())
        if kind == "driver":
            return [[self.driver.pid]]
        return [[pid] for pid in self.machines.parts()["replica" if kind == HANG else kind]]

    def _await_phase(self, aim: Aim) -> Mark:
        """Wait for a new mark of the phase, after those to be skipped; Ended when the run is about to end."""
        armed, seen = time.monotonic_ns(), dict[Mark, None]()

        def is_there() -> bool:
            if self.history.look().newest >= self.leg.num_iterations - LAST_QUIET:
                raise Ended
            before = len(seen)
            marks = read_marks(self.marks, aim.phase)
            seen.update(dict.fromkeys(mark for mark in marks if mark.began_ns > armed))
            return len(seen) > max(before, aim.skip)

        self._until(f"phase {aim.phase}", is_there)
        return list(seen)[-1]

    def _choose(self, aim: Aim, mark: Mark, groups: Groups) -> tuple[list[int], Mark]:
        """The pids to kill, of a part that is in the phase itself if one is, and the mark that must outlive them."""
        inside = [
            (group, its)
            for its in read_marks(self.marks, aim.phase)
            for group in groups
            if its.pid in group
        ]
        candidates = inside or [(group, mark) for group in groups]
        return candidates[int(aim.pick * len(candidates))]

    def _was_under_way(self, watched: Mark, killed: list[int]) -> bool:
        """Whether the mark is there after the kill: its process has not ended the phase, or died in it."""
        deadline = time.monotonic() + DEATH_S
        while watched.pid in killed and is_running(watched.pid):
            assert time.monotonic() < deadline, f"process {watched.pid} outlives SIGKILL"
            time.sleep(POLL_S)
        return (self.marks / watched.name).exists()

    def _mend(self, kind: str, victims: list[int], nodes: dict[str, list[int]]) -> None:
        """Bring back what the product can't bring back itself."""
        if kind == "driver":
            self.driver.wait()
            self._start_driver()
        if kind == "node":
            self.machines.replace_node(next(n for n, pids in nodes.items() if pids == victims))
