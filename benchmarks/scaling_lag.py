"""What a policy lag of one is worth, when sampling a batch takes as long as learning it: real Ray, sleeping parts."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.scaling_climb import start_parts
from benchmarks.scaling_setup import IMAGES_PER_CALL, Work, local_ray, make_config
from cluster.controller import Controller
from cluster.costs import step_plan
from cluster.fleet import make_fleet
from cluster.iteration import IterationRecord
from rollout.prompts import PromptSource

WANTED = 1.8
"""Throughput with k = 1 over that with k = 0."""
WORKERS = 2
CALLS_PER_WORKER = 6
"""Of a batch: sampling one takes each worker so many calls one after another."""
LEFT_OUT_FIRST, LEFT_OUT_LAST = 2, 1
"""Iterations of a run that are no steady state: with a lag the first two batches are sampled at once, and nothing is
sampled beside the last step."""


def measure_lag(phase_s: float, iterations: int) -> dict[str, Any]:
    """Iterations of both lags, each lag in a run of its own in the same Ray."""
    works = {
        lag: Work(
            call_s=phase_s / CALLS_PER_WORKER,
            calls=WORKERS * CALLS_PER_WORKER,
            lag=lag,
            learn_s=phase_s,
            workers=WORKERS,
        )
        for lag in (0, 1)
    }
    figures: dict[str, Any] = {"phase_s": phase_s, "workers": WORKERS, "lags": {}}
    with local_ray(WORKERS):
        for lag, work in works.items():
            records = train(work, iterations)
            figures["lags"][str(lag)] = {
                "images_per_iteration": work.calls * IMAGES_PER_CALL,
                "seconds": [record.seconds for record in records],
            }
            print(f"  lag {lag} measured", flush=True)
    return figures


def train(work: Work, iterations: int) -> list[IterationRecord]:
    """The iterations of one run; its actors are ended. Needs a running Ray."""
    from cluster.actors_backend import RayBackend

    config = make_config(work)
    run = config.run.model_copy(update={"num_iterations": iterations})
    config = config.model_copy(update={"run": run})
    plan, rule = step_plan(config)
    records: list[IterationRecord] = []
    backend = RayBackend(config, rule.scored_states, "")
    try:
        fleet = make_fleet(config, backend)
        start_parts(config, fleet)
        fleet.events.until(lambda: len(fleet.pool.crew.ready) == work.workers)
        prompts = PromptSource(config.prompts.path, config.prompts.shuffle, config.run.seed)
        Controller(config, plan, fleet, prompts, records.append).run()
    finally:
        backend.close()
    return records


def steady(seconds: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """The iterations in between. ValueError when none is left."""
    kept = list(seconds[LEFT_OUT_FIRST : len(seconds) - LEFT_OUT_LAST])
    if not kept:
        raise ValueError(f"{len(seconds)} iterations leave none between the ends; run more")
    return kept


def median_of(seconds: Sequence[dict[str, float]], phase: str) -> float:
    """Median seconds of a phase of the steady iterations."""
    return statistics.median(one[phase] for one in steady(seconds))


def gain(figures: dict[str, Any]) -> float:
    """Throughput with a lag of one over that without."""
    none, one = (median_of(figures["lags"][lag]["seconds"], "total") for lag in ("0", "1"))
    return none / one
