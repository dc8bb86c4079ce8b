"""The loop that turns prompts into policy versions. One thread, driven by answers; it moves handles, not images.

    PromptSource                                                        (rollout/prompts.py)
        | admit: position p may start while p < (consumed + k + 1) B    (cluster/buffer.py)
        v
    calls of slices --> rollout worker --previews--> reward servers     (cluster/pool.py, cluster/scoring.py)
        |                                             |  value, or typed failure: rescore, then drop the group
        v                                             v
    record batches --------------------------------> seal ------> buffer, in order of position
                                                                    | batch b whole
                                                                    v
    workers <--tensors, proved by checksum-- weight store <-- learner: version b + 1

What may stand still, and what sets it going again (B groups a batch, k = max_policy_lag):

    who             consumes             waits for                        unblocked by
    admission       prompts              a free place of (k + 1) B        a batch consumed by the learner
    a call          slices               the version it names             publishing
    a worker        calls                a proved push of that version    the handshake
    a slice         previews             its rewards                      the reward servers
    the learner     batch b              the last group of batch b        sealing
    publishing      version b + 1        the learner's step               the step's end

Nothing downstream of admission refuses a group, so the straggler that batch b waits for always finds room.
A lost worker's calls are done by another, with the same ids and seeds; whatever comes twice counts once. A lost
learner ends this loop with PartLost: the run goes back to its last checkpoint (cluster/train.py).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster import gates
from cluster.assembly import OpenGroup, seal, split_group
from cluster.backend import Future, PartLost, SampleAnswer, ScoreAnswer, WeightsAnswer
from cluster.buffer import REPLACEMENT_STRIDE, Admission, TrajectoryBuffer
from cluster.config import RunConfig
from cluster.fleet import Fleet
from cluster.iteration import IterationClock, IterationRecord, Tally
from cluster.pool import Call
from cluster.scoring import ScoreJob
from cluster.weights import WeightStore
from learner.stats import LearnerStats
from rewards.base import RewardFailure
from rollout.plan import StepPlan
from rollout.prompts import PromptSource
from rollout.records import GroupRequest, SliceRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Where a controller begins: at the start, or at a checkpoint."""

    consumed: int = 0
    """Batches behind us."""
    incarnation: int = 0
    """Counts roll-backs and resumed drivers; every request and group carries it."""
    attempts: dict[int, int] = field(default_factory=dict)
    """How often the group of a position that is not consumed was dropped."""
    older: list[WeightsAnswer] = field(default_factory=list)
    """The versions before the learner's own that batches under way need, in order."""


@dataclass(slots=True)
class OpenSlice:
    """A sampled slice on its way through the reward servers."""

    request: SliceRequest
    call: Call
    sampled: SampleAnswer
    index: int
    """Its place in the call."""
    answers: dict[str, ScoreAnswer] = field(default_factory=dict)


