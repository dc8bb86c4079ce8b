"""A training run in a process of its own, as a user starts it, watched from outside through its metrics.jsonl."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.scaling_setup import Work, settings
from cluster.run_folder import METRICS

POLL_S = 0.02
LONGEST_S = 300.0
"""A row that takes longer will not come."""
STOP_S = 120.0


class WatchedRun:
    """Rows in the order in which they were written, each with the time when it was seen."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.folder, self.process, self.log = folder, process, log
        self.rows: list[dict[str, Any]] = []
        self.seen_s: list[float] = []
        """time.monotonic() of each row."""
        self._read = 0

    def look(self) -> None:
        """Read what was added."""
        path = self.folder / METRICS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self.rows.append(json.loads(line))
            self.seen_s.append(time.monotonic())

    def wait(self, wanted: Callable[[dict[str, Any]], bool], first: int) -> int:
        """Index of the first wanted row, from row `first` on, as soon as it is there.

        RuntimeError when the run ends first, TimeoutError after LONGEST_S.
        """
        deadline = time.monotonic() + LONGEST_S
        while True:
            self.look()
            for index in range(first, len(self.rows)):
                if wanted(self.rows[index]):
                    return index
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended ({self.process.returncode}): {self._tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no such row within {LONGEST_S:g} s: {self._tail()}")
            time.sleep(POLL_S)

    def more(self, count: int) -> None:
        """Wait for so many rows more."""
        self.look()
        self.wait(lambda row: True, len(self.rows) + count - 1)

    def stop(self) -> None:
        """End the run in good order, or after STOP_S in any."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.look()

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


@contextmanager
def watched_run(work: Work, address: str, *overrides: str) -> Iterator[WatchedRun]:
    """`flowcredit train` on the Ray at `address`, in a folder that goes with it; ended at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder, "run"), Path(folder, "log.txt")
        words = [*settings(work), f'run.dir="{run_dir}"', *overrides]
        command = [sys.executable, "-m", "cluster", "train", "configs/quickstart.toml"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *words, "--address", address],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        run = WatchedRun(run_dir, process, log)
        try:
            yield run
        finally:
            run.stop()


def scale(run: WatchedRun, workers: int, address: str) -> None:
    """`flowcredit scale` in another process; CalledProcessError when it fails."""
    command = [sys.executable, "-m", "cluster", "scale", str(run.folder)]
    words = ["--rollout-workers", str(workers), "--address", address]
    subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)


def ready_workers(row: dict[str, Any]) -> int:
    """Rollout workers that were ready when a row was written."""
    return row["parts"]["rollout_workers"]["ready"]
