"""The figures of the scaling benchmark as Markdown and as pictures."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import scaling_elastic, scaling_lag, scaling_workers
from cluster.curves import BLUE, GREY, LIGHT, ORANGE

Figures = dict[str, Any]
BUSY_WANTED = 0.5


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    marks = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, marks, *rows])


def said_of(ledger: dict[str, int]) -> str:
    """A sentence about the groups that were trained on."""
    return (
        f"Ledger: {ledger['groups']:,} groups trained on, {ledger['lost']} lost, {ledger['doubled']} twice, "
        f"{ledger['unexpected']} unexpected."
    )


def each_of(numbers: Sequence[float], digits: int) -> str:
    return ", ".join(f"{number:.{digits}f}" for number in numbers)


# images/s against workers


def workers_text(figures: Figures) -> str:
    rungs = figures["rungs"]
    found = scaling_workers.efficiency(rungs)
    rows = [
        [
            str(rung["workers"]),
            f"{rung['images_per_s']:.2f}",
            f"{share:.3f}",
            each_of(rung["each"], 2),
            f"{rung['answers_per_s']:.0f}",
            f"{rung['busy_frac']:.2f}",
            f"{rung['process_frac']:.2f}",
        ]
        for rung, share in zip(rungs, found, strict=True)
    ]
    header = "workers | images/s | of linear | each part | answers/s | controller busy | its process's CPU"
    memory = figures["private_mb"]
    parts = [
        f"{rungs[-1]['workers']} workers reach **{found[-1]:.3f}** of {rungs[-1]['workers']} times the rate of "
        f"{rungs[0]['workers']} (asked for: at least {scaling_workers.WANTED}).",
        table(header.split(" | "), rows),
        f"A slice takes a worker {figures['call_s']:g} s of sleep; a batch has {figures['calls_per_batch']} of them, "
        f"and the lag is 1. One run, whose workers are scaled up while it trains; each number of them is measured for "
        f"{figures['window_s']:g} s, after all are ready and have settled: the median of three equal parts. Workers "
        f"lost on the way: {figures['lost']}. {said_of(figures['ledger'])}",
    ]
    if memory is not None:
        parts.append(f"A worker's process holds {memory:.0f} MB that it shares with no other.")
    return "\n\n".join(parts)


def draw_workers(figures: Figures, path: Path) -> None:
    rungs = figures["rungs"]
    counts = [rung["workers"] for rung in rungs]
    one = rungs[0]["images_per_s"] / counts[0]

    def curve(axes: Axes) -> None:
        axes.plot(counts, [one * n for n in counts], "--", color=GREY, label="linear")
        axes.plot(counts, [rung["images_per_s"] for rung in rungs], "o-", color=BLUE, label="run")
        axes.set_yscale("log", base=2)
        axes.set_title("images/s")

    def share(axes: Axes) -> None:
        axes.axhline(
            scaling_workers.WANTED, ls="--", color=GREY, label=f"wanted: {scaling_workers.WANTED}"
        )
        axes.plot(counts, scaling_workers.efficiency(rungs), "o-", color=BLUE, label="run")
        axes.set_ylim(0, 1.1)
        axes.set_title("share of linear")

    picture(path, counts, "rollout workers", curve, share)


# the controller


def controller_text(figures: Figures) -> str:
    rungs = figures["rungs"]
    last = rungs[-1]
    rows = [
        [
            f"{rung['workers']:,}",
            f"{rung['busy_frac']:.3f}",
            f"{rung['process_frac']:.3f}",
            f"{rung['answers_per_s']:.0f}",
        ]
        for rung in rungs
    ]
    header = ["workers", "controller busy", "whole process", "answers/s"]
    return "\n\n".join(
        [
            f"With {last['workers']:,} workers at {figures['call_s']:g} s a slice the controller is busy "
            f"**{last['busy_frac']:.2f}** of the time (asked for: at most {BUSY_WANTED}), at "
            f"{last['answers_per_s']:.0f} answers a second: each is one message out and one back.",
            table(header, rows),
            "Real CPU seconds over virtual seconds. The controller is the one of a run; workers, reward server and "
            "learner are fakes in its process (`tests/fake_backend.py`) that answer with real Arrow data when their "
            "virtual time has come. *Controller busy* counts its handlers, what the fakes compute for an answer "
            "included; *whole process* also counts the fakes' own queue, which takes most of the rest. Without Ray: "
            "what Ray costs the controller is in the first table, where answers come at a like rate. A batch has "
            f"{figures['calls_per_batch']:,} slices, the lag is 1, each number of workers is measured for "
            f"{figures['window_s']:g} virtual seconds. {said_of(figures['ledger'])}",
        ]
    )


def draw_controller(figures: Figures, path: Path) -> None:
    rungs = figures["rungs"]
    counts = [rung["workers"] for rung in rungs]

    def shares(axes: Axes) -> None:
        axes.axhline(BUSY_WANTED, ls="--", color=GREY, label=f"wanted: at most {BUSY_WANTED}")
        for name, label, colour in (
            ("busy_frac", "controller", BLUE),
            ("process_frac", "whole process, fakes included", ORANGE),
        ):
            axes.plot(counts, [rung[name] for rung in rungs], "o-", color=colour, label=label)
        axes.set_ylim(bottom=0)
        axes.set_title("share of the time that is computed")

    def answers(axes: Axes) -> None:
        axes.plot(counts, [rung["answers_per_s"] for rung in rungs], "o-", color=BLUE)
        axes.set_title("answers/s")

    picture(path, counts, f"workers at {figures['call_s']:g} s a slice", shares, answers)


# a lag of one


def lag_text(figures: Figures) -> str:
    rows = []
    for lag, run in figures["lags"].items():
        total, sampled, learned = (
            scaling_lag.median_of(run["seconds"], phase) for phase in ("total", "rollout", "learn")
        )
        rate = run["images_per_iteration"] / total
        numbers = [f"{number:.2f}" for number in (total, sampled, learned, rate)]
        rows.append([lag, *numbers, str(len(scaling_lag.steady(run["seconds"])))])
    header = (
        "k | seconds an iteration | until the batch is whole | learning | images/s | iterations"
    )
    return "\n\n".join(
        [
            f"With sampling and learning of equal length, k = 1 has **{scaling_lag.gain(figures):.2f}** times the "
            f"throughput of k = 0 (asked for: at least {scaling_lag.WANTED}).",
            table(header.split(" | "), rows),
            f"{figures['workers']} workers sleep {figures['phase_s']:g} s for a batch, and so does the learner. "
            f"Medians over the iterations, without the first {scaling_lag.LEFT_OUT_FIRST} and the last. Real Ray, "
            "both runs in one session.",
        ]
    )


# publishing


def publish_text(figures: Figures) -> str:
    rows = [
        [
            str(rung["workers"]),
            f"{statistics.median(rung['seconds']):.3f}",
            f"{max(rung['seconds']):.3f}",
            str(len(rung["seconds"])),
        ]
        if rung["seconds"]
        else [str(rung["workers"]), "", "", "0"]
        for rung in figures["rungs"]
    ]
    header = ["workers", "seconds, median", "longest", "versions"]
    return "\n\n".join(
        [
            f"From the moment at which the controller has a version's handle until the last worker has answered with "
            f"the checksum of what it now holds; {figures['mb']:g} MB a version.",
            table(header, rows),
            "All workers are on one machine and share its cores, so their copies and checksums follow one another: on "
            f"machines of their own they would not. Lag 0, one run, {figures['window_s']:g} s for each number of "
            f"workers. {said_of(figures['ledger'])}",
        ]
    )


def draw_publish(figures: Figures, path: Path) -> None:
    rungs = [rung for rung in figures["rungs"] if rung["seconds"]]
    counts = [rung["workers"] for rung in rungs]

    def curve(axes: Axes) -> None:
        medians = [statistics.median(rung["seconds"]) for rung in rungs]
        longest = [max(rung["seconds"]) for rung in rungs]
        axes.plot(counts, medians, "o-", color=BLUE, label="median")
        axes.plot(counts, longest, "o-", color=ORANGE, label="longest")
        axes.set_ylim(bottom=0)
        axes.set_title("seconds from a publish to the last checksum")

    picture(path, counts, "rollout workers", curve)


# recovery


def recovery_text(figures: Figures) -> str:
    rows = []
    for part, kills in figures["kills"].items():
        row, whole = ([kill[name] for kill in kills] for name in ("next_row_s", "whole_s"))
        numbers = [statistics.median(row), max(row), statistics.median(whole), max(whole)]
        rows.append([part, *(f"{number:.1f}" for number in numbers), str(len(kills))])
    header = "killed | next row, median s | longest | at full strength, median s | longest | kills"
    return "\n\n".join(
        [
            f"Seconds from a SIGKILL. An undisturbed iteration takes {figures['usual_s']:.1f} s.",
            table(header.split(" | "), rows),
            "*Next row*: until the next line of `metrics.jsonl` that counts the loss. *At full strength*: until the "
            "next such line after which no part is missing; most of it is a new process's imports. The learner's next "
            "row comes after a roll-back to the last checkpoint, which here is the iteration before. Kills fall at "
            f"random moments of an iteration, the parts in turn, all in one run. {said_of(figures['ledger'])}",
        ]
    )


# flowcredit scale


def elastic_text(figures: Figures) -> str:
    rows = [
        [
            str(phase["workers"]),
            f"{phase['images_per_s']:.2f}",
            each_of(phase["each"], 2),
        ]
        for phase in figures["phases"]
    ]
    return "\n\n".join(
        [
            f"`flowcredit scale` from another process, while the run trains: three workers have "
            f"**{scaling_elastic.gain(figures['phases']):.2f}** times the images/s of one (asked for: at least "
            f"{scaling_elastic.WANTED}).",
            table(["workers", "images/s, median", "each iteration"], rows),
            f"Slices of {figures['call_s']:g} s, {figures['calls_per_batch']} a batch, lag 1. The first and the last "
            f"iteration with each number are left out. {said_of(figures['ledger'])}",
        ]
    )


def picture(path: Path, counts: Sequence[int], label: str, *panels: Callable[[Axes], None]) -> None:
    """One panel beside the other, all against numbers of workers on a doubling axis."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(LIGHT.settings):
        figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
        for axes, draw in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            draw(axes)
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [f"{count:,}" for count in counts])
            axes.minorticks_off()
            axes.set_xlabel(label)
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
        figure.savefig(path, dpi=110)
