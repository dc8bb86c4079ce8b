"""The same seed gives the same run: on any number of workers and ranks, with or without a stop in between.

The learner's half, the gradient on one rank and on two under every ZeRO stage: tests/unit/learner/test_ranks.py.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.overhead import BareLoop
from cluster.config import RunConfig, load
from cluster.run_folder import SUMMARY, read_metrics
from cluster.train import resume, train
from learner.checkpoint import Checkpoint
from learner.checkpoint import load as load_checkpoint
from rollout.flow.noise import initial_noise
from rollout.trajectory import RecordBatch, read_group, read_ipc
from tests.integration.test_system import settings
from tests.unit.learner.helpers import relative_difference, same_bits

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ITERATIONS, STOP, GROUPS = 4, 2, 4
NOT_THE_SAME = {
    "elapsed_s",
    "seconds",
    "worker_seconds",
    "learner_seconds",
    "push_s",
    "images_per_s",
    "parts",
    "incarnation",
}
"""What a metrics row says of time, place and the run's fate; all else follows from the seed."""


def config_of(folder: Path, *more: str) -> RunConfig:
    """One worker, one rank, recorded trajectories; BrightnessReward does not depend on its batch."""
    length = [f"run.num_iterations={ITERATIONS}", f"run.checkpoint_every={STOP}"]
    words = settings(folder, *length, "run.record_trajectories=true", *more)
    return load("configs/quickstart.toml", words)


def begun(folder: Path, *more: str) -> Path:
    """A finished run's folder."""
    train(config_of(folder, *more))
    return folder / "run"


def killed_and_resumed(whole: Path, folder: Path, *more: str) -> Path:
    """A copy of the run as it was when its driver died after checkpoint STOP, resumed to the end; its folder.

    Its metrics go on beyond the checkpoint, as they do when a driver dies some iterations later.
    """
    gone = [f"step_{ITERATIONS:06d}", SUMMARY, "trajectories", "weights", "after*", "report.html"]
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns(*gone))
    resume(folder, list(more))
    return folder


def checkpoint(folder: Path, step: int = ITERATIONS) -> Checkpoint:
    return load_checkpoint(folder / "checkpoints" / f"step_{step:06d}")


