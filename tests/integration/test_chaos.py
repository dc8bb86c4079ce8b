"""The short form of the chaos suite: real Ray on several raylets, one kill of each kind in one run, books checked.

It runs in a process of its own (`python -m tests.chaos --short`), since its cluster is not this session's. The long
form is `make chaos`; docs/chaos.md has its result.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.run_folder import METRICS, SUMMARY, read_json, read_jsonl, read_metrics
from tests.chaos.campaign import Strike
from tests.chaos.plan import HANG, KINDS
from tests.chaos.suite import Judged, read_results

LIMIT_S = 840
"""So that a hang ends; three minutes are usual, more when other tests share the two cores."""
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def folder(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the short form left its runs; it ends with 1 when books are wrong."""
    place = tmp_path_factory.mktemp("chaos")
    program = [sys.executable, "-m", "tests.chaos", "--short", "--folder", str(place)]
    done = subprocess.run(
        program, cwd=repo_root, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return place


@pytest.fixture(scope="module")
def judged(folder: Path) -> list[Judged]:
    return read_results(folder / "judged.json")


def hits(judged: list[Judged], kind: str) -> list[Strike]:
    return [
        strike for run in judged for strike in run.strikes if strike.kind == kind and strike.hit
    ]


def test_one_kill_of_each_kind_loses_nothing_and_ends_with_the_same_bits(
    judged: list[Judged],
) -> None:
    assert all(run.ledger.is_exact for run in judged), judged
    for kind in KINDS:
        assert len(hits(judged, kind)) == 1, kind


def test_a_driver_killed_in_the_middle_of_a_checkpoint_is_resumed_and_ends_the_same(
    folder: Path, judged: list[Judged]
) -> None:
    (strike,) = hits(judged, "driver")
    assert strike.phase == "checkpoint"
    assert judged[-1].ledger.is_exact
    run = sorted((folder / "short").glob("run_*"))[-1] / "run"
    assert len(read_jsonl(run / METRICS)) > len(read_metrics(run)), "no iteration was done again"
    assert read_metrics(run)[-1]["incarnation"] > 0


def test_a_reward_server_that_hangs_is_replaced_by_its_deadline(
    folder: Path, judged: list[Judged]
) -> None:
    (strike,) = hits(judged, HANG)
    run = sorted((folder / "short").glob("run_*"))[0] / "run"
    after = [row for row in read_jsonl(run / METRICS) if row["iteration"] > strike.iteration]
    assert after[0]["parts"]["lost"]["reward_servers"] >= 2, "one was killed, one hung"
    assert read_json(run / SUMMARY)["status"] == "finished"
