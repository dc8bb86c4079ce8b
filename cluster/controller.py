"""The loop that turns prompts into policy versions. One thread, driven by answers; it moves handles, not images.

    PromptSource                                                        (rollout/prompts.py)
        | admit: position p may start while p < (consumed + k + 1) B    (cluster/buffer.py)
        v
    slices --call--> rollout worker --previews--> reward servers
        |  at most CALLS_PER_WORKER calls a worker    |  value, or typed failure: rescore, then drop the group
        v                                             v
    record batches --------------------------------> seal ------> buffer, in order of position
                                                                    | batch b whole
                                                                    v
    workers <--tensors, proved by checksum-- weight store <-- learner: version b + 1

What may stand still, and what sets it going again (B groups a batch, k = max_policy_lag):

    who             consumes             waits for                        unblocked by
    admission       prompts              a free place of (k + 1) B        a batch consumed by the learner
    a worker        calls                the version its call names       the push of that version, proved
    a slice         previews             its rewards                      the reward servers
    the learner     batch b              the last group of batch b        sealing
    publishing      version b + 1        the learner's step               the step's end

Nothing downstream of admission refuses a group, so the straggler that batch b waits for always finds room.
While one call is scored, its worker samples the next.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cluster import gates
from cluster.assembly import OpenGroup, seal, split_group
from cluster.backend import Backend, Future, SampleAnswer, ScoreAnswer, WeightsAnswer
from cluster.buffer import REPLACEMENT_STRIDE, TrajectoryBuffer
from cluster.config import RunConfig
from cluster.iteration import IterationClock, IterationRecord
from cluster.weights import WeightStore, WorkerTable
from learner.stats import LearnerStats
from rewards.base import RewardFailure
from rollout.plan import StepPlan
from rollout.prompts import PromptSource
from rollout.records import GroupRequest, SliceRequest, WeightReport

log = logging.getLogger(__name__)

CALLS_PER_WORKER = 2
"""One is sampled while the next already waits in the worker's queue, so that it never idles on the controller."""


@dataclass(slots=True)
class OpenSlice:
    """A sampled slice on its way through the reward servers."""

    request: SliceRequest
    sampled: SampleAnswer
    index: int
    """Its place in the call."""
    answers: dict[str, ScoreAnswer] = field(default_factory=dict)
    num_failures: int = 0


