"""Seconds that a run takes to recover from a SIGKILL of a worker, of a reward replica, of the learner; real Ray."""

import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.scaling_climb import ledger
from benchmarks.scaling_run import WatchedRun, ready_workers, watched_run
from benchmarks.scaling_setup import Work, local_ray
from benchmarks.scaling_trees import actor_processes
from cluster.run_folder import read_metrics

WORKERS, REPLICAS = 4, 2
WORK = Work(call_s=0.4, calls=16, lag=0, learn_s=0.4, workers=WORKERS)
"""An iteration takes two seconds or so."""
UNDISTURBED = 6
"""Rows before the first kill."""

Row = dict[str, Any]


def _lost(part: str) -> Callable[[Row], int]:
    return lambda row: row["parts"]["lost"][part]


PARTS: dict[str, tuple[str, Callable[[Row], int]]] = {
    "rollout worker": ("RolloutActor", _lost("rollout_workers")),
    "reward replica": ("RewardActor", _lost("reward_servers")),
    "learner": ("LearnerActor", lambda row: row["incarnation"]),
}
"""Part -> its actor class, and a row's number that counts its losses."""


def measure_recovery(kills: int) -> dict[str, Any]:
    """So many kills of each part, in turn, all in one run that checkpoints every iteration."""
    draw = random.Random(0)
    replicas = (
        f'rewards.components=[{{name="benchmarks.sleeping:SleepingReward", replicas={REPLICAS}}}]'
    )
    found: dict[str, list[dict[str, float]]] = {part: [] for part in PARTS}
    with (
        local_ray(WORKERS + REPLICAS) as address,
        watched_run(WORK, address, replicas, "run.checkpoint_every=1") as run,
    ):
        run.wait(at_full_strength, 0)
        first = len(run.rows)
        run.more(UNDISTURBED)
        usual_s = statistics.median(
            after - before for before, after in pairwise(run.seen_s[first:])
        )
        for number in range(kills):
            for part in PARTS:
                found[part].append(kill(run, part, usual_s, draw))
                print(f"  kill {number + 1} of {part}: {found[part][-1]}", flush=True)
        run.stop()
        history = read_metrics(run.folder)
    return {
        "usual_s": usual_s,
        "kills": found,
        "ledger": ledger(history, WORK.calls),
    }


def at_full_strength(row: Row) -> bool:
    """Whether nothing was missing when a row was written."""
    parts = row["parts"]
    crews = [parts["rollout_workers"], *parts["reward_servers"].values()]
    return all(crew["ready"] == crew["target"] for crew in crews)


def kill(run: WatchedRun, part: str, usual_s: float, draw: random.Random) -> dict[str, float]:
    """Kill one actor of a part somewhere within an iteration; wait until the run is whole again.

    Returns the seconds until the next row that counts the loss, and until the next row after which nothing is missing.
    """
    run.more(2)
    time.sleep(draw.uniform(0, usual_s))
    run.look()
    actor, counter = PARTS[part]
    before, first = counter(run.rows[-1]), len(run.rows)
    victim = draw.choice(actor_processes(actor))
    victim.kill()
    killed_s = time.monotonic()
    row = run.wait(lambda row: counter(row) > before, first)
    whole = run.wait(lambda row: counter(row) > before and at_full_strength(row), row)
    return {
        "next_row_s": run.seen_s[row] - killed_s,
        "whole_s": run.seen_s[whole] - killed_s,
        "workers_at_next_row": ready_workers(run.rows[row]),
    }
