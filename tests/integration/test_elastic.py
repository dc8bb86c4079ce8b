"""Another number of workers and reward servers while a run goes on, asked for from another process."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.cli import main
from cluster.weights import EVALUATION_VERSION
from tests.integration.cluster_fixtures import Driver, driver

pytestmark = pytest.mark.ray

REWARD = "benchmarks.sleeping:SleepingReward"
GROUPS, SAMPLES = 6, 4


def sleeping_settings(folder: Path, *more: str) -> list[str]:
    """Overrides for a run of many minutes in `folder` / "run", on a model that sleeps and computes little.

    A batch is six calls of 0.2 s: work for three workers. None is given to a second worker for being slow.
    """
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in "abcde"))
    return [
        'model.family="benchmarks.sleeping:SleepingFamily"',
        'model.path="sleep:call_s=0.05"',
        f'run.dir="{folder}/run"',
        f'prompts.path="{prompts}"',
        f'evaluation.path="{prompts}"',
        "evaluation.num_steps=2",
        "run.num_iterations=2000",
        "run.checkpoint_every=1000",
        "sampling.num_steps=4",
        "sampling.num_substeps=1",
        "rollout.groups_per_batch=6",
        "rollout.samples_per_group=4",
        "rollout.slices_per_call=1",
        "learner.micro_batch=32",
        "learner.threads_per_rank=1",
        'rewards.components=[{name="benchmarks.sleeping:SleepingReward"}]',
        'evaluation.graded="sleeping"',
        'evaluation.strict=""',
        "faults.straggler_factor=1e6",
        *more,
    ]


@dataclass(frozen=True)
class Scaled:
    """What is left of a run that went from 1 worker to 3 and back."""

    folder: Path
    rows: list[dict[str, Any]]
    """metrics.jsonl as it was written, not only the last line of each iteration."""
    events: list[dict[str, Any]]
    exit_code: int
    first_command: str
    """What the command line said when it was asked for three workers."""
    refused: tuple[int, str]
    """Exit code and words when it was asked for a fourth worker."""

    def of(self, event: str, **facts: Any) -> list[dict[str, Any]]:
        """The events of a kind with these facts, in order."""
        wanted = {"event": event, **facts}
        return [e for e in self.events if wanted.items() <= e.items()]


def run_until(run: Driver, part: str, wanted: int, more: int = 2) -> None:
    """Wait for `more` iterations that ended with so many of a part ready, and none else."""

    def enough() -> bool:
        parts = [row["parts"] for row in run.rows][-more:]
        counts = [
            p["rollout_workers"] if part == "workers" else p["reward_servers"][REWARD]
            for p in parts
        ]
        return counts == [{"target": wanted, "ready": wanted}] * more

    run.wait_for(enough)


def ask(*words: str, folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    """`flowcredit scale` as a process of its own."""
    command = [sys.executable, "-m", "cluster", "scale", str(folder), *words, "--address", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def scaled(ray_session, tmp_path_factory) -> Scaled:
    """1 -> 3 -> 1 workers, 1 -> 2 -> 1 reward servers, then SIGTERM."""
    tmp_path = tmp_path_factory.mktemp("elastic")
    address = ray.get_runtime_context().gcs_address
    settings = sleeping_settings(tmp_path, "rollout.workers={start=1, min=1, max=3}")
    with driver(tmp_path, address, dict(os.environ), "configs/quickstart.toml", settings) as run:
        run_until(run, "workers", 1)
        asked = ask("--rollout-workers", "3", folder=run.folder, address=address)
        assert asked.returncode == 0, asked.stdout + asked.stderr
        # From here on through the command line's own function, in this process: also another one than the run's.
        assert main(["scale", str(run.folder), "--reward", REWARD, "--replicas", "2"]) == 0
        run_until(run, "workers", 3)
        run_until(run, "servers", 2)
        refused = ask("--rollout-workers", "4", folder=run.folder, address=address)
        assert main(["scale", str(run.folder), "--rollout-workers", "1"]) == 0
        assert main(["scale", str(run.folder), "--reward", REWARD, "--replicas", "1"]) == 0
        run_until(run, "workers", 1)
        run_until(run, "servers", 1)
        exit_code = run.stop()
        return Scaled(
            folder=run.folder,
            rows=run.rows,
            events=run.events,
            exit_code=exit_code,
            first_command=asked.stdout,
            refused=(refused.returncode, refused.stderr),
        )


def test_the_answer_says_how_the_run_stood(scaled):
    assert "rollout workers" in scaled.first_command
    assert "servers of reward" in scaled.first_command


def test_a_newcomer_proves_the_published_weights_before_its_first_slice(scaled):
    """And after it: whoever samples with a version has proved that version last. An evaluation's weights have none."""
    published = {(e["version"], e["checksum"]) for e in scaled.of("published")}
    published |= {(EVALUATION_VERSION, checksum) for _, checksum in published}
    holds: dict[int, int | None] = {}
    for event in scaled.events:
        if event["event"] == "ready" and event["part"] == "worker":
            holds[event["worker"]] = None
        elif event["event"] == "proof":
            assert (event["version"], event["checksum"]) in published
            holds[event["worker"]] = event["version"]
        elif event["event"] == "sample":
            assert holds[event["worker"]] == event["version"]
    assert sorted(holds) == [0, 1, 2]