class Controller:
    """Runs batches consumed .. num_iterations - 1 and hands every finished iteration to `on_iteration`."""

    def __init__(
        self,
        config: RunConfig,
        plan: StepPlan,
        backend: Backend,
        prompts: PromptSource,
        on_iteration: Callable[[IterationRecord], Future | None],
        consumed: int = 0,
    ):
        """`on_iteration` may return a future (a checkpoint being written) that must end well before the run does.

        `consumed` is the number of batches that a resumed run has behind it.
        """
        self.config, self.plan, self.backend, self.prompts = config, plan, backend, prompts
        self.on_iteration = on_iteration
        self.buffer: TrajectoryBuffer[tuple[Any, Any]] = TrajectoryBuffer(
            config.rollout.groups_per_batch,
            config.run.max_policy_lag,
            config.run.num_iterations,
            consumed,
        )
        self.store = WeightStore(config.run.max_policy_lag)
        self.workers = WorkerTable(backend.worker_ids())
        self.clock = IterationClock()
        self._pending: dict[Future, Callable[[Any], None]] = {}
        self._groups: dict[int, OpenGroup] = {}
        self._slices: deque[SliceRequest] = deque()
        self._first_batch_checked = False

    def run(self) -> None:
        """Return when the last batch's weights are published."""
        self._expect(self.backend.weights("raw"), self._on_weights)
        while self._pending:
            for future in self.backend.wait(list(self._pending)):
                handle = self._pending.pop(future)
                handle(self.backend.result(future))
            self._dispatch()
        assert self.buffer.num_consumed == self.config.run.num_iterations, (
            f"the loop ran dry after {self.buffer.num_consumed} of {self.config.run.num_iterations} batches"
        )

    def _expect(self, future: Future, handle: Callable[[Any], None]) -> None:
        self._pending[future] = handle

    # admission and dispatch

    def _dispatch(self) -> None:
        """Give every worker that has room its next call, after the weights that the call names."""
        while (call := self._next_call()) is not None:
            version = call[0].group.policy_version
            worker = self._worker_for(version)
            if worker is None:
                return
            for request in call:
                self._slices.remove(request)
            self.workers.calls[worker] += 1
            self._expect(
                self.backend.sample(worker, call),
                lambda a, w=worker, c=call: self._on_sampled(w, c, a),
            )

    def _next_call(self) -> list[SliceRequest] | None:
        """Return the next slices_per_call slices of one version, in order of admission.

        Which slices share a call, and so a network batch, follows from the config alone: a dropped group's queued
        slices stay in place (and are sampled for nothing), and replacements travel apart, in calls of their own.
        """
        wanted, call = self.config.rollout.slices_per_call, self._alike()
        while len(call) < wanted and (slices := self._admit()) is not None:
            self._slices.extend(slices)
            call = self._alike()
        if not call or not self.store.has(call[0].group.policy_version):
            return None
        return call[:wanted]

    def _alike(self) -> list[SliceRequest]:
        """Return the queued slices that may share a call with the first one."""
        return [part for part in self._slices if _kind(part) == _kind(self._slices[0])]

    def _admit(self) -> list[SliceRequest] | None:
        admission = self.buffer.admit()
        if admission is None:
            return None
        settings = self.config.rollout
        prompt, metadata = self.prompts.at(admission.group_id)
        group = GroupRequest(
            group_id=admission.group_id,
            prompt=prompt,
            metadata=metadata,
            num_samples=settings.samples_per_group,
            run_seed=self.config.run.seed,
            policy_version=admission.policy_version,
        )
        keeps = admission.position % settings.groups_per_batch < settings.preview_groups
        slices = split_group(
            group,
            settings.slice_size,
            self.config.sampling.shared_initial_noise,
            settings.preview_samples if keeps else 0,
        )
        self._groups[group.group_id] = OpenGroup(group, len(slices))
        return slices

    def _worker_for(self, version: int) -> int | None:
        """Return a worker that proved this version and has room; start pushing it to idle ones that lack it.

        A worker gets a second call only when no other is about to be ready for its first.
        """
        usable = self.workers.usable()
        for worker in usable:
            idle = self.workers.calls[worker] == 0 and worker not in self.workers.loading
            if self.workers.version[worker] != version and idle:
                self._push(worker, self.store.get(version))
        ready = [worker for worker in usable if self.workers.version[worker] == version]
        if not ready or self.workers.calls[ready[0]] >= CALLS_PER_WORKER:
            return None
        if self.workers.calls[ready[0]] and self.workers.loading:
            return None
        return ready[0]

    def _push(self, worker: int, weights: WeightsAnswer) -> None:
        self.workers.sent(worker)
        started = time.monotonic()

        def check(report: WeightReport) -> None:
            self.workers.answered(worker, report, weights)
            self.clock.pushed(time.monotonic() - started)

        self._expect(self.backend.load_weights(worker, weights.version, weights.tensors), check)

    # sampled, scored, sealed

    def _on_sampled(self, worker: int, call: list[SliceRequest], answer: SampleAnswer) -> None:
        self.workers.calls[worker] -= 1
        self.clock.sampled(answer.stats)
        for index, request in enumerate(call):
            if request.group.group_id not in self._groups:
                continue  # dropped meanwhile
            self._score(OpenSlice(request, answer, index), self._reward_names())

    def _reward_names(self) -> list[str]:
        return [reward.name for reward in self.config.rewards.components]

    def _score(self, part: OpenSlice, names: Iterable[str]) -> None:
        for name in names:
            future = self.backend.score(name, part.sampled.previews, part.request)
            self._expect(future, lambda answer, n=name: self._on_scored(part, n, answer))

    def _on_scored(self, part: OpenSlice, name: str, answer: ScoreAnswer) -> None:
        group_id = part.request.group.group_id
        self.clock.scored(len(answer.samples))
        if group_id not in self._groups:
            return  # dropped meanwhile, because of another slice or reward
        if isinstance(answer.outcome, RewardFailure):
            self._on_failure(part, name, answer.outcome)
            return
        part.answers[name] = answer
        if len(part.answers) < len(self.config.rewards.components):
            return
        batch = self.backend.fetch(part.sampled.slices)[part.index]
        if self._groups[group_id].add(batch, list(part.answers.values())):
            self._seal(group_id)

    def _on_failure(self, part: OpenSlice, name: str, failure: RewardFailure) -> None:
        """Ask again, at most max_rescores times; then give the whole group up, never score it 0."""
        part.num_failures += 1
        self.clock.failed(failure)
        log.warning(
            "reward %s failed on group %d (%s): %s",
            name,
            part.request.group.group_id,
            failure.kind,
            failure.message,
        )
        if part.num_failures <= self.config.rewards.max_rescores:
            self._score(part, [name])
            return
        group_id = part.request.group.group_id
        gates.check_drops(self.buffer.num_dropped + 1, self.buffer, failure)
        log.warning("group %d is dropped and replaced", group_id)
        del self._groups[group_id]
        self.buffer.drop(group_id)
        self.clock.dropped()

    def _seal(self, group_id: int) -> None:
        columns = self.backend.reward_columns()
        weights = {columns[reward.name]: reward.weight for reward in self.config.rewards.components}
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
            self.clock.learning
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
        self._expect(self.backend.learn(handles), self._on_learned)

    def _on_learned(self, stats: LearnerStats) -> None:
        self.clock.learned(stats)
        self._expect(self.backend.weights("raw"), self._on_weights)

    def _on_weights(self, answer: WeightsAnswer) -> None:
        self.store.publish(answer)
        if self.clock.learning:
            if (future := self.on_iteration(self.clock.finish(answer))) is not None:
                self._expect(future, lambda _: None)
        else:
            self.clock.start()
        self._learn_if_ready()


def _kind(part: SliceRequest) -> tuple[int, bool]:
    """What the slices of one call have in common: the version, and whether they replace a dropped group."""
    return part.group.policy_version, part.group.group_id >= REPLACEMENT_STRIDE
