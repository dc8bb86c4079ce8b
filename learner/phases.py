"""Seconds by phase, measured by one context manager."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Wall-clock seconds of the phases of one learner step, on one process's monotonic clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's seconds, the device's work included, to `phase`; with a block that raises,
        nothing is added."""
        began = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began
