"""Climbs on real Ray: images/s against rollout workers, and seconds from a publish to the last worker's checksum."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.scaling_climb import Log, Rung, climb, ledger, publish_seconds, rates
from benchmarks.scaling_setup import Work, local_ray, make_config
from benchmarks.scaling_trees import actor_processes, private_mb
from cluster.costs import step_plan

WANTED = 0.95
"""Of the largest number of workers times one worker's rate."""
CALLS_PER_WORKER = 8
"""Of a batch, at the largest number of workers: each batch costs every worker one exchange of weights."""
CALL_S = 1.0
PUBLISH_CALL_S = 0.05
"""Short, so that versions come often."""


def measure_workers(counts: Sequence[int], settle_s: float, window_s: float) -> dict[str, Any]:
    """Images/s at each number of workers, all in one run with a lag of one; what an actor costs in memory."""
    work = Work(call_s=CALL_S, calls=CALLS_PER_WORKER * max(counts), workers=counts[0])
    log, memory = climb_on_ray(work, counts, settle_s, window_s)
    return {
        "call_s": work.call_s,
        "calls_per_batch": work.calls,
        "window_s": window_s,
        "rungs": [throughput(log, rung) for rung in log.rungs],
        "private_mb": memory,
        "lost": log.num_lost,
        "ledger": ledger(log.rows, work.calls),
    }


def measure_publish(
    counts: Sequence[int], settle_s: float, window_s: float, numel: int
) -> dict[str, Any]:
    """Seconds of each publish at each number of workers, all in one run without lag."""
    work = Work(call_s=PUBLISH_CALL_S, calls=max(counts), lag=0, numel=numel, workers=counts[0])
    log, _ = climb_on_ray(work, counts, settle_s, window_s)
    return {
        "mb": 4 * numel / 1e6,
        "window_s": window_s,
        "rungs": [
            {"workers": rung.workers, "seconds": publish_seconds(log, rung)} for rung in log.rungs
        ],
        "lost": log.num_lost,
        "ledger": ledger(log.rows, work.calls),
    }


def climb_on_ray(
    work: Work, counts: Sequence[int], settle_s: float, window_s: float
) -> tuple[Log, float | None]:
    """The log of a climb, and the median MB of memory that a worker's process shares with none."""
    config = make_config(work)
    with local_ray(max(counts)):
        from cluster.actors_backend import RayBackend

        _, rule = step_plan(config)
        backend = RayBackend(config, rule.scored_states, "")
        try:
            log = climb(config, backend, counts, settle_s, window_s)
            return log, private_mb(actor_processes("RolloutActor"))
        finally:
            backend.close()


def throughput(log: Log, rung: Rung) -> dict[str, Any]:
    """What a rung says of the workers, and of the controller meanwhile."""
    each = rates(log, rung)
    return {
        "workers": rung.workers,
        "images_per_s": statistics.median(each),
        "each": each,
        "busy_frac": rung.per_s("busy_s"),
        "process_frac": rung.per_s("cpu_s"),
        "answers_per_s": rung.per_s("answers"),
    }


def efficiency(rungs: Sequence[dict[str, Any]]) -> list[float]:
    """Each rung's rate over its workers times the first rung's rate a worker."""
    one = rungs[0]["images_per_s"] / rungs[0]["workers"]
    return [rung["images_per_s"] / (rung["workers"] * one) for rung in rungs]