def recorded(folder: Path, iteration: int) -> list[RecordBatch]:
    """A batch's groups, but for the column that counts resumptions."""
    path = folder / "trajectories" / f"batch_{iteration:06d}.arrow"
    return [batch.drop_columns(["incarnation"]) for batch in read_ipc(path)]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says that follows from the seed."""
    rows = read_metrics(folder)
    return [{key: row[key] for key in row.keys() - NOT_THE_SAME} for row in rows]


def assert_same_run(found: Path, expected: Path) -> None:
    """Weights, average, optimizer, versions, groups, metrics: to the bit."""
    ours, theirs = checkpoint(found), checkpoint(expected)
    assert same_bits(ours.weights, theirs.weights)
    assert ours.ema is not None
    assert theirs.ema is not None
    assert same_bits(ours.ema, theirs.ema)
    assert ours.optimizer.step == theirs.optimizer.step == 2 * ITERATIONS
    assert same_bits(ours.optimizer.exp_avg, theirs.optimizer.exp_avg)
    assert same_bits(ours.optimizer.exp_avg_sq, theirs.optimizer.exp_avg_sq)
    assert ours.policy_version == theirs.policy_version == ITERATIONS
    for field in ("consumed", "attempts", "counts"):
        assert ours.state[field] == theirs.state[field], field
    assert numbers(found) == numbers(expected)
    for iteration in range(STOP + 1, ITERATIONS + 1):
        for ours_too, theirs_too in zip(
            recorded(found, iteration), recorded(expected, iteration), strict=True
        ):
            assert ours_too.equals(theirs_too, check_metadata=True)


@pytest.fixture(scope="module")
def whole(ray_session, tmp_path_factory) -> Path:
    """N iterations without a stop, no lag, one worker."""
    return begun(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def on_four_workers(whole, tmp_path_factory) -> Path:
    return killed_and_resumed(whole, tmp_path_factory.mktemp("four") / "run", "rollout.workers=4")


@pytest.fixture(scope="module")
def on_two_ranks(whole, tmp_path_factory) -> Path:
    ranks = ["rollout.workers=2", "learner.num_ranks=2", "learner.zero_stage=2"]
    return killed_and_resumed(whole, tmp_path_factory.mktemp("ranks") / "run", *ranks)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> BareLoop:
    """The plain classes in this process, after as many iterations."""
    folder = tmp_path_factory.mktemp("bare")
    loop = BareLoop(config_of(folder), str(folder))
    for _ in range(ITERATIONS):
        loop.iteration()
    return loop


def test_without_lag_the_system_is_the_bare_loop_to_the_bit(whole, bare):
    found = checkpoint(whole)
    for kind, tensors in (("raw", found.weights), ("ema", found.ema)):
        version, expected, _ = bare.learner.weights(kind)
        assert version == ITERATIONS
        assert tensors is not None
        assert same_bits(tensors, expected), kind
    start = checkpoint(whole, STOP).weights
    assert relative_difference(found.weights, start) > 1e-3, "nothing was trained"


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(whole, on_four_workers):
    """Although it went on with four workers instead of one."""
    assert_same_run(on_four_workers, whole)
    incarnations = [row["incarnation"] for row in read_metrics(on_four_workers)]
    assert incarnations == [0] * STOP + [1] * (ITERATIONS - STOP)


def test_with_a_lag_a_resumed_run_is_the_uninterrupted_one_to_the_bit(ray_session, tmp_path):
    (tmp_path / "whole").mkdir()
    whole = begun(tmp_path / "whole", "run.max_policy_lag=1")
    found = killed_and_resumed(whole, tmp_path / "resumed", "rollout.workers=2")
    assert_same_run(found, whole)
    assert [row["policy_version"] for row in read_metrics(found)] == [0, 0, 1, 2]


def test_every_group_is_consumed_in_the_prompts_order(whole, on_four_workers, on_two_ranks):
    for folder in (whole, on_four_workers, on_two_ranks):
        ids = [row["group_ids"] for row in read_metrics(folder)]
        assert ids == [list(range(GROUPS * n, GROUPS * (n + 1))) for n in range(ITERATIONS)]


def test_one_two_and_four_workers_sample_the_same_groups_from_the_same_noise(
    whole, on_four_workers, on_two_ranks
):
    """The first batch after the checkpoint: on four workers and one rank, and on two of each."""
    one = recorded(whole, STOP + 1)
    for folder in (on_four_workers, on_two_ranks):
        for ours, theirs in zip(recorded(folder, STOP + 1), one, strict=True):
            assert ours.equals(theirs, check_metadata=True)
    path = on_four_workers / "trajectories" / f"batch_{STOP + 1:06d}.arrow"
    for group in map(read_group, read_ipc(path)):
        header = group.header
        redrawn = initial_noise(header.latent_shape, header.run_seed, group.group_id, 0, True)
        assert (group.states[:, 0] == redrawn.numpy()).all()


def test_the_gradient_does_not_depend_on_the_number_of_workers(whole, on_four_workers, bare):
    def gradient(folder: Path) -> Any:
        path = folder / "trajectories" / f"batch_{ITERATIONS:06d}.arrow"
        return bare.learner.gradient(read_ipc(path))

    assert relative_difference(gradient(on_four_workers), gradient(whole)) <= 1e-5


def test_a_checkpoint_goes_on_under_other_ranks_and_workers(whole, on_two_ranks):
    """Two ZeRO-2 ranks and two workers instead of one of each: sums in another order, and nothing else."""
    found, expected = checkpoint(on_two_ranks), checkpoint(whole)
    assert relative_difference(found.weights, expected.weights) <= 1e-5
    assert found.ema is not None
    assert expected.ema is not None
    assert relative_difference(found.ema, expected.ema) <= 1e-5
    assert found.optimizer.step == expected.optimizer.step
    assert found.state["counts"] == expected.state["counts"]
    ours, theirs = read_metrics(on_two_ranks)[STOP], read_metrics(whole)[STOP]
    np.testing.assert_allclose(ours["grad_norm"], theirs["grad_norm"], rtol=1e-5)