class Controller:
    """Runs batches consumed .. num_iterations - 1 and hands every finished iteration to `on_iteration`."""

    def __init__(
        self,
        config: RunConfig,
        plan: StepPlan,
        fleet: Fleet,
        prompts: PromptSource,
        on_iteration: Callable[[IterationRecord], Future | None],
        start: StartPoint | None = None,
    ):
        """`on_iteration` may return a future (a checkpoint being written) that must end well before the run does."""
        self.config, self.plan, self.prompts = config, plan, prompts
        self.fleet, self.events, self.backend = fleet, fleet.events, fleet.backend
        self.pool, self.scorer = fleet.pool, fleet.scorer
        self.on_iteration = on_iteration
        start = start or StartPoint()
        self.incarnation = start.incarnation
        self.buffer: TrajectoryBuffer[tuple[Any, Any]] = TrajectoryBuffer(
            config.rollout.groups_per_batch,
            config.run.max_policy_lag,
            config.run.num_iterations,
            start.consumed,
            start.attempts,
        )
        self.store = WeightStore(config.run.max_policy_lag)
        for answer in start.older:
            self.store.publish(answer)
        self.clock = IterationClock()
        self.pool.on_pushed = self.clock.pushed
        self.held = False
        """While True nothing new is admitted: an evaluation has the workers."""
        self.stopping = False
        """Nothing new is admitted any more, whoever releases what was held."""
        self._groups: dict[int, OpenGroup] = {}
        self._parked: dict[int, list[Call]] = {}
        """Calls whose version is not out yet."""
        self._num_saving = 0
        self._first_batch_checked = False

    def run(self) -> None:
        """Return when the last batch's weights are published and all checkpoints written."""
        self.events.expect(self.backend.weights("raw"), self._on_weights)
        self.events.until(lambda: self.finished)

    @property
    def finished(self) -> bool:
        """Whether all is done."""
        return self.store.latest == self.config.run.num_iterations and not self._num_saving

    def finish_step(self) -> None:
        """Let the learner end the step that it is in, if any, and begin no other: the run is to stop."""
        self.stopping = True
        self.events.until(lambda: not self.clock.learning and not self._num_saving)

    # admission

    @property
    def paused(self) -> bool:
        """Whether nothing new may begin, here or at the learner."""
        return self.held or self.stopping

    def release(self) -> None:
        """Go on, after `held`, unless the run is to stop."""
        self.held = False
        self.clock.start()
        self._go_on()

    def _admit(self) -> None:
        """Open every free place and queue its calls, slices_per_call slices each.

        Which slices share a call, and so a network batch, follows from the config alone: a batch divides into whole
        calls, a dropped group keeps its place in them, and its replacement travels apart, in calls of its own.
        """
        if self.paused:
            return
        slices: list[SliceRequest] = []
        while (admission := self.buffer.admit()) is not None:
            own = self._open(admission)
            if admission.group_id < REPLACEMENT_STRIDE:
                slices += own
            else:
                self._queue(own)
                if not admission.again:
                    slices += self._dropped_before(admission)
            if len(slices) >= self.config.rollout.slices_per_call:
                self._queue(slices)
                slices = []
        assert not slices, "a batch divides into whole calls"

    def _open(self, admission: Admission) -> list[SliceRequest]:
        slices = self._slices(admission, admission.group_id)
        self._groups[admission.group_id] = OpenGroup(slices[0].group, len(slices))
        return slices

    def _dropped_before(self, admission: Admission) -> list[SliceRequest]:
        """Slices of a group that was dropped before a checkpoint: they only fill their places in the calls."""
        return self._slices(admission, admission.position)

    def _slices(self, admission: Admission, group_id: int) -> list[SliceRequest]:
        settings = self.config.rollout
        prompt, metadata = self.prompts.at(group_id)
        group = GroupRequest(
            group_id=group_id,
            prompt=prompt,
            metadata=metadata,
            num_samples=settings.samples_per_group,
            run_seed=self.config.run.seed,
            policy_version=admission.policy_version,
            incarnation=self.incarnation,
        )
        keeps = admission.position % settings.groups_per_batch < settings.preview_groups
        return split_group(
            group,
            settings.slice_size,
            self.config.sampling.shared_initial_noise,
            settings.preview_samples if keeps else 0,
        )

    def _queue(self, slices: list[SliceRequest]) -> None:
        """Make calls of the slices; those whose version is not out yet wait for it."""
        size = self.config.rollout.slices_per_call
        for first in range(0, len(slices), size):
            part = slices[first : first + size]
            version = part[0].group.policy_version
            call = Call(
                name=f"sampling of group {part[0].group.group_id}",
                weights=self.store.get(version) if self.store.has(version) else None,
                start=lambda worker, part=part: self.backend.sample(worker, part),
                on_answer=partial(self._on_sampled, part),
            )
            if call.weights is None:
                self._parked.setdefault(version, []).append(call)
            else:
                self.pool.submit([call])

    # sampled, scored, sealed

    def _on_sampled(self, slices: list[SliceRequest], call: Call, answer: SampleAnswer) -> None:
        if not call.num_lost_data:
            self._tally(slices[0]).stats += answer.stats
        for index, request in enumerate(slices):
            part = OpenSlice(request, call, answer, index)
            for reward in self.config.rewards.components:
                if self._is_wanted(request):
                    self._score(part, reward.name)

    def _tally(self, request: SliceRequest) -> Tally:
        position = request.group.group_id % REPLACEMENT_STRIDE
        return self.clock.of(position // self.config.rollout.groups_per_batch)

    def _is_wanted(self, request: SliceRequest) -> bool:
        """False when the group was dropped meanwhile, or has the slice already."""
        group = self._groups.get(request.group.group_id)
        return group is not None and not group.has(request)

    def _score(self, part: OpenSlice, reward: str) -> None:
        self.scorer.score(
            ScoreJob(
                reward=reward,
                previews=part.sampled.previews,
                request=part.request,
                on_answer=partial(self._on_scored, part, reward),
                on_failure=partial(self._on_failure, part.request),
                on_data_lost=lambda: self._sample_again(part),
            )
        )

    def _on_failure(self, request: SliceRequest, failure: RewardFailure) -> None:
        if self._is_wanted(request):
            self._tally(request).failed(failure)

    def _on_scored(self, part: OpenSlice, reward: str, answer: ScoreAnswer) -> None:
        request = part.request
        if not self._is_wanted(request):
            return
        if isinstance(answer.outcome, RewardFailure):
            self._drop(request, answer.outcome)
            return
        part.answers[reward] = answer
        if len(part.answers) < len(self.config.rewards.components):
            return
        try:
            batch = self.backend.fetch(part.sampled.slices)[part.index]
        except PartLost:
            self._sample_again(part)
            return
        self._tally(request).num_scored += sum(len(a.samples) for a in part.answers.values())
        group_id = request.group.group_id
        if self._groups[group_id].add(request, batch, list(part.answers.values())):
            self._seal(group_id)

    def _sample_again(self, part: OpenSlice) -> None:
        if self._is_wanted(part.request):
            self.pool.again(part.call, part.sampled)

    def _drop(self, request: SliceRequest, failure: RewardFailure) -> None:
        """Scoring failed for good: give the whole group up, never score it 0."""
        group_id = request.group.group_id
        gates.check_drops(self.buffer.num_dropped + 1, self.buffer, failure)
        log.warning("group %d is dropped and replaced: %s", group_id, failure)
        self._tally(request).num_dropped += 1
        del self._groups[group_id]
        self.buffer.drop(group_id)
        self._admit()

    def _seal(self, group_id: int) -> None:
        weights = {
            self.scorer.columns[reward.name]: reward.weight
            for reward in self.config.rewards.components
        }
        batch = seal(
            self._groups.pop(group_id),
            weights,
            num_states=len(self.plan.times),
            shared=self.config.sampling.shared_initial_noise,
        )
        self.buffer.seal(group_id, (self.backend.store(batch), batch))
        self._learn_if_ready()

    # learning and publishing

    def _learn_if_ready(self) -> None:
        """Start on the next batch as soon as it is whole and the learner has published the one before."""
        if (
            self.paused
            or self.clock.learning
            or not self.buffer.batch_ready()
            or self.store.latest < self.buffer.num_consumed
        ):
            return
        handles, batches = zip(*self.buffer.consume(), strict=True)
        if not self._first_batch_checked:
            gates.check_noise(batches, self.config.sampling.shared_initial_noise)
            gates.check_rewards_vary(batches)
            self._first_batch_checked = True
        self.clock.learning_started(batches)
        self.events.expect(self.backend.learn(handles), self._on_learned)
        self._admit()

    def _on_learned(self, stats: LearnerStats) -> None:
        self.clock.learned(stats)
        self.events.expect(self.backend.weights("raw"), self._on_weights)

    def _on_weights(self, answer: WeightsAnswer) -> None:
        self.store.publish(answer)
        if self.clock.learning:
            if (future := self.on_iteration(self.clock.finish(answer))) is not None:
                self._num_saving += 1
                self.events.expect(future, self._on_saved)
        else:
            self.clock.start()
        self._go_on()

    def _go_on(self) -> None:
        """Give out the calls that waited for a version that is out now, admit, learn."""
        if self.paused:
            return
        for version in [version for version in self._parked if self.store.has(version)]:
            calls = self._parked.pop(version)
            for call in calls:
                call.weights = self.store.get(version)
            self.pool.submit(calls)
        self._admit()
        self._learn_if_ready()

    def _on_saved(self, _: Any) -> None:
        self._num_saving -= 1
