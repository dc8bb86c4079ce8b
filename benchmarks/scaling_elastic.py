"""`flowcredit scale` 1 -> 3 -> 1 from another process while a run trains: images/s of sleeping workers, the ledger."""

import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from benchmarks.scaling_climb import ledger
from benchmarks.scaling_run import WatchedRun, ready_workers, scale, watched_run
from benchmarks.scaling_setup import Work, local_ray

WANTED = 2.7
"""images/s of three workers over that of one."""
FEW, MANY = 1, 3
CALLS = 18
"""Of a batch."""


def measure_elastic(call_s: float, rows: int) -> dict[str, Any]:
    """At least `rows` whole iterations at each of 1, 3 and 1 workers."""
    work = Work(call_s=call_s, calls=CALLS, workers=FEW)
    with (
        local_ray(MANY) as address,
        watched_run(work, address, "run.checkpoint_every=1000") as run,
    ):
        stay(run, FEW, rows)
        for workers in (MANY, FEW):
            scale(run, workers, address)
            stay(run, workers, rows)
    return {
        "call_s": call_s,
        "calls_per_batch": CALLS,
        "phases": phases(run.rows),
        "ledger": ledger(run.rows, CALLS),
    }


def stay(run: WatchedRun, workers: int, rows: int) -> None:
    """Wait until so many workers are ready, and for so many whole iterations with them, the ends not counted."""
    run.look()
    run.wait(lambda row: ready_workers(row) == workers, len(run.rows))
    run.more(rows + 1)
    print(f"  {workers} workers measured", flush=True)


def phases(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stretches of rows with as many ready workers; each one's first and last row are left out: a change is in them.

    A stretch of fewer than three rows is left out whole.
    """
    found = []
    for workers, stretch in groupby(rows, ready_workers):
        each = [row["images_per_s"] for row in list(stretch)[1:-1]]
        if each:
            found.append(
                {"workers": workers, "images_per_s": statistics.median(each), "each": each}
            )
    return found


def gain(found: Sequence[dict[str, Any]]) -> float:
    """Median images/s with three workers over that with one."""
    few, many = (
        [one for phase in found if phase["workers"] == workers for one in phase["each"]]
        for workers in (FEW, MANY)
    )
    return statistics.median(many) / statistics.median(few)
