"""A backend in this process: answers come in a seeded random order, data is real Arrow, requests are checked."""

import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from cluster.backend import SampleAnswer, ScoreAnswer, WeightsAnswer
from learner.stats import LearnerStats
from rewards.base import FailureKind, RewardFailure, RewardValues
from rollout.plan import StepPlan
from rollout.records import WeightReport
from rollout.stats import RolloutStats
from rollout.trajectory import Header, read_group, slice_batch

LATENT = (2,)


class FakeBackend:
    """Validates what it is asked: versions loaded, slices whole, batches in order. `result` computes lazily."""

    def __init__(self, plan: StepPlan, num_workers: int = 2, seed: int = 0):
        self.plan, self.rng = plan, random.Random(seed)
        self.loaded: dict[int, int | None] = dict.fromkeys(range(num_workers))
        self.broken_workers: set[int] = set()
        """Workers that never take up weights."""
        self.failing: Callable[[int, int], bool] = lambda group_id, attempt: False
        """Whether scoring a group fails, by how often it was asked before."""
        self.attempts: dict[int, int] = {}
        self.version = 0
        self.trained: list[list[tuple[int, int]]] = []
        """(group_id, policy_version) of every batch trained on."""
        self.sampled_shapes: set[int] = set()
        self.calls: dict[int, int] = dict.fromkeys(self.loaded, 0)
        """Calls that each worker has and has not answered."""
        self.idle_at_second_call: list[int] = []
        """Usable workers without a call whenever another one got its second."""
        self.checkpoints: list[str] = []
        self._answers: dict[int, Callable[[], Any]] = {}
        self._count = 0

    def _later(self, answer: Callable[[], Any]) -> int:
        self._count += 1
        self._answers[self._count] = answer
        return self._count

    def worker_ids(self) -> list[int]:
        return list(self.loaded)

    def reward_columns(self):
        return {"shapes": "shapes"}

    def sample(self, worker, requests):
        version = requests[0].group.policy_version
        assert all(request.group.policy_version == version for request in requests)
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
            return self._sample(requests)

        return self._later(answer)

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

        return self._later(load)

    def score(self, reward, previews, request):
        assert request in previews
        return self._later(lambda: self._score(reward, request))

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
        return self._later(lambda: self._learn(groups))

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

        return self._later(answer)

    def save_checkpoint(self, folder, state):
        return self._later(lambda: self.checkpoints.append(folder))

    def wait(self, futures):
        return [self.rng.choice(sorted(futures))]

    def result(self, future):
        return self._answers.pop(future)()

    def fetch(self, handle):
        return handle

    def store(self, data):
        return data
