"""What one iteration did and how long it took: counted by batch as answers arrive, handed on as one record.

Counts belong to the batch that a group is part of, not to the time when it was made, so that they are the same
whatever was lost, made again or begun early.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
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
    """Summed over the calls that made the batch."""
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


@dataclass(slots=True)
class Tally:
    """What was done for one batch."""

    stats: RolloutStats = field(default_factory=RolloutStats)
    num_scored: int = 0
    num_dropped: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def failed(self, failure: RewardFailure) -> None:
        """A scoring failed."""
        self.failures[str(failure.kind)] += 1
        self.num_scored += failure.num_images


class IterationClock:
    """Collects an iteration's facts. One iteration ends, and the next begins, when a version is published."""

    def __init__(self) -> None:
        self.learning = False
        self._tallies: dict[int, Tally] = {}
        self.start()

    def start(self) -> None:
        """Begin timing anew: after the first version is out, or after something that is no iteration's."""
        self._started, self._push_s = time.monotonic(), 0.0

    def of(self, batch: int) -> Tally:
        """Return the tally of a batch that is not consumed yet."""
        return self._tallies.setdefault(batch, Tally())

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
        now, tally = time.monotonic(), self._tallies.pop(weights.version - 1)
        record = IterationRecord(
            iteration=weights.version,
            batches=self._batches,
            learner_stats=self._learner_stats,
            rollout_stats=tally.stats,
            num_scored=tally.num_scored,
            failures=dict(tally.failures),
            num_dropped=tally.num_dropped,
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
        self.start()
        return record
