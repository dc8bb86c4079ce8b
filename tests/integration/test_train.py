"""The whole system on real Ray: a few iterations on a tiny model, through the command line's own functions."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cluster.cli import main
from cluster.config import load
from cluster.costs import iteration_costs, step_plan
from cluster.run_folder import read_metrics
from cluster.train import resume, train
from learner.checkpoint import load as load_checkpoint
from rollout.trajectory import read_group, read_ipc
from tests.tiny_models import build_tiny_sd3

pytestmark = pytest.mark.ray

ITERATIONS = 4


def overrides(model: Path, folder: Path, *more: str) -> list[str]:
    return [
        f'model.path="{model}"',
        f'run.dir="{folder}"',
        f"run.num_iterations={ITERATIONS}",
        "run.checkpoint_every=2",
        "sampling.num_steps=4",
        "rollout.groups_per_batch=4",
        "rollout.samples_per_group=4",
        "rollout.samples_per_slice=2",
        "rollout.slices_per_call=4",
        "learner.micro_batch=16",
        "learner.updates_per_batch=2",
        'rewards.components=[{name="jpeg"}, {name="tests.fakes:BrightnessReward", weight=0.5}]',
        'evaluation.graded="jpeg"',
        'evaluation.strict=""',
        "evaluation.num_prompts=12",
        *more,
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_sd3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(ray_session, model, tmp_path_factory):
    """A finished run: its config, folder and summary."""
    folder = tmp_path_factory.mktemp("run") / "run"
    settings = overrides(model, folder, "run.record_trajectories=true")
    config = load("configs/quickstart.toml", settings)
    _, summary = train(config)
    return config, folder, summary


def test_the_run_counts_exactly_what_the_plan_says(finished):
    config, _, summary = finished
    plan, _ = step_plan(config)
    costs = iteration_costs(config, plan)
    expected = {
        "images": costs.images,
        "transitions": costs.transitions,
        "network_calls": costs.network_calls,
        "reward_calls": costs.reward_calls,
    }
    assert summary["counts"] == {name: ITERATIONS * count for name, count in expected.items()}
    assert summary["evaluation_counts"] == {
        "images": 2 * costs.evaluation_images,
        "network_calls": 2 * costs.evaluation_network_calls,
        "reward_calls": 2 * costs.evaluation_images * 2,
    }


def test_the_folder_holds_what_the_formats_page_promises(finished):
    _, folder, summary = finished
    for name in (
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "curves.png",
        "report.html",
        "evaluation/before.jsonl",
        "evaluation/after.png",
        "weights/pytorch_lora_weights.safetensors",
        "samples/trajectory_000004.png",
    ):
        assert (folder / name).is_file(), name
    assert json.loads((folder / "summary.json").read_text())["counts"] == summary["counts"]
    assert summary["status"] == "finished"
    difference = summary["evaluation"]["paired_difference"]["graded"]
    assert difference["low"] <= difference["mean"] <= difference["high"]


def test_every_iteration_is_on_policy_and_the_ratio_was_one(finished):
    config, folder, _ = finished
    rows = read_metrics(folder)
    assert [(row["iteration"], row["policy_version"], row["policy_lag"]) for row in rows] == [
        (n + 1, n, 0) for n in range(ITERATIONS)
    ]
    assert all(row["max_abs_log_ratio"] <= config.learner.ratio_tolerance for row in rows)
    assert all(np.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)


def test_recorded_groups_hold_the_weighted_total_and_the_shared_initial_reward(finished):
    _, folder, _ = finished
    groups = [
        read_group(batch) for batch in read_ipc(folder / "trajectories" / "batch_000002.arrow")
    ]
    assert [group.group_id for group in groups] == [4, 5, 6, 7]
    for group in groups:
        np.testing.assert_allclose(
            group.rewards, group.parts["jpeg"] + 0.5 * group.parts["brightness"]
        )
        assert np.ptp(group.rewards[:, 0]) == 0
        assert np.ptp(group.rewards[:, -1]) > 0
        assert (group.states[:, 0] == group.states[0, 0]).all()


@pytest.mark.long
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    ray_session, model, finished, tmp_path
):
    """With the shipped kind of model; test_equal.py compares much more of the same, with a smaller one."""
    _, whole, summary = finished
    folder = tmp_path / "run"
    train(
        load(
            "configs/quickstart.toml",
            overrides(model, folder, "run.num_iterations=2", "rollout.workers=1"),
        )
    )
    _, resumed = resume(folder, [f"run.num_iterations={ITERATIONS}"])
    expected = load_checkpoint(whole / "checkpoints" / "step_000004")
    found = load_checkpoint(folder / "checkpoints" / "step_000004")
    for kind in ("weights", "ema"):
        for name, tensor in getattr(expected, kind).items():
            assert (getattr(found, kind)[name] == tensor).all(), (kind, name)
    assert resumed["counts"] == summary["counts"]
    assert [row["reward"]["mean"] for row in read_metrics(folder)] == [
        row["reward"]["mean"] for row in read_metrics(whole)
    ]


def test_plain_diffusers_draws_what_sample_drew(finished, model, tmp_path):
    _, folder, _ = finished
    prompts = ["--prompt", "a red circle", "--prompt", "two blue squares"]
    assert main(["sample", str(folder), *prompts, "--out", str(tmp_path)]) == 0
    script = [sys.executable, "benchmarks/plain_diffusers.py", model, folder / "weights", tmp_path]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 images, largest difference 0.00" in done.stdout


def test_evaluate_sees_what_the_run_saw(finished, tmp_path):
    _, folder, summary = finished
    assert main(["evaluate", str(folder), "--out", str(tmp_path)]) == 0
    seen = json.loads((tmp_path / "summary.json").read_text())["evaluation"]
    assert seen == summary["evaluation"]["after"]
    assert (tmp_path / "grid.png").is_file()
    assert main(["evaluate", str(folder), "--base", "--out", str(tmp_path / "base")]) == 0
    base = json.loads((tmp_path / "base" / "summary.json").read_text())["evaluation"]
    assert base == summary["evaluation"]["before"]
