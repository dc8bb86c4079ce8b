"""Charts: what they plot, read back from the axes, and that none fails on a young run."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from cluster import curves
from cluster.run_folder import Run, read_run
from tests import fakes_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(fakes_run.build_run(tmp_path_factory.mktemp("runs") / "run"))


def young(run: Run, num_iterations: int) -> Run:
    """The run before its summary was written."""
    return replace(run, metrics=run.metrics[:num_iterations], summary={}, held_out={})


def test_smoothing_keeps_lines_and_lengths() -> None:
    line = [float(number) for number in range(20)]
    np.testing.assert_allclose(curves.smoothed(line, 5)[2:-2], line[2:-2])
    assert len(curves.smoothed([1.0])) == 1
    np.testing.assert_allclose(curves.smoothed([2.0] * 7), [2.0] * 7)


def test_gains_are_averaged_over_the_first_and_the_last_quarter(run: Run) -> None:
    axes = Figure().subplots()
    curves.draw_gain(axes, run)
    first, last = axes.containers
    gains = np.array([line["gain_per_step"] for line in run.metrics])
    np.testing.assert_allclose([bar.get_height() for bar in first], gains[:10].mean(axis=0))
    np.testing.assert_allclose([bar.get_height() for bar in last], gains[-10:].mean(axis=0))


def test_held_out_points_run_from_before_over_the_periodic_ones_to_after(run: Run) -> None:
    points, ends = curves.held_out_points(run, "graded")
    section = run.summary["evaluation"]
    assert [at for at, _ in points] == [0, 10, 20, 30, 40]
    assert points[0][1] == section["before"]["graded"]["mean"]
    assert points[0][1] < points[1][1] == run.held_out[10]["graded"] < points[4][1]
    assert ends[40] == section["after"]["graded"]
    assert curves.held_out_points(replace(run, summary={}), "strict")[1] == {}
    assert curves.held_out_points(young(run, 0), "strict") == ([], {})


def test_phases_add_up_to_the_total(run: Run) -> None:
    seconds = curves.phase_seconds(run.metrics)
    assert "total" not in seconds
    assert seconds["other"][0] == pytest.approx(5.0 - 4.9)
    assert sum(values[3] for values in seconds.values()) == pytest.approx(5.0)
    assert curves.phase_seconds([{"seconds": {"learn": 1.0}}]) == {"learn": [1.0]}


@pytest.mark.parametrize("num_iterations", [0, 1, 2])
@pytest.mark.parametrize("chart", curves.CHARTS, ids=lambda chart: chart.name)
def test_every_chart_draws_a_young_run(run: Run, chart: curves.Chart, num_iterations: int) -> None:
    png = curves.chart_png(young(run, num_iterations), chart, curves.DARK)
    assert png.startswith(b"\x89PNG")


def test_an_outcome_run_has_no_gains_and_says_so(run: Run) -> None:
    axes = Figure().subplots()
    metrics = [fakes_run.iteration(number, gain=False) for number in (1, 2, 3)]
    curves.draw_gain(axes, replace(run, metrics=metrics))
    curves.draw_gain(axes, replace(run, metrics=[{**metrics[0], "gain_per_step": None}]))
    assert not axes.containers


def test_curves_png_holds_all_charts(run: Run) -> None:
    path = curves.curves_png(run.dir)
    assert path == run.dir / "curves.png"
    with Image.open(path) as picture:
        assert picture.size == (1950, 728)
