"""How busy one controller is with up to 1,000 workers: in-process fakes, virtual time, real controller.

The workers, reward servers and the learner are tests/fake_backend.py: real Arrow data, no Ray, no waiting. A slice
takes 20 virtual seconds; what the controller computes takes real ones.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.scaling_climb import Rung, climb, ledger
from benchmarks.scaling_setup import Work, make_config
from cluster.costs import step_plan

SECONDS = {"sample": 20.0, "score": 0.05, "load": 0.05, "learn": 1.0, "weights": 0.1, "start": 1.0}
"""Virtual seconds of each kind of call, give or take a twentieth."""
CALLS_PER_WORKER = 2
"""Of a batch, at the largest number of workers."""


def seconds_of(seed: int) -> Callable[[str], float]:
    """What FakeBackend.seconds shall be."""
    draw = random.Random(seed)
    return lambda kind: SECONDS[kind] * draw.uniform(0.95, 1.05)


def measure_controller(counts: Sequence[int], settle_s: float, window_s: float) -> dict[str, Any]:
    """Busy fractions against fakes; settle_s and window_s are virtual."""
    from tests.fake_backend import FakeBackend

    work = Work(call_s=SECONDS["sample"], calls=CALLS_PER_WORKER * max(counts), workers=counts[0])
    config = make_config(work)
    plan, _ = step_plan(config)
    backend = FakeBackend(plan)
    backend.seconds = seconds_of(seed=0)
    log = climb(config, backend, counts, settle_s, window_s)
    return {
        "call_s": work.call_s,
        "calls_per_batch": work.calls,
        "window_s": window_s,
        "rungs": [busy(rung) for rung in log.rungs],
        "ledger": ledger(log.rows, work.calls),
    }


def busy(rung: Rung) -> dict[str, float]:
    """What a rung says of the controller."""
    return {
        "workers": rung.workers,
        "busy_frac": rung.per_s("busy_s"),
        "process_frac": rung.per_s("cpu_s"),
        "answers_per_s": rung.per_s("answers"),
    }
