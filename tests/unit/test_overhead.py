"""benchmarks/overhead.py: the bare loop does the system's work, and a side that dies is told at once."""

import os
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest

from benchmarks import overhead
from cluster.config import RunConfig, load
from rollout.trajectory import read_group, read_previews

SETTINGS = [
    'model.family="tests.fake_family:GaussianFamily"',
    "sampling.num_steps=4",
    "rollout.groups_per_batch=4",
    "rollout.samples_per_group=4",
    "rollout.samples_per_slice=2",
    "rollout.slices_per_call=4",
    "rollout.preview_groups=1",
    "rollout.preview_samples=3",
    'rewards.components=[{name="jpeg"}, {name="tests.fakes:BrightnessReward", weight=0.5}]',
    "learner.micro_batch=16",
    *overhead.ONE_THREAD,
    *overhead.ONE_OF_EACH,
]
RATES = {"bare": [50.0, 40.0, 60.0], "system": [45.0, 55.0, 48.0]}


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load("configs/quickstart.toml", [*SETTINGS, "run.num_iterations=2"])


def raises(config: RunConfig, iterations: int, folder: str) -> list[float]:
    raise LookupError(f"{folder} {config.run.name} {iterations}")


def dies(config: RunConfig, iterations: int, folder: str) -> list[float]:
    os._exit(3)


def told_seconds(config: RunConfig, iterations: int, folder: str) -> list[float]:
    return [1000.0, 2.0, 4.0, 2.0]


@pytest.mark.slow
def test_the_first_iteration_is_left_out(config: RunConfig) -> None:
    assert overhead.measure(told_seconds, config, 4) == 16 / 2.0


@pytest.mark.slow
def test_a_side_that_raises_or_dies_ends_the_measurement(config: RunConfig) -> None:
    with pytest.raises(LookupError, match="quickstart 2"):
        overhead.measure(raises, config, 2)
    with pytest.raises(BrokenProcessPool):
        overhead.measure(dies, config, 2)


@pytest.mark.slow
def test_the_bare_loop_scores_every_slice_with_every_reward(
    config: RunConfig, tmp_path: Path
) -> None:
    loop = overhead.BareLoop(config, str(tmp_path))
    for number in range(2):
        batch = loop.iteration()
        groups = [read_group(group) for group in batch]
        assert [group.group_id for group in groups] == [4 * number + place for place in range(4)]
        assert {group.policy_version for group in groups} == {number}
        for group in groups:
            images = group.states[:, -1].transpose(0, 2, 3, 1) / 4 + 0.5
            np.testing.assert_allclose(
                group.parts["brightness"][:, -1],
                images.clip(0, 1).mean(axis=(1, 2, 3)),
                atol=1 / 255,
            )
            total = group.parts["jpeg"] + 0.5 * group.parts["brightness"]
            np.testing.assert_allclose(group.rewards, total)
            scored = np.isfinite(group.rewards).all(axis=0)
            assert np.flatnonzero(scored).tolist() == list(group.header.plan.scored)
        kept = [
            sum(row is not None and any(row) for row in read_previews(group)) for group in batch
        ]
        assert kept == [3, 0, 0, 0], "PNG previews as the system keeps them"
    assert loop.learner.version == loop.worker.version == 2


def test_the_page_says_what_was_measured(config: RunConfig) -> None:
    text = overhead.document(RATES, config, ["python", "-m", "benchmarks.overhead", "a b"])
    assert "**0.960**" in text
    assert "| bare loop | 50.00 | 0.32 | 50.00, 40.00, 60.00 |" in text
    assert "| system | 48.00 | 0.33 | 45.00, 55.00, 48.00 |" in text
    assert "| learner | 1 | `learner.threads_per_rank` |" in text
    assert "benchmarks.overhead 'a b'" in text
    assert "kept of 1 x 3 trajectories" in text


def test_main_measures_in_turn_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {name: iter(rates) for name, rates in RATES.items()}
    monkeypatch.setattr(overhead, "SIDES", {name: name for name in RATES})
    monkeypatch.setattr(overhead, "measure", lambda side, config, iterations: next(given[side]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--docs", str(tmp_path), "--out", str(tmp_path / "figures.json")]
    assert overhead.main(["configs/quickstart.toml", *words, "run.seed=3"]) == 0
    assert "system / bare = 0.960" in capsys.readouterr().out
    assert (tmp_path / "overhead.md").exists()
    assert '"ratio": 0.96' in (tmp_path / "figures.json").read_text()


def test_one_iteration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overhead.parse(["--iterations", "1"])
    assert "--iterations must be at least 2" in capsys.readouterr().err
