"""Reward servers and the previews they score: retries, deadlines, replicas.

A preview batch goes to the least busy replica of its reward. A typed failure is asked again at most max_rescores
times, then it is the answer. A replica that dies or hangs is replaced and its jobs go to another one. Jobs that were
there at two deaths are tried alone from then on, so that none is blamed for another's doing; previews that take
their server down when they are alone become a typed failure too, never a silent 0.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.backend import Backend, Handle, PartLost, ScoreAnswer
from cluster.config import FaultsConfig
from cluster.crew import Crew, Member
from cluster.events import Events
from rewards.base import FailureKind, RewardFailure
from rewards.config import RewardsConfig
from rollout.records import SliceRequest

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class ScoreJob:
    """The previews of one slice (or all of a handle's), one reward."""

    reward: str
    previews: Handle
    request: SliceRequest | None
    on_answer: Callable[[ScoreAnswer], None]
    """Told the values, or the last failure."""
    on_failure: Callable[[RewardFailure], None] = lambda failure: None
    """Told of every failure, the last one too."""
    on_data_lost: Callable[[], None] | None = None
    """Told instead when the previews went away with their node; None: that can't happen to them."""
    num_failures: int = 0
    num_lost: int = 0
    """Servers that died while they had it."""
    num_lost_alone: int = 0
    """Those that had nothing else."""
    abandoned: bool = False


@dataclass(eq=False, slots=True)
class Server(Member):
    """A reward server, as the scorer sees it."""

    alone: bool = False
    """It has one job that is under suspicion, and gets no other."""


SUSPICIOUS = 2
"""Deaths of servers after which a job is tried alone; so many deaths alone are proof."""


class Scorer:
    """The reward servers of one run."""

    def __init__(
        self, events: Events, backend: Backend, settings: RewardsConfig, faults: FaultsConfig
    ):
        self.events, self.backend, self.faults = events, backend, faults
        self.max_rescores = settings.max_rescores
        self.crews: dict[str, Crew[Server]] = {}
        self.columns: dict[str, str] = {}
        """The column that each reward trains on, by its name in the config."""
        self._waiting: dict[str, deque[ScoreJob]] = {}
        self._running: dict[ScoreJob, None] = {}
        for reward in settings.components:
            name = reward.name
            self._waiting[name] = deque()
            self.crews[name] = Crew(
                f"server of reward {name}",
                events,
                faults,
                make=Server,
                start=partial(backend.add_replica, name),
                end=partial(backend.remove_replica, name),
                on_change=partial(self._dispatch, name),
                on_lost=self._hand_back,
                timeout_s=faults.score_timeout_s,
            )

    def resize(self, reward: str, replicas: int) -> None:
        """Have so many servers of a reward."""
        self.crews[reward].resize(replicas)

    def learn_columns(self) -> None:
        """Read what the ready servers say of their columns; ValueError when two rewards train on the same."""
        self.columns = {
            name: crew.ready[0].facts["column"] for name, crew in self.crews.items() if crew.ready
        }
        if len(set(self.columns.values())) != len(self.columns):
            raise ValueError(f"two rewards train on the same column: {self.columns}; rename one")

    def score(self, job: ScoreJob) -> None:
        """Have a job done; its `on_answer` or `on_data_lost` is told."""
        self._waiting[job.reward].append(job)
        self._dispatch(job.reward)

    def abandon(self) -> None:
        """Forget all jobs: the run goes back to a checkpoint."""
        for job in self._running:
            job.abandoned = True
        self._running.clear()
        for waiting in self._waiting.values():
            waiting.clear()

    def _dispatch(self, reward: str) -> None:
        waiting, crew = self._waiting[reward], self.crews[reward]
        ready = [server for server in crew.ready if not server.alone]
        suspect = next((job for job in waiting if job.num_lost >= SUSPICIOUS), None)
        if suspect is not None and ready:
            idlest = min(ready, key=lambda server: len(server.jobs))
            ready.remove(idlest)  # it gets nothing more until it is free for the suspect
            if not idlest.jobs:
                waiting.remove(suspect)
                idlest.alone = True
                self._give(crew, idlest, suspect)
        for job in [job for job in waiting if job.num_lost < SUSPICIOUS] if ready else []:
            waiting.remove(job)
            self._give(crew, min(ready, key=lambda server: len(server.jobs)), job)

    def _give(self, crew: Crew[Server], member: Server, job: ScoreJob) -> None:
        crew.given(member, job)
        self._running[job] = None
        self.events.expect(
            self.backend.score(job.reward, member.id, job.previews, job.request),
            partial(self._on_answer, crew, member, job),
            lambda lost: self._on_lost(crew, member, job, lost),
            lambda error: self._on_error(crew, member, job, error),
        )

    def _ended(self, crew: Crew[Server], member: Server, job: ScoreJob) -> bool:
        """Whether the job is over with this member and still wanted."""
        if not crew.answered(member, job):
            return False
        self._running.pop(job, None)
        if member.alone:
            member.alone = False
            self.events.after(0.0, partial(self._dispatch, job.reward))
        return not job.abandoned

    def _on_answer(
        self, crew: Crew[Server], member: Server, job: ScoreJob, answer: ScoreAnswer
    ) -> None:
        wanted = self._ended(crew, member, job)
        self._watch(crew, member, answer)
        if wanted:
            self._judge(job, answer)

    def _watch(self, crew: Crew[Server], member: Server, answer: ScoreAnswer) -> None:
        """A reward that hangs keeps its threads: after a second time-out in a row its process is replaced."""
        failure = answer.outcome
        hangs = isinstance(failure, RewardFailure) and failure.kind is FailureKind.TIMEOUT
        member.num_errors = member.num_errors + 1 if hangs else 0
        if member.num_errors > 1 and not member.gone:
            crew.quarantine(member, "the reward hangs in it")

    def _judge(self, job: ScoreJob, answer: ScoreAnswer) -> None:
        if not isinstance(answer.outcome, RewardFailure):
            job.on_answer(answer)
            return
        job.num_failures += 1
        job.on_failure(answer.outcome)
        log.warning("%s", answer.outcome)
        if job.num_failures > self.max_rescores:
            job.on_answer(answer)
        else:
            self.score(job)

    def _on_lost(self, crew: Crew[Server], member: Server, job: ScoreJob, lost: PartLost) -> None:
        if not lost.is_data:
            crew.lose(member, lost.reason)
        elif self._ended(crew, member, job):
            if job.on_data_lost is None:
                raise lost
            job.on_data_lost()

    def _on_error(
        self, crew: Crew[Server], member: Server, job: ScoreJob, error: Exception
    ) -> None:
        """The server itself broke (a reward's own error is a typed failure): end it, try elsewhere."""
        if not member.gone:
            crew.lose(member, f"it broke: {error}")

    def _hand_back(self, jobs: list[Any]) -> None:
        for job in jobs:
            self._running.pop(job, None)
            if job.abandoned:
                continue
            job.num_lost += 1
            job.num_lost_alone += len(jobs) == 1
            if job.num_lost_alone < SUSPICIOUS:
                self._waiting[job.reward].append(job)
            else:
                self._give_up(job)

    def _give_up(self, job: ScoreJob) -> None:
        failure = RewardFailure(
            kind=FailureKind.SERVER_LOST,
            reward=job.reward,
            message=f"its server was lost {job.num_lost} times while it scored these previews",
            num_images=0 if job.request is None else job.request.count,
        )
        job.on_failure(failure)
        job.on_answer(ScoreAnswer.failed(failure))
