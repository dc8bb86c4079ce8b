"""Charts of a run, drawn from metrics.jsonl and summary.json: one by one, or all in curves.png."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.run_folder import CURVES, Run, read_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of paper and ink; the series' colours are readable on both papers."""

    paper: str
    ink: str
    faint: str

    @property
    def settings(self) -> dict[Any, Any]:
        """The same, as matplotlib's settings."""
        ink = dict.fromkeys(
            ("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), self.ink
        )
        return ink | {
            "figure.facecolor": self.paper,
            "axes.facecolor": self.paper,
            "axes.edgecolor": self.faint,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "grid.color": self.faint,
            "grid.linewidth": 0.6,
            "font.size": 9,
            "legend.frameon": False,
            "legend.fontsize": 8,
        }


LIGHT = Theme(paper="#ffffff", ink="#333333", faint="#d8d8d8")
DARK = Theme(paper="#1c1e22", ink="#d4d4d4", faint="#45484e")
BLUE, ORANGE, GREY = "#3f8fd2", "#e38b29", "#8c8c8c"
PHASE_COLOURS = ("#3f8fd2", "#e38b29", "#4aa96c", "#b56bc4", "#d1615d", "#9c8456", "#5bb5b5", GREY)


def smoothed(values: Sequence[float], window: int | None = None) -> np.ndarray:
    """Centred moving average; near the ends the window is cut off. By default a tenth of them."""
    numbers = np.asarray(values, dtype=np.float64)
    window = min(window or max(3, len(numbers) // 10), len(numbers))
    ones = np.ones(window)
    return np.convolve(numbers, ones, "same") / np.convolve(np.ones_like(numbers), ones, "same")


def draw_reward(axes: Axes, run: Run) -> None:
    """Mean training reward of each batch, with its moving average."""
    iterations = [line["iteration"] for line in run.metrics]
    means = [line["reward"]["mean"] for line in run.metrics]
    axes.plot(iterations, means, ".", color=BLUE, alpha=0.45, markersize=4)
    axes.plot(iterations, smoothed(means), color=BLUE)


def draw_held_out(axes: Axes, run: Run) -> None:
    """Held-out scores along the iterations; the two ends with their (unpaired) intervals."""
    for score, colour in (("graded", BLUE), ("strict", ORANGE)):
        points, ends = held_out_points(run, score)
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, label=score)
        for at, numbers in ends.items():
            below, above = numbers["mean"] - numbers["low"], numbers["high"] - numbers["mean"]
            axes.errorbar(at, numbers["mean"], [[below], [above]], color=colour, capsize=3)
    if axes.has_data():
        axes.margins(y=0.25)
        axes.legend(ncols=2, loc="upper left")


def held_out_points(
    run: Run, score: str
) -> tuple[list[tuple[int, float]], dict[int, dict[str, Any]]]:
    """(iteration, mean) of every evaluation of the run; and the estimates of the first and last."""
    section = run.summary.get("evaluation", {})
    last = run.metrics[-1]["iteration"] if run.metrics else 0
    ends = {
        at: section[part][score]
        for at, part in ((0, "before"), (last, "after"))
        if score in section.get(part, {})
    }
    means = {at: scores[score] for at, scores in run.held_out.items() if score in scores}
    means |= {at: numbers["mean"] for at, numbers in ends.items()}
    return sorted(means.items()), ends


def draw_gain(axes: Axes, run: Run) -> None:
    """Mean gain of every step over the first and the last quarter of the run."""
    recorded = [line["gain_per_step"] for line in run.metrics if line.get("gain_per_step")]
    if not recorded:
        return
    gains = np.array(recorded, dtype=np.float64)  # a step without a gain is null, here nan
    quarter = max(1, len(gains) // 4)
    steps = np.arange(1, gains.shape[1] + 1)
    for shift, rows, colour, label in (
        (-0.2, gains[:quarter], GREY, f"first {quarter} iterations"),
        (0.2, gains[-quarter:], BLUE, f"last {quarter}"),
    ):
        known = ~np.isnan(rows).all(axis=0)
        if known.any():
            means = np.nanmean(rows[:, known], axis=0)
            axes.bar(steps[known] + shift, means, width=0.38, color=colour, label=label)
    if axes.has_data():
        axes.set_xticks(steps)
        axes.legend()


def draw_phases(axes: Axes, run: Run) -> None:
    """Seconds of each phase of an iteration, stacked; what no phase claims is `other`."""
    seconds = phase_seconds(run.metrics)
    edges = [line["iteration"] + side for line in run.metrics for side in (-0.5, 0.5)]
    axes.stackplot(
        edges,
        *(np.repeat(values, 2) for values in seconds.values()),
        labels=[name.replace("_", " ") for name in seconds],
        colors=PHASE_COLOURS,
        alpha=0.9,
    )
    axes.set_ylim(bottom=0, top=1.45 * max(np.sum(list(seconds.values()), axis=0)))
    axes.legend(ncols=3, loc="upper left", columnspacing=1, handlelength=1)


def phase_seconds(metrics: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds by phase and iteration, `total` replaced by the part of it that no phase claims."""
    names = list(dict.fromkeys(name for line in metrics for name in line["seconds"]))
    phases = {
        name: [float(line["seconds"].get(name, 0.0)) for line in metrics]
        for name in names
        if name != "total"
    }
    if "total" in names:
        claimed = [sum(values) for values in zip(*phases.values(), strict=True)]
        totals = [float(line["seconds"].get("total", 0.0)) for line in metrics]
        phases["other"] = [
            max(0.0, all_ - part) for all_, part in zip(totals, claimed, strict=True)
        ]
    return phases


def line_of(key: str) -> Callable[[Axes, Run], None]:
    """A chart of one plain number of each iteration."""

    def draw(axes: Axes, run: Run) -> None:
        points = [
            (line["iteration"], line[key]) for line in run.metrics if line.get(key) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "." if len(points) == 1 else "-", color=BLUE)
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))

    return draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart: what it shows, how it is drawn, what lies along its axis."""

    name: str
    title: str
    draw: Callable[[Axes, Run], None]
    across: str = "iteration"


CHARTS = (
    Chart(name="reward", title="training reward (batch mean)", draw=draw_reward),
    Chart(name="held_out", title="held-out score", draw=draw_held_out),
    Chart(name="gain", title="mean gain per step", draw=draw_gain, across="step (1 = from noise)"),
    Chart(name="seconds", title="seconds per iteration", draw=draw_phases),
    Chart(name="throughput", title="images per second", draw=line_of("images_per_s")),
    Chart(name="grad_norm", title="gradient norm", draw=line_of("grad_norm")),
    Chart(name="clipped", title="clipped share of the ratios", draw=line_of("clipped_frac")),
    Chart(name="log_ratio", title="largest |log ratio|", draw=line_of("max_abs_log_ratio")),
)


def chart_png(run: Run, chart: Chart, theme: Theme) -> bytes:
    """One chart, sized for a phone's width."""
    with rc_context(theme.settings):
        figure = Figure(figsize=(4.4, 2.7), layout="constrained")
        _draw(figure.subplots(), chart, run, theme)
        return _png(figure)


def curves_png(run_dir: Path) -> Path:
    """Draw every chart into curves.png of the run folder."""
    run = read_run(run_dir)
    with rc_context(LIGHT.settings):
        figure = Figure(figsize=(15, 5.6), layout="constrained")
        for axes, chart in zip(figure.subplots(2, 4).flat, CHARTS, strict=True):
            _draw(axes, chart, run, LIGHT)
        (run_dir / CURVES).write_bytes(_png(figure))
    return run_dir / CURVES


def _draw(axes: Axes, chart: Chart, run: Run, theme: Theme) -> None:
    axes.set_title(chart.title)
    axes.set_xlabel(chart.across)
    if run.metrics:
        chart.draw(axes, run)
    if not axes.has_data():
        axes.text(
            0.5, 0.5, "nothing recorded", ha="center", color=theme.ink, transform=axes.transAxes
        )
        axes.set(xticks=[], yticks=[])


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
