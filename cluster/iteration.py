"""What one iteration did and how long it took: counted as answers arrive, handed on as one record."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from cluster.backend import WeightsAnswer
from learner.stats import LearnerStats
from rewards.base import RewardFailure
from rollout.stats import RolloutStats


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """One consumed batch: its groups, its counts, its seconds."""

    iteration: int
    """1 for the first batch consumed."""
    batches: tuple[Any, ...]
    """The batch's sealed groups, pa.RecordBatch each."""
    learner_stats: LearnerStats
    rollout_stats: RolloutStats
    """Summed over the calls whose answer came in this iteration."""
    num_scored: int
    """Previews that reward servers answered for, once per reward."""
    failures: dict[str, int]
    """Reward failures by kind."""
    num_dropped: int
    seconds: dict[str, float]
    """Wall-clock: rollout (until the batch was whole), learn, publish (gather, until the version is out), total."""
    push_s: float
    """Longest time that a worker took to answer a push in this iteration."""
    weight_bytes: int


class IterationClock:
    """Collects an iteration's facts. One iteration ends, and the next begins, when a version is published."""

    def __init__(self) -> None:
        self.iteration = 0
        self.learning = False
        self._reset()

    def _reset(self) -> None:
        self._started = time.monotonic()
        self._stats = RolloutStats()
        self._num_scored, self._num_dropped, self._push_s = 0, 0, 0.0
        self._failures: Counter[str] = Counter()

    def start(self) -> None:
        """Begin counting anew: after the first version is out, or after something that is no iteration's."""
        self._reset()

    def sampled(self, stats: RolloutStats) -> None:
        """A call came back."""
        self._stats = self._stats + stats

    def scored(self, num_previews: int) -> None:
        """A reward server answered for some previews."""
        self._num_scored += num_previews

    def failed(self, failure: RewardFailure) -> None:
        """A scoring failed."""
        self._failures[str(failure.kind)] += 1

    def dropped(self) -> None:
        """A group was given up."""
        self._num_dropped += 1

    def pushed(self, seconds: float) -> None:
        """A worker answered a push of weights."""
        self._push_s = max(self._push_s, seconds)

    def learning_started(self, batches: tuple[Any, ...]) -> None:
        """The batch is whole and the learner has it."""
        self.learning, self._batches, self._whole = True, batches, time.monotonic()

    def learned(self, stats: LearnerStats) -> None:
        """The learner's step is done."""
        self._learner_stats, self._learned = stats, time.monotonic()

    def finish(self, weights: WeightsAnswer) -> IterationRecord:
        """The new version is out: return the iteration's record and begin the next."""
        now = time.monotonic()
        record = IterationRecord(
            iteration=weights.version,
            batches=self._batches,
            learner_stats=self._learner_stats,
            rollout_stats=self._stats,
            num_scored=self._num_scored,
            failures=dict(self._failures),
            num_dropped=self._num_dropped,
            seconds={
                "rollout": self._whole - self._started,
                "learn": self._learned - self._whole,
                "publish": now - self._learned,
                "total": now - self._started,
            },
            push_s=self._push_s,
            weight_bytes=weights.num_bytes,
        )
        self.learning = False
        self._reset()
        return record
