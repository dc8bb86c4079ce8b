"""What each process is doing, written where the killer sees it: one empty file for each phase that is under way.

A file's name says everything, PHASE-PID-BEGAN_NS-LENGTH_MS, so it appears and goes in one step. The clock is the
machine's monotonic one, which all processes share. A process that is killed leaves its marks behind: that is how one
knows that it died inside the phase.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

PHASES = ("sample", "score", "seal", "train", "publish", "checkpoint")
OFF = "off"
"""A file of this name ends all lingering."""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """One process in one phase."""

    began_ns: int
    phase: str
    pid: int
    length_ms: int

    @property
    def name(self) -> str:
        return f"{self.phase}-{self.pid}-{self.began_ns}-{self.length_ms}"

    def at(self, fraction: float) -> float:
        """Seconds on the monotonic clock when this fraction of the phase is over."""
        return self.began_ns / 1e9 + fraction * self.length_ms / 1e3


def linger(folder: Path | None, phase: str, length_s: float) -> None:
    """Stay in a phase for so long, and say so meanwhile; without a folder, or once it holds OFF, do nothing."""
    assert phase in PHASES, phase
    if folder is None or (folder / OFF).exists():
        return
    mark = Mark(time.monotonic_ns(), phase, os.getpid(), round(1e3 * length_s))
    path = folder / mark.name
    path.touch()
    try:
        time.sleep(length_s)
    finally:
        path.unlink()


def read_marks(folder: Path, phase: str | None = None) -> list[Mark]:
    """Return the marks that are there, oldest first."""
    found = []
    for name in os.listdir(folder):
        if name != OFF:
            kind, pid, began_ns, length_ms = name.split("-")
            found.append(Mark(int(began_ns), kind, int(pid), int(length_ms)))
    return sorted(mark for mark in found if phase in (None, mark.phase))


def sweep(folder: Path) -> None:
    """Remove what dead processes left."""
    for mark in read_marks(folder):
        if not is_running(mark.pid):
            (folder / mark.name).unlink(missing_ok=True)


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"
