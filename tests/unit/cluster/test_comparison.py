"""The comparison and demo scripts on invented runs: numbers, resuming, and notes that stay."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from benchmarks import comparison, comparison_table, demo_docs
from benchmarks.comparison_plot import COLOURS, ArmRun, learning_curves
from benchmarks.marked_section import write_marked
from cluster.config import RunConfig, load
from cluster.open_run import write_start
from cluster.run_folder import CONFIG, ENVIRONMENT, SUMMARY, read_run, write_json
from tests import fakes_run

LIFTS = {"outcome-flow_sde": 0.02, "gain-ddim_sde": 0.05, "gain-ddim_sde-5": 0.08}


def wanted(arm: str, seed: int, args: list[str]) -> RunConfig:
    words = comparison.command(arm, seed, comparison.parse(args))
    return load(words[4], words[5:])


def arguments(runs_dir: Path, docs: Path, *more: str) -> list[str]:
    where = ["--runs", str(runs_dir), "--docs", str(docs), "--iterations", "12"]
    return [*where, "--seeds", "0", "1", "--arms", *LIFTS, *more]


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for arm, lift in LIFTS.items():
        for seed in (0, 1):
            run_dir = folder / arm / str(seed)
            fakes_run.build_run(run_dir, num_iterations=12, lift=lift, seed=seed)
            write_start(run_dir, wanted(arm, seed, arguments(folder, folder)))
    return folder


def test_finished_runs_are_only_read_and_notes_stay(runs_dir: Path, tmp_path: Path) -> None:
    assert comparison.main(arguments(runs_dir, tmp_path)) == 0
    page = tmp_path / "comparison.md"
    page.write_text(page.read_text().replace("Not written yet.", "Honest words."))
    assert comparison.main(arguments(runs_dir, tmp_path)) == 0
    text = page.read_text()
    assert "Honest words." in text
    assert text.count("## How the arms differ") == 1
    assert (tmp_path / "images" / "comparison.png").stat().st_size > 20_000
    assert "python -m cluster train configs/quickstart.toml" in text


@pytest.mark.parametrize("count", [len(comparison.ARMS), len(COLOURS) + 2])
def test_every_arm_is_drawn(runs_dir: Path, count: int) -> None:
    run = read_run(runs_dir / "gain-ddim_sde" / "0")
    arms = [f"arm {number}" for number in range(count)]
    figure = learning_curves([ArmRun.read(arm, 0, run) for arm in arms])
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == arms
    for axes in figure.axes:
        assert axes.get_legend_handles_labels()[1] == arms
    assert len(COLOURS) >= len(comparison.ARMS), "two arms would share a colour"


def test_the_page_tells_what_each_arm_cost(runs_dir: Path) -> None:
    runs = [
        ArmRun.read("gain-ddim_sde", seed, read_run(runs_dir / "gain-ddim_sde" / str(seed)))
        for seed in (0, 1)
    ]
    row = comparison_table.cost_table(runs).splitlines()[2]
    assert row == "| gain-ddim_sde | 2 | 3,072 | 144 | 60 | 60 [60, 60] | 51.2 | 82 |"


def test_differences_are_paired_by_seed_and_line(runs_dir: Path) -> None:
    runs = [
        ArmRun.read(arm, seed, read_run(runs_dir / arm / str(seed)))
        for arm in LIFTS
        for seed in (0, 1)
    ]
    outcome, gain = runs[:2], runs[2:4]
    estimate, seeds = comparison_table.difference(outcome, gain, "shapes", ("after", "after"))
    expected = [
        np.mean([b["rewards"]["shapes"] for b in new.lines["after"]])
        - np.mean([a["rewards"]["shapes"] for a in old.lines["after"]])
        for old, new in zip(outcome, gain, strict=True)
    ]
    assert seeds == pytest.approx(expected)
    assert estimate.mean == pytest.approx(np.mean(expected))
    assert 0.02 < estimate.low < estimate.mean < estimate.high < 0.04
    assert runs[0].spent("images")[-1] == 12 * 256
    assert runs[0].spent("seconds")[-1] == pytest.approx(60)


def test_a_run_that_fails_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison.sys, "executable", "false")
    words = ["--runs", str(tmp_path / "runs"), "--docs", str(tmp_path), "--seeds", "0"]
    assert comparison.main([*words, "--arms", "gain-ddim_sde"]) == 1
    assert "FAILED with exit status 1" in capsys.readouterr().out
    assert not (tmp_path / "comparison.md").exists()


def test_an_unfinished_run_is_not_skipped(tmp_path: Path) -> None:
    assert not comparison.finished(tmp_path)
    write_json(tmp_path / SUMMARY, {"status": "failed"})
    assert not comparison.finished(tmp_path)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["--iterations", "20"], "run.num_iterations: was 12, now 20"),
        (["--every", "5"], "evaluation.every: was 10, now 5"),
        (["--set", "learner.lr=1e-4"], "learner.lr: was"),
        (["--set", "rollout.workers=2"], "rollout.workers: was"),
        (["--set", 'prompts.path="configs/prompts/shapes_eval.jsonl"'], "prompts.content: was"),
    ],
)
def test_a_run_with_other_settings_is_removed_and_made_again(
    more: list[str],
    key: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["--runs", str(tmp_path), "--docs", str(tmp_path), "--seeds", "0", "--iterations", "12"]
    words += ["--arms", "gain-ddim_sde"]
    run_dir = tmp_path / "gain-ddim_sde" / "0"
    fakes_run.build_run(run_dir, num_iterations=12)
    write_start(run_dir, wanted("gain-ddim_sde", 0, words))
    monkeypatch.setattr(comparison.sys, "executable", "false")
    assert comparison.main([*words, *more]) == 1
    assert f"removed, made with other settings\n  {key}" in capsys.readouterr().out
    assert not run_dir.exists()


def test_another_place_of_the_same_run_is_no_difference(tmp_path: Path) -> None:
    config = wanted("gain-ddim_sde", 0, ["--runs", str(tmp_path / "old")])
    (tmp_path / "new").mkdir()
    write_start(tmp_path / "new", config)
    moved = ["--runs", str(tmp_path / "new"), "--set", "run.checkpoint_every=3"]
    assert comparison.differences(tmp_path / "new", wanted("gain-ddim_sde", 0, moved)) == []
    assert comparison.differences(tmp_path / "never begun", config) == []


def test_a_run_of_an_older_schema_is_made_again(tmp_path: Path) -> None:
    config = wanted("gain-ddim_sde", 0, ["--runs", str(tmp_path)])
    write_start(tmp_path, config)
    text = (tmp_path / CONFIG).read_text()
    (tmp_path / ENVIRONMENT).unlink()
    assert any("model.content" in line for line in comparison.differences(tmp_path, config))
    (tmp_path / CONFIG).write_text(text.replace("[credit]", "[credit]\ngone = 1"))
    assert "can't be read any more" in comparison.differences(tmp_path, config)[0]


@pytest.mark.parametrize("arm", comparison.ARMS)
def test_every_command_is_a_config_that_loads(arm: str, tmp_path: Path) -> None:
    args = comparison.parse(["--runs", str(tmp_path), "--iterations", "7"])
    words = comparison.command(arm, 3, args)
    config = load(words[4], words[5:])
    assert (config.run.seed, config.run.num_iterations, config.run.name) == (3, 7, arm)
    assert config.credit.rule == arm.split("-")[0]
    assert config.sampling.kernel == arm.split("-")[1]
    assert config.sampling.num_substeps == (int(arm[-1]) if arm[-1].isdigit() else 1)
    assert config.run.dir == str(tmp_path / arm / "3")
    assert config.evaluation.every == 10
    assert all("=" in word and tomllib.loads(word) for word in words[5:])


def test_the_demo_page_shows_table_and_pictures(runs_dir: Path, tmp_path: Path) -> None:
    run_dir = runs_dir / "gain-ddim_sde" / "0"
    assert demo_docs.main([str(run_dir), "--docs", str(tmp_path)]) == 0
    text = (tmp_path / "demo.md").read_text()
    for picture in ("demo_curves.png", "demo_before_and_after.png", "demo_one_trajectory.png"):
        assert f"images/{picture}" in text
        assert (tmp_path / "images" / picture).exists()
    mean = read_run(run_dir).summary["evaluation"]["paired_difference"]["graded"]["mean"]
    assert f"| {mean:+.3f} [" in text
    assert "3,072 images" in text


def test_the_demo_page_needs_a_finished_run(tmp_path: Path) -> None:
    assert demo_docs.main([str(tmp_path), "--docs", str(tmp_path / "docs")]) == 1
    assert not (tmp_path / "docs").exists()


def test_a_page_that_lost_its_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("all by hand")
    with pytest.raises(ValueError, match="has lost its marks"):
        write_marked(page, "a script", "text", "{generated}")
    assert page.read_text() == "all by hand"