def test_newcomers_work(scaled):
    assert {e["worker"] for e in scaled.of("sampled")} == {0, 1, 2}
    assert {e["replica"] for e in scaled.of("score")} == {0, 1}
    first = {worker: scaled.of("sample", worker=worker)[0]["version"] for worker in (1, 2)}
    assert all(version > 0 for version in first.values()), "they came while it trained"


def test_who_leaves_finishes_what_it_was_given(scaled):
    """Those that left while the run went on; what the last one had at the stop is nobody's any more."""
    left = [e["worker"] for e in scaled.of("removed", part="worker")]
    assert len(left) == 2
    for worker in left:
        given, answered = scaled.of("sample", worker=worker), scaled.of("sampled", worker=worker)
        assert len(given) == len(answered) > 0
    assert len(scaled.of("removed", part="reward")) == 1
    lost = scaled.rows[-1]["parts"]
    assert lost["lost"] == {"rollout_workers": 0, "reward_servers": 0}
    assert lost["reissued_calls"] == 0


def test_the_ledger_is_exact(scaled):
    """Every group consumed once, in order; every slice of a consumed group sampled once."""
    rows = scaled.rows
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
    consumed = [group for row in rows for group in row["group_ids"]]
    assert consumed == list(range(GROUPS * len(rows)))
    assert [row["policy_version"] for row in rows] == list(range(len(rows)))
    assert {row["counts"]["images"] for row in rows} == {GROUPS * SAMPLES}
    assert {row["counts"]["dropped_groups"] for row in rows} == {0}
    slices = [tuple(pair) for event in scaled.of("sample") for pair in event["slices"]]
    assert len(set(slices)) == len(slices)
    assert set(consumed) <= {group for group, _ in slices}


def test_beyond_the_maximum_is_refused_with_the_bounds(scaled):
    code, words = scaled.refused
    assert code == 2
    said = " ".join(words.split())
    assert "--rollout-workers 4 is outside rollout.workers = {min = 1, max = 3}" in said


def test_sigterm_ends_it_with_a_checkpoint(scaled):
    assert scaled.exit_code == 128 + signal.SIGTERM
    newest = max(path.name for path in (scaled.folder / "checkpoints").iterdir())
    assert newest == f"step_{len(scaled.rows):06d}"


def test_a_run_that_is_over_cannot_be_scaled(scaled, capsys):
    assert main(["scale", str(scaled.folder), "--rollout-workers", "2"]) == 2
    assert "is going on in the Ray cluster" in " ".join(capsys.readouterr().err.split())
