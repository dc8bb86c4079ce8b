"""A backend in this process: virtual time, seeded delays, real Arrow data, requests checked, parts killed at will."""

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from cluster.backend import PartLost, SampleAnswer, ScoreAnswer, WeightsAnswer
from learner.stats import LearnerStats
from rewards.base import FailureKind, RewardFailure, RewardValues
from rollout.plan import StepPlan
from rollout.records import WeightReport
from rollout.stats import RolloutStats
from rollout.trajectory import Header, read_group, slice_batch

LATENT = (2,)
Part = tuple[str, int]
"""("worker" | "replica" | "learner" | "control", id)."""
LEARNER: Part = ("learner", 0)


def _lost() -> Any:
    raise PartLost("killed")


class FakeBackend:
    """Validates what it is asked: versions loaded, slices whole, batches in order, ids used once.

    A worker and the learner do one call after the other; `seconds` says how long each kind takes, in virtual time.
    """

    def __init__(self, plan: StepPlan, seed: int = 0):
        self.plan, self.rng = plan, random.Random(seed)
        self.time_s = 0.0
        self.seconds: Callable[[str], float] = lambda kind: self.rng.uniform(0.5, 1.5)
        """Kind of call (sample, load, score, learn, weights, save, start) -> virtual seconds."""
        self.loaded: dict[int, int | None] = {}
        """Version of every live worker."""
        self.broken_workers: set[int] = set()
        """Workers that never take up weights."""
        self.crashing: Callable[[int, list[int]], bool] = lambda worker, groups: False
        """Whether a sampling call raises."""
        self.dying: Callable[[Part, str], bool] = lambda part, kind: False
        """Whether a part dies of a call instead of answering it."""
        self.failing: Callable[[int, int], bool] = lambda group_id, attempt: False
        """Whether scoring a group fails, by how often it was asked before."""
        self.attempts: dict[int, int] = {}
        self.version = 0
        self.saved: dict[str, tuple[int, dict[str, Any], list[WeightsAnswer]]] = {}
        self.trained: list[list[tuple[int, int]]] = []
        """(group_id, policy_version) of every batch trained on."""
        self.sampled_shapes: set[int] = set()
        self.calls: Counter[int] = Counter()
        """Calls that each worker has and has not answered."""
        self.idle_at_second_call: list[int] = []
        """Usable workers without a call whenever another one got its second."""
        self.checkpoints: list[str] = []
        self.lost_data: set[int] = set()
        """Ids of previews and slices that went away with their node."""
        self.replicas: set[int] = set()
        self.learner_is_dead = False
        self._free_s: dict[Part, float] = {}
        self._used: set[Part] = set()
        self._answers: dict[int, tuple[Part, Callable[[], Any]]] = {}
        self._due: list[tuple[float, int]] = []
        self._done: set[int] = set()
        """Futures that came due while nobody waited for them."""
        self._count = 0

    def now(self) -> float:
        return self.time_s

    def busy_clock(self) -> float:
        return time.process_time()

    def _later(self, part: Part, kind: str, answer: Callable[[], Any], serial: bool = True) -> int:
        """A future of `answer`, computed when it is due; one after the other where the part is serial."""
        self._count += 1
        if self.dying(part, kind):
            self.kill(part)
        if part == LEARNER and self.learner_is_dead:
            answer = _lost
        begin_s = max(self.time_s, self._free_s.get(part, 0.0)) if serial else self.time_s
        due_s = begin_s + self.seconds(kind)
        if serial:
            self._free_s[part] = due_s
        self._answers[self._count] = (part, answer)
        heapq.heappush(self._due, (due_s if self.lives(part) else self.time_s, self._count))
        return self._count

    def lives(self, part: Part) -> bool:
        kind, number = part
        return {"worker": number in self.loaded, "replica": number in self.replicas}.get(kind, True)

    def kill(self, part: Part) -> None:
        """End a part; its answers become PartLost, at once."""
        kind, number = part
        if kind == "worker":
            self.loaded.pop(number, None)
            self.calls.pop(number, None)
        elif kind == "replica":
            self.replicas.discard(number)
        elif kind == "learner":
            self._answers = {
                n: (p, _lost if p == part else a) for n, (p, a) in self._answers.items()
            }
            self._free_s.pop(part, None)
            self.learner_is_dead = True

    # parts

    def _start(self, part: Part, facts: dict[str, Any]) -> int:
        assert part not in self._used, f"{part} was used before"
        self._used.add(part)
        return self._later(part, "start", lambda: facts)

    def add_worker(self, worker: int) -> int:
        self.loaded[worker] = None
        return self._start(("worker", worker), {})

    def remove_worker(self, worker: int) -> None:
        self.kill(("worker", worker))

    def add_replica(self, reward: str, replica: int) -> int:
        self.replicas.add(replica)
        return self._start(("replica", replica), {"column": reward, "canaries": "none"})

    def remove_replica(self, reward: str, replica: int) -> None:
        self.kill(("replica", replica))

    def start_learner(self) -> int:
        self.kill(LEARNER)  # whatever it is doing
        self.version, self.learner_is_dead = 0, False
        return self._later(LEARNER, "start", lambda: None)

    def next_command(self) -> int:
        self._count += 1
        self._answers[self._count] = (("control", 0), lambda: None)
        return self._count

    def report(self, status: dict[str, Any]) -> None:
        self.status = status

    # work

    def sample(self, worker, requests):
        version = requests[0].group.policy_version
        assert all(request.group.policy_version == version for request in requests)
        if worker in self.loaded:
            assert self.loaded[worker] == version, (
                f"worker {worker} holds {self.loaded[worker]}, call wants {version}"
            )
        self.sampled_shapes.add(len(requests))
        if self.calls[worker]:
            usable = self.loaded.keys() - self.broken_workers
            self.idle_at_second_call += [w for w in usable if not self.calls[w]]
        self.calls[worker] += 1

        def answer() -> SampleAnswer:
            self.calls[worker] -= 1
            if self.crashing(worker, [request.group.group_id for request in requests]):
                raise RuntimeError("CUDA error")
            return self._sample(requests)

        return self._later(("worker", worker), "sample", answer)

    def _sample(self, requests) -> SampleAnswer:
        count = sum(request.count for request in requests)
        stats = RolloutStats(num_images=count, num_transitions=count * self.plan.num_steps)
        return SampleAnswer(
            slices=[self._batch(request) for request in requests],
            previews=list(requests),
            stats=stats,
        )

    def _batch(self, request):
        num_states = len(self.plan.times)
        header = Header(
            plan=self.plan,
            run_seed=request.group.run_seed,
            latent_shape=LATENT,
            log_prob_reduction="mean",
            embedding_dtype="float32",
            embedding_shapes={"conditioning.x": (1,)},
        )
        draw = np.random.default_rng([request.group.group_id % 2**32, request.first])
        states = draw.standard_normal((request.count, num_states, *LATENT)).astype(np.float32)
        states[:, 0] = np.float32(request.group.group_id)
        return slice_batch(
            header,
            request,
            states,
            np.zeros((request.count, self.plan.num_steps), np.float32),
            {"conditioning.x": np.zeros(1, np.float32)},
            [None] * request.count,
        )

    def load_weights(self, worker, version, tensors):
        def load() -> WeightReport:
            if worker in self.broken_workers:
                return WeightReport(version=version, num_tensors=1, checksum="other")
            self.loaded[worker] = version
            return WeightReport(version=version, num_tensors=1, checksum=f"sum {version}")

        return self._later(("worker", worker), "load", load)

    def score(self, reward, replica, previews, request):
        assert request in previews

        def answer() -> ScoreAnswer:
            if id(previews) in self.lost_data:
                raise PartLost("the node is gone", is_data=True)
            return self._score(reward, request)

        return self._later(("replica", replica), "score", answer, serial=False)

    def _score(self, reward, request) -> ScoreAnswer:
        group_id = request.group.group_id
        attempt = self.attempts.get(group_id, 0)
        self.attempts[group_id] = attempt + 1
        states = [s for s in self.plan.scored if s > 0]
        pairs = [
            (i, s) for s in states for i in range(request.first, request.first + request.count)
        ]
        if 0 in self.plan.scored and request.score_initial:
            pairs.append((request.first, 0))
        samples, columns = (np.array(part, np.int32) for part in zip(*pairs, strict=True))
        if self.failing(group_id, attempt):
            outcome: Any = RewardFailure(
                kind=FailureKind.EXCEPTION, reward=reward, message="boom", num_images=len(pairs)
            )
        else:
            outcome = RewardValues(columns={reward: samples + columns / 100})
        return ScoreAnswer(samples=samples, states=columns, outcome=outcome)

    def learn(self, groups):
        return self._later(LEARNER, "learn", lambda: self._learn(groups))

    def _learn(self, groups) -> LearnerStats:
        read = [read_group(group) for group in groups]
        self.trained.append([(group.group_id, group.policy_version) for group in read])
        self.version += 1
        numbers = {field.name: 0.0 for field in fields(LearnerStats)}
        return LearnerStats(**{**numbers, "policy_version": read[0].policy_version})

    def weights(self, kind):
        def answer() -> WeightsAnswer:
            version = self.version
            return WeightsAnswer(
                tensors={}, version=version, checksum=f"sum {version}", num_bytes=4
            )

        return self._later(LEARNER, "weights", answer)

    def save_checkpoint(self, folder, state, older):
        def save() -> None:
            self.checkpoints.append(folder)
            self.saved[folder] = (self.version, state, list(older))

        return self._later(LEARNER, "save", save)

    def load_checkpoint(self, folder):
        def load() -> tuple[dict[str, Any], list[WeightsAnswer]]:
            self.version, state, older = self.saved[folder]
            return state, older

        return self._later(LEARNER, "load", load)

    def wait(self, futures, timeout_s):
        """Let virtual time pass until a future is due, at most timeout_s."""
        while self._due and self._due[0][1] not in self._answers:
            heapq.heappop(self._due)
        ended = [f for f in futures if f in self._done or not self.lives(self._answers[f][0])]
        if ended:
            return ended[:1]
        if not self._due or self._due[0][0] > self.time_s + timeout_s:
            self.time_s += timeout_s
            return []
        due_s, future = heapq.heappop(self._due)
        self.time_s = max(self.time_s, due_s)
        if future not in futures:
            self._done.add(future)
            return []
        return [future]

    def result(self, future):
        part, answer = self._answers.pop(future)
        self._done.discard(future)
        if not self.lives(part):
            raise PartLost("killed")
        return answer()

    def forget(self, future):
        self._answers.pop(future, None)
        self._done.discard(future)

    def fetch(self, handle):
        if id(handle) in self.lost_data:
            raise PartLost("the node is gone", is_data=True)
        return handle

    def store(self, data):
        return data

    def close(self) -> None:
        for part in [
            *(("worker", n) for n in self.loaded),
            *(("replica", n) for n in self.replicas),
        ]:
            self.kill(part)
        self.kill(LEARNER)
