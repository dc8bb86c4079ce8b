"""What the scaling benchmark runs: a sleeping model, and a local Ray with more slots than the machine has cores."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.config import RunConfig, load

IMAGES_PER_CALL = 2
"""A call samples one slice, the whole of a group of two: the fewest images, since only their number is of interest."""
NETWORK_CALLS = 2
"""Of a slice's call: two steps, the clean estimates free, so that `Work.call_s` is slept in two halves."""
MICRO_BATCHES = 4
"""Of a learner's step that sleeps; one of a step that doesn't."""
QUIET = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Else Ray starts an idle process for every slot at once.
    "RAY_prestart_worker_first_driver": "0",
}
"""Inherited by all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The simulated work of a run."""

    call_s: float
    """Seconds that a worker sleeps for a slice."""
    calls: int
    """Slices of a batch, one a call."""
    lag: int = 1
    """run.max_policy_lag."""
    learn_s: float = 0.0
    """Seconds that the learner sleeps for a batch."""
    numel: int = 0
    """Weights, 4 bytes each, beside the few that compute."""
    workers: int = 1
    """At the start."""


def settings(work: Work) -> list[str]:
    """Overrides of configs/quickstart.toml that leave nothing but Ray, handshakes and bookkeeping to compute."""
    naps = MICRO_BATCHES if work.learn_s else 1
    path = (
        f"sleep:call_s={work.call_s / NETWORK_CALLS},learn_call_s={work.learn_s / naps},"
        f"numel={work.numel}"
    )
    transitions = work.calls * IMAGES_PER_CALL  # the second of the two steps is not trained
    if transitions % naps:
        raise ValueError(f"calls = {work.calls} must be a multiple of {naps // IMAGES_PER_CALL}")
    return [
        "run.name=scaling",
        "run.num_iterations=100000",
        f"run.max_policy_lag={work.lag}",
        'model.family="benchmarks.sleeping:SleepingFamily"',
        f'model.path="{path}"',
        f"sampling.num_steps={NETWORK_CALLS}",
        "sampling.kernel=flow_sde",
        "sampling.num_substeps=1",
        f"rollout.workers={{start={work.workers}, min=1}}",
        f"rollout.groups_per_batch={work.calls}",
        f"rollout.samples_per_group={IMAGES_PER_CALL}",
        "rollout.slices_per_call=1",
        "rollout.preview_groups=0",
        'rewards.components=[{name="benchmarks.sleeping:SleepingReward"}]',
        'credit.rule="outcome"',
        "objective.max_ratio=2.0",
        'learner.adapter="full"',
        "learner.threads_per_rank=1",
        "learner.updates_per_batch=1",
        f"learner.micro_batch={transitions // naps}",
        "learner.ema_decay=0.0",
        "evaluation.weights=raw",
        "evaluation.num_prompts=2",
        "evaluation.num_steps=2",
        'evaluation.graded="sleeping"',
        'evaluation.strict=""',
    ]


def make_config(work: Work) -> RunConfig:
    """The run's config; ValueError for impossible work."""
    return load("configs/quickstart.toml", settings(work))


@contextmanager
def local_ray(num_workers: int) -> Iterator[str]:
    """A local Ray with slots for so many workers and all the rest; yields its address for other processes."""
    import ray

    os.environ.update(QUIET)
    ray.init(
        address="local",
        num_cpus=num_workers + 4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=2**30,
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
