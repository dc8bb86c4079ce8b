"""Which part is killed in which phase, and when inside it: seeded, pure."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.marks import PHASES

KINDS = ("worker", "replica", "rank", "node", "driver")
HANG = "hang"
"""Not a kill: a reward server that is stopped, and must be noticed by its deadline."""
FRACTIONS = (0.1, 0.7)
"""Kills fall between these fractions of the time for which a part lingers in a phase; later ones would miss it."""
MOST_SKIPPED = 2
SHORT_ITERATIONS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """One kill to be done."""

    kind: str
    phase: str
    fraction: float = 0.4
    """Of the phase's length."""
    skip: int = 0
    """Beginnings of the phase to let pass first."""
    pick: float = 0.0
    """In [0, 1): which of the parts of the kind, where several would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Runs of one config, and what is to be killed in them."""

    name: str
    aims: Sequence[Aim]
    num_iterations: int = 150
    max_policy_lag: int = 0
    num_ranks: int = 1
    replicas: int = 1


def make_aims(kills_per_phase: Mapping[str, int], seed: int) -> list[Aim]:
    """Return so many aims of each kind at each phase, in seeded order."""
    dice = random.Random(seed)
    aims = [
        Aim(
            kind=kind,
            phase=phase,
            fraction=dice.uniform(*FRACTIONS),
            skip=dice.randint(0, MOST_SKIPPED),
            pick=dice.random(),
        )
        for kind, count in kills_per_phase.items()
        for phase in PHASES
        for _ in range(count)
    ]
    dice.shuffle(aims)
    return aims


def long_plan(seed: int) -> list[Leg]:
    """At least 100 kills, at least 10 of each kind and of each phase."""
    each = {"worker": 2, "replica": 2, "rank": 1, "node": 2, "driver": 2}
    lagging = {"worker": 2, "replica": 2, "rank": 1, "node": 1, "driver": 1}
    legs = [
        Leg(name="synchronous", aims=make_aims(each, seed), replicas=2),
        Leg(name="lag of 1", aims=make_aims(lagging, seed + 1), max_policy_lag=1),
        Leg(
            name="two ZeRO-3 ranks",
            aims=make_aims({"rank": 1}, seed + 2),
            num_ranks=2,
            num_iterations=60,
        ),
    ]
    return legs


def short_plan() -> list[Leg]:
    """One of each kind in one run, the driver in the middle of a checkpoint, and a reward server that hangs."""
    aims = [
        Aim(kind="worker", phase="sample"),
        Aim(kind="replica", phase="score"),
        Aim(kind=HANG, phase="score"),
        Aim(kind="rank", phase="train"),
        Aim(kind="node", phase="publish"),
        Aim(kind="driver", phase="checkpoint", skip=1),
    ]
    return [Leg(name="short", aims=aims, num_iterations=SHORT_ITERATIONS)]
