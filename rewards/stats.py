"""What a reward server counted. Imports no torch; `cluster.metrics` publishes it."""

from dataclasses import dataclass, field, replace

from rewards.records import FailureKind


def _no_failures() -> dict[FailureKind, int]:
    return dict.fromkeys(FailureKind, 0)


@dataclass(slots=True, kw_only=True)
class RewardStats:
    """Totals since the server started, of one reward; written by its event loop alone.

    Intervals come from one process's monotonic clock.
    """

    num_calls: int = 0
    """Calls submitted."""
    num_images: int = 0
    """Images submitted; a retried image counts once."""
    num_batches: int = 0
    """Times the reward was called, retries included."""
    num_retries: int = 0
    """Of those, parts of a failed merged batch that were tried alone."""
    num_failures: dict[FailureKind, int] = field(default_factory=_no_failures)
    """Calls answered with a failure, by kind."""
    num_abandoned_threads: int = 0
    """Compute threads given up because a reward call passed timeout_s; at most one at a time."""
    max_batch_images: int = 0
    """Images of the largest batch so far."""
    queued_images: int = 0
    """Images waiting at this moment."""
    compute_s: float = 0.0
    """Time inside reward calls, timed-out ones included."""
    wait_s: float = 0.0
    """Time from submission to compute, summed over pieces (calls, cut to max_batch images)."""

    def snapshot(self) -> "RewardStats":
        """A copy that no longer changes."""
        return replace(self, num_failures=dict(self.num_failures))
