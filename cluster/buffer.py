"""The trajectory buffer: which group may start, with which weights, and when a batch may be trained on.

Positions count the groups of the run: batch b is made of positions bB .. bB + B - 1, and is consumed whole and in
order. A position goes

    free --admit--> open --seal--> sealed --consume--> consumed
                     ^  |
                     +--+ drop: the same position again, with a replacement group id

Version by arithmetic: every consumed batch publishes one policy version, and batch b is sampled with exactly

    version(b) = max(0, b - k)          k = max_policy_lag

so a batch is consumed at most k versions after the one it was sampled with, nothing is ever discarded as stale,
and which weights made which group does not depend on timing. Admission is the only throttle:

    position p may be admitted while  p < (consumed + k + 1) B

which bounds what is in flight or waiting by (k + 1) B groups, and never refuses a group that was admitted.
No ray, no torch here: `item` is whatever the caller stores for a sealed group.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

REPLACEMENT_STRIDE = 1 << 40
"""Added to a group's id each time it is dropped; group ids below it are first attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Leave to make one group."""

    position: int
    """The group's place in the run's order."""
    group_id: int
    """Equals position, or position + attempt * REPLACEMENT_STRIDE after a drop."""
    policy_version: int
    """The version that must sample it."""
    again: bool = False
    """Whether the position was admitted before, in this process."""


class TrajectoryBuffer(Generic[Item]):
    """Invariant: every position is consumed exactly once, in batches of B in order, whatever order they seal in."""

    def __init__(
        self,
        groups_per_batch: int,
        max_policy_lag: int,
        num_batches: int,
        consumed: int = 0,
        attempts: dict[int, int] | None = None,
    ):
        """`consumed` batches are already behind us (a resumed run); num_batches end the run.

        `attempts`: how often the group of a position was dropped before (see `attempts`).
        """
        assert groups_per_batch >= 1
        assert max_policy_lag >= 0
        assert 0 <= consumed <= num_batches
        self.groups_per_batch, self.max_policy_lag = groups_per_batch, max_policy_lag
        self.num_batches, self.num_consumed = num_batches, consumed
        self._next = consumed * groups_per_batch
        self._attempts = dict(attempts or {})
        self._retry: list[Admission] = []
        self._open: dict[int, Admission] = {}
        self._sealed: dict[int, Item] = {}
        self.num_dropped = 0
        self.num_admitted = 0
        """Replacements included."""

    @property
    def capacity(self) -> int:
        """Most groups that are open or sealed at once: (k + 1) B."""
        return (self.max_policy_lag + 1) * self.groups_per_batch

    @property
    def num_open(self) -> int:
        """Groups admitted and not sealed."""
        return len(self._open) + len(self._retry)

    @property
    def num_sealed(self) -> int:
        """Groups sealed and not consumed."""
        return len(self._sealed)

    @property
    def attempts(self) -> dict[int, int]:
        """How often the group of each position that is not consumed was dropped; a checkpoint keeps it."""
        first = self.num_consumed * self.groups_per_batch
        return {position: n for position, n in self._attempts.items() if position >= first}

    def version_for(self, batch: int) -> int:
        """Return the policy version that samples this batch."""
        return max(0, batch - self.max_policy_lag)

    def admit(self) -> Admission | None:
        """Open the next position, a dropped one first; None while the throttle holds or the run is all admitted."""
        if self._retry:
            admission = self._retry.pop(0)
        else:
            last = (
                min(self.num_consumed + self.max_policy_lag + 1, self.num_batches)
                * self.groups_per_batch
            )
            if self._next >= last:
                return None
            version = self.version_for(self._next // self.groups_per_batch)
            group_id = self._next + self._attempts.get(self._next, 0) * REPLACEMENT_STRIDE
            admission = Admission(position=self._next, group_id=group_id, policy_version=version)
            self._next += 1
        self._open[admission.position] = admission
        self.num_admitted += 1
        return admission

    def seal(self, group_id: int, item: Item) -> None:
        """Store the finished group of an open position."""
        self._sealed[self._close(group_id).position] = item

    def drop(self, group_id: int) -> None:
        """Give up an open group; its position will be admitted again under a replacement id."""
        admission = self._close(group_id)
        self.num_dropped += 1
        self._attempts[admission.position] = self._attempts.get(admission.position, 0) + 1
        self._retry.append(
            Admission(
                position=admission.position,
                group_id=group_id + REPLACEMENT_STRIDE,
                policy_version=admission.policy_version,
                again=True,
            )
        )

    def _close(self, group_id: int) -> Admission:
        position = group_id % REPLACEMENT_STRIDE
        found = self._open.get(position)
        assert found is not None, f"group {group_id} is not open"
        assert found.group_id == group_id, f"group {group_id} is not open, {found.group_id} is"
        return self._open.pop(position)

    def batch_ready(self) -> bool:
        """Whether the next batch in order is sealed whole."""
        first = self.num_consumed * self.groups_per_batch
        return self.num_consumed < self.num_batches and all(
            position in self._sealed for position in range(first, first + self.groups_per_batch)
        )

    def consume(self) -> list[Item]:
        """Return the next batch's groups in order of position, and free their places."""
        assert self.batch_ready()
        first = self.num_consumed * self.groups_per_batch
        self.num_consumed += 1
        return [
            self._sealed.pop(position) for position in range(first, first + self.groups_per_batch)
        ]
