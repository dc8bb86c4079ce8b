"""The killer on processes without Ray: it meets every phase, kills what it says, and its ledger sees a loss."""

import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest

from cluster.run_folder import read_metrics
from tests.chaos.campaign import DisturbedRun, Stuck
from tests.chaos.ledger import Ledger, check_ledger
from tests.chaos.machines import family_of, words_of
from tests.chaos.marks import PHASES, read_marks
from tests.chaos.plan import KINDS, Aim, Leg
from tests.chaos.toy import GROUPS_PER_BATCH, PARTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
POOLS = {"rollout": "worker", "reward": "replica", "learner": "rank"}


class ToyMachines:
    """Contract: `tests.chaos.machines.Machines`. A node is all processes of a kind."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.started: list[int] = []

    def driver(self, words: list[str], log: Path) -> "subprocess.Popen[bytes]":
        run = log.parent
        iterations = next(word for word in words if word.startswith("run.num_iterations"))
        program = [sys.executable, "-m", "tests.chaos.toy", run / "run", run / "marks"]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*program, iterations.partition("=")[2], *self.words], stderr=file
            )
        self.started.append(self.process.pid)
        return self.process

    def parts(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {kind: [] for kind in PARTS}
        for child in family_of(self.process.pid):
            words = words_of(child)
            for kind in PARTS:
                if kind in words:
                    found[kind].append(child.pid)
        return found

    def nodes(self) -> dict[str, list[int]]:
        parts = self.parts()
        return {name: parts[kind] for name, kind in POOLS.items()}

    def replace_node(self, name: str) -> None:
        assert name in POOLS


def disturb(
    folder: Path, aims: list[Aim], iterations: int, *words: str
) -> tuple[DisturbedRun, Ledger]:
    leg = Leg(name="toy", aims=aims, num_iterations=iterations)
    left = deque(aims)
    run = DisturbedRun(leg, folder, ToyMachines(*words))
    run.go(left)
    assert not left
    rows = read_metrics(run.run_dir)
    books = check_ledger(
        rows,
        rows,
        groups_per_batch=GROUPS_PER_BATCH,
        max_policy_lag=0,
        num_iterations=iterations,
    )
    return run, books


def test_every_kind_and_every_phase_is_hit_and_the_books_are_right(tmp_path: Path) -> None:
    pairs = [*zip(KINDS, PHASES, strict=False), ("rank", PHASES[-1])]
    aims = [Aim(kind=kind, phase=phase, skip=1, pick=0.6) for kind, phase in pairs]
    run, books = disturb(tmp_path / "run", aims, 200)
    assert [(strike.kind, strike.phase) for strike in run.strikes if strike.hit] == pairs
    assert books.is_exact
    machines = run.machines
    assert isinstance(machines, ToyMachines)
    num_restarts = sum(strike.kind == "driver" for strike in run.strikes)
    assert len(set(machines.started)) == 1 + num_restarts
    assert all(strike.recovery_s > 0 for strike in run.strikes)


def test_a_run_that_skips_an_iteration_when_it_goes_back_is_caught(tmp_path: Path) -> None:
    aims = [Aim(kind="rank", phase="train"), Aim(kind="driver", phase="checkpoint")]
    _, books = disturb(tmp_path / "run", aims, 60, "forgets")
    assert books.lost
    assert not books.is_exact


def test_a_driver_that_fails_by_itself_is_not_taken_for_killed(tmp_path: Path) -> None:
    leg = Leg(name="toy", aims=[], num_iterations=1)
    run = DisturbedRun(leg, tmp_path / "run", ToyMachines())
    run.words = ["run.num_iterations=none"]
    with pytest.raises(Stuck, match=r"exit code is 1(.|\n)*ValueError"):
        run.go(deque([Aim(kind="worker", phase="sample")]))
    assert read_marks(run.marks) == []
