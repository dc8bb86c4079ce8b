"""A crew: as many live actors of one kind as are wanted, whatever happens to them.

    starting --answer--> ready --asked to leave, jobs done--> ended
       |                   |
       +------ lost -------+--> its jobs are handed back, a replacement starts (later and later, if it keeps failing)

A member is lost when its process or node is gone, when it is not ready or makes no progress on a job for too long, or
when it keeps failing (quarantine). Members are never restarted in place: a new one has a new id, so late answers name
nobody. Who is lost before it has done anything, as the one that it replaced was, and so on, makes a row of losses. Ten
members that go at once, with their node, are ten rows of one.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cluster.backend import Future
from cluster.config import FaultsConfig
from cluster.events import Events

log = logging.getLogger(__name__)

TICK_S = 1.0


class CrewLost(RuntimeError):
    """A member was replaced again and again, and nobody has done anything."""


@dataclass(eq=False, slots=True)
class Member:
    """One actor."""

    id: int
    ready: bool = False
    leaving: bool = False
    gone: bool = False
    jobs: list[Any] = field(default_factory=list)
    """What it has been given and has not answered, in order."""
    progress_s: float = 0.0
    """When it last answered, or was given a job while it had none."""
    num_errors: int = 0
    """Jobs in a row that raised."""
    proved: bool = False
    """It has done something that it was asked."""
    num_lost_before: int = 0
    """How long the row of losses is that it ends: those it replaces, who were lost before they were proved."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What it said of itself when it was ready: node, process, devices."""


AMember = TypeVar("AMember", bound=Member)


class Crew(Generic[AMember]):
    """Keeps `target` members alive. The owner gives out jobs and says what becomes of a lost one's."""

    def __init__(
        self,
        name: str,
        events: Events,
        faults: FaultsConfig,
        *,
        make: Callable[[int], AMember],
        start: Callable[[int], Future],
        end: Callable[[int], None],
        on_change: Callable[[], None],
        on_lost: Callable[[list[Any]], None],
        timeout_s: float,
    ):
        """`start` gives a future of a member's facts; `on_lost` gets the jobs that a lost member had."""
        self.name, self.events, self.faults = name, events, faults
        self._make, self._start, self._end = make, start, end
        self._on_change, self._on_lost, self._timeout_s = on_change, on_lost, timeout_s
        self.members: dict[int, AMember] = {}
        self.target = 0
        self.num_lost, self.num_quarantined = 0, 0
        self._next_id, self._delayed, self._ever_ready = 0, 0, False
        self._ticking = False

    @property
    def ready(self) -> list[AMember]:
        """Members that may be given jobs."""
        return [member for member in self.members.values() if member.ready and not member.leaving]

    @property
    def num_staying(self) -> int:
        """Members that are there or starting, and not leaving."""
        return sum(not member.leaving for member in self.members.values())

    def resize(self, target: int) -> None:
        """Have so many members; the idlest leave first, once their jobs are done."""
        self.target = target
        staying = [member for member in self.members.values() if not member.leaving]
        staying.sort(key=lambda member: (member.ready, len(member.jobs), -member.id))
        for member in staying[: max(0, len(staying) - target)]:
            member.leaving = True
            self._let_go(member)
        self._fill(num_lost_before=0)
        if not self._ticking:
            self._ticking = True
            self.events.after(TICK_S, self._tick, background=True)

    def _fill(self, num_lost_before: int) -> None:
        for _ in range(self.target - self.num_staying - self._delayed):
            self._hire(num_lost_before)

    def _hire(self, num_lost_before: int) -> None:
        member = self._make(self._next_id)
        member.num_lost_before = num_lost_before
        self._next_id += 1
        self.members[member.id] = member

        def failed(error: Exception) -> None:
            if not self._ever_ready:
                raise error  # nobody could start: most likely the user's mistake, to be told as it is
            self.lose(member, f"it could not start: {error}")

        self.events.expect(
            self._start(member.id),
            lambda facts: self._on_ready(member, facts),
            lambda lost: self.lose(member, f"while it started: {lost.reason}"),
            failed,
            timeout_s=self.faults.start_timeout_s,
        )

    def _on_ready(self, member: AMember, facts: dict[str, Any] | None) -> None:
        if member.gone:
            return
        member.ready, member.facts, self._ever_ready = True, facts or {}, True
        self._let_go(member)
        self._on_change()

    def given(self, member: AMember, job: Any) -> None:
        """A member was given a job."""
        if not member.jobs:
            member.progress_s = self.events.now
        member.jobs.append(job)

    def answered(self, member: AMember, job: Any, *, well: bool = True) -> bool:
        """A member ended a job, well or not; False when it had been given up already."""
        if member.gone:
            return False
        member.jobs.remove(job)
        member.progress_s, member.proved = self.events.now, member.proved or well
        self._let_go(member)
        return True

    def lose(self, member: AMember, reason: str) -> None:
        """A member is gone, or is ended because of `reason`: hand its jobs back, start a replacement."""
        if member.gone:
            return
        self.num_lost += 1
        in_a_row = 1 if member.proved else member.num_lost_before + 1
        log.warning("%s %d is lost: %s", self.name, member.id, reason)
        self._remove(member)
        others_work = any(other.proved for other in self.members.values())
        if in_a_row >= self.faults.losses_in_a_row and not others_work:
            raise CrewLost(
                f"{in_a_row} of the {self.name}s were lost in a row, each before it had done anything; the last one: "
                f"{reason}"
            )
        self._on_lost(member.jobs)
        self._replace(in_a_row)
        self._on_change()

    def quarantine(self, member: AMember, reason: str) -> None:
        """End a member that keeps failing."""
        self.num_quarantined += 1
        self.lose(member, f"quarantined: {reason}")

    def _replace(self, lost_in_a_row: int) -> None:
        if lost_in_a_row <= 1:
            self._fill(lost_in_a_row)
            return
        self._delayed += 1

        def hire() -> None:
            self._delayed -= 1
            self._fill(lost_in_a_row)

        self.events.after(self.faults.pause_s(lost_in_a_row), hire)

    def _let_go(self, member: AMember) -> None:
        if member.leaving and not member.jobs:
            self._remove(member)

    def _remove(self, member: AMember) -> None:
        member.gone = True
        del self.members[member.id]
        self._end(member.id)

    def _tick(self) -> None:
        """Look for members that hang. Also a chance for the owner to look after stragglers."""
        for member in list(self.members.values()):
            if member.jobs and self.events.now - member.progress_s > self._timeout_s:
                self.lose(member, f"no answer for {self._timeout_s:g} s")
        self._on_change()
        self.events.after(TICK_S, self._tick, background=True)
