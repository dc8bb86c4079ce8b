"""Learning curves of the comparison: against images, network calls and seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cluster.curves import LIGHT, held_out_points, smoothed
from cluster.run_folder import Run, evaluation_lines, read_jsonl

AXES = {"images": "images", "network_calls": "network calls", "seconds": "seconds of training"}
COLOURS = ("#8c8c8c", "#4aa96c", "#e38b29", "#3f8fd2", "#b56bc4", "#c8454a")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One finished run of one arm."""

    arm: str
    seed: int
    run: Run
    lines: dict[str, list[dict[str, Any]]]
    """Evaluation lines by name: before, after."""

    @classmethod
    def read(cls, arm: str, seed: int, run: Run) -> "ArmRun":
        """With the evaluation lines of its folder."""
        names = ("before", "after")
        lines = {name: read_jsonl(evaluation_lines(run.dir, name)) for name in names}
        return cls(arm=arm, seed=seed, run=run, lines=lines)

    def spent(self, axis: str) -> np.ndarray:
        """What had been spent after each iteration [num_iterations], along one of AXES."""
        if axis == "seconds":
            return np.cumsum([line["seconds"]["total"] for line in self.run.metrics])
        return np.cumsum([line["counts"][axis] for line in self.run.metrics]).astype(float)

    def reward_curve(self) -> np.ndarray:
        """Mean training reward of each iteration, smoothed [num_iterations]."""
        return smoothed([line["reward"]["mean"] for line in self.run.metrics])

    def reward_at(self, axis: str, spent: float | np.ndarray) -> np.ndarray:
        """The smoothed training reward when so much had been spent."""
        return np.asarray(np.interp(spent, self.spent(axis), self.reward_curve()))


def by_arm(runs: Sequence[ArmRun]) -> dict[str, list[ArmRun]]:
    """Runs of each arm, in order of first appearance."""
    arms = dict.fromkeys(run.arm for run in runs)
    return {arm: [run for run in runs if run.arm == arm] for arm in arms}


def draw(runs: Sequence[ArmRun], path: Path) -> None:
    """Write the picture of `runs` to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(LIGHT.settings):
        learning_curves(runs).savefig(path, dpi=110)


def learning_curves(runs: Sequence[ArmRun]) -> Figure:
    """Training reward above, held-out graded score below; three ways to count the cost. Every arm is drawn."""
    with rc_context(LIGHT.settings):
        figure = Figure(figsize=(13, 7), layout="constrained")
        rows = figure.subplots(2, len(AXES), sharey="row")
        for (axis, title), above, below in zip(AXES.items(), *rows, strict=True):
            for (arm, members), colour in zip(by_arm(runs).items(), cycle(COLOURS), strict=False):
                draw_rewards(above, members, axis, colour, arm)
                draw_held_out(below, members, axis, colour, arm)
            above.set_title(f"against {title}")
            below.set_xlabel(title)
        rows[0][0].set_ylabel("training reward (smoothed)")
        rows[1][0].set_ylabel("held-out graded score")
        handles, labels = rows[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
        return figure


def draw_rewards(axes: Axes, members: Sequence[ArmRun], axis: str, colour: str, arm: str) -> None:
    """Mean over the seeds, with a band from the lowest to the highest seed."""
    start = max(run.spent(axis)[0] for run in members)
    common = np.linspace(start, min(run.spent(axis)[-1] for run in members), 200)
    values = np.stack([run.reward_at(axis, common) for run in members])
    axes.plot(common, values.mean(axis=0), color=colour, label=arm)
    axes.fill_between(common, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15)


def draw_held_out(axes: Axes, members: Sequence[ArmRun], axis: str, colour: str, arm: str) -> None:
    """Mean over the seeds at every iteration that was evaluated; bars reach to the outer seeds."""
    points = [dict(held_out_points(run.run, "graded")[0]) for run in members]
    common = sorted(set.intersection(*(set(point) for point in points)))
    scores = np.array([[point[at] for at in common] for point in points])
    spent = np.mean([np.array([0.0, *run.spent(axis)])[common] for run in members], axis=0)
    means = scores.mean(axis=0)
    bars = np.stack([means - scores.min(axis=0), scores.max(axis=0) - means])
    axes.errorbar(spent, means, bars, fmt="o-", ms=3, capsize=2, lw=1, color=colour, label=arm)
