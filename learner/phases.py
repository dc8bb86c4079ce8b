"""Seconds by phase, measured by one context manager."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Wall-clock seconds of the phases of one learner step, on one process's monotonic clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's seconds to `phase`; with a block that raises, nothing is added."""
        began = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
