"""Runs a plan: each leg's undisturbed run first, then disturbed ones until all its kills are done; judges each run."""

import json
import shutil
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cluster.run_folder import CHECKPOINTS, SUMMARY, read_json, read_metrics
from learner.checkpoint import load
from tests.chaos.campaign import DisturbedRun, Strike
from tests.chaos.ledger import Ledger, check_counts, check_ledger, check_weights
from tests.chaos.machines import Machines
from tests.chaos.plan import Leg
from tests.chaos.settings import GROUPS_PER_BATCH

MOST_RUNS = 20
"""A leg that needs more has a kill that never hits its phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One disturbed run, and what its books say."""

    leg: str
    num_iterations: int
    strikes: list[Strike]
    ledger: Ledger


def run_leg(leg: Leg, folder: Path, machines: Machines) -> list[Judged]:
    """Do all kills of a leg, in as many runs as it takes."""
    calm = DisturbedRun(leg, folder / "undisturbed", machines, calm=True)
    calm.go(deque())
    aims, judged = deque(leg.aims), list[Judged]()
    while aims:
        assert len(judged) < MOST_RUNS, f"{leg.name}: {aims[0]} is never done"
        run = DisturbedRun(leg, folder / f"run_{len(judged):02d}", machines)
        run.go(aims)
        ledger = judge(leg, run.run_dir, calm.run_dir)
        judged.append(
            Judged(
                leg=leg.name,
                num_iterations=leg.num_iterations,
                strikes=run.strikes,
                ledger=ledger,
            )
        )
        if ledger.is_exact:
            shutil.rmtree(run.run_dir / CHECKPOINTS)
    return judged


def judge(leg: Leg, run_dir: Path, calm_dir: Path) -> Ledger:
    """Compare a finished run with the undisturbed one: groups, counts, versions, weights."""
    ledger = check_ledger(
        read_metrics(run_dir),
        read_metrics(calm_dir),
        groups_per_batch=GROUPS_PER_BATCH,
        max_policy_lag=leg.max_policy_lag,
        num_iterations=leg.num_iterations,
    )
    last = Path(CHECKPOINTS) / f"step_{leg.num_iterations:06d}"
    weights = check_weights(load(run_dir / last), load(calm_dir / last))
    counts = check_counts(read_json(run_dir / SUMMARY), read_json(calm_dir / SUMMARY))
    return replace(ledger, wrong=[*ledger.wrong, *weights, *counts])


def write_results(path: Path, judged: list[Judged]) -> None:
    """Keep everything as JSON."""
    path.write_text(json.dumps([asdict(run) for run in judged], indent=1))


def read_results(path: Path) -> list[Judged]:
    """Read what `write_results` wrote."""
    return [
        Judged(
            leg=run["leg"],
            num_iterations=run["num_iterations"],
            strikes=[Strike(**strike) for strike in run["strikes"]],
            ledger=Ledger(**run["ledger"]),
        )
        for run in json.loads(path.read_text())
    ]
