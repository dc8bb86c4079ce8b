"""The actors' processes of a Ray that this process has started: found by name, below this one."""

import statistics
from collections.abc import Sequence

import psutil


def actor_processes(actor: str) -> list[psutil.Process]:
    """Processes below this one that Ray named after an actor class: "ray::RolloutActor", "ray::LearnerActor.step"."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:  # it ended meanwhile
            continue
        if words and words[0].split(".")[0] == f"ray::{actor}":
            found.append(process)
    return found


def private_mb(processes: Sequence[psutil.Process]) -> float | None:
    """Median MB of memory that a process shares with no other (USS); None without processes."""
    sizes = [process.memory_full_info().uss / 1e6 for process in processes]
    return statistics.median(sizes) if sizes else None
