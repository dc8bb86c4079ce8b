"""Tables of the comparison: what each arm gained, and how the arms differ line by line."""

from collections.abc import Sequence

import numpy as np

from benchmarks.comparison_plot import AXES, ArmRun, by_arm
from cluster.statistics import Estimate, paired_interval

PAIRS = (
    ("gain-ddim_sde", "outcome-flow_sde"),
    ("gain-ddim_sde", "outcome-ddim_sde"),
    ("gain-flow_sde", "outcome-flow_sde"),
    ("outcome-ddim_sde", "outcome-flow_sde"),
    ("gain-ddim_sde", "gain-flow_sde"),
    ("gain-ddim_sde-3", "gain-ddim_sde"),
    ("gain-ddim_sde-5", "gain-ddim_sde"),
)
"""The first minus the second: the whole change, the credit twice, the kernel twice, T'."""

ABOUT_CURVES = (
    "Lines are means over seeds, bands and bars reach from the lowest to the highest seed. Arms "
    "are named credit rule, kernel, and T' where it is not 1; everything else is equal. (The "
    "config's normaliser, joint, is Flow-GRPO's per-group one under the outcome rule, where all "
    "steps of a trajectory carry the same credit.) Seconds are those of the training iterations (no "
    "start-up, no evaluation), on one thread per process and with as many runs side by side as the "
    "command says."
)
ABOUT_COST = (
    "Of one run, mean over the seeds. Images, network calls (latents that went through the network, "
    "rollout and learner) and reward calls are those of the training; so are the seconds, with their "
    "range over the seeds. Start-up, evaluations and export come on top of them in the last column."
)
ABOUT_GAINED = (
    "Held-out score after training minus before, on the same {lines} lines ({prompts} prompts) "
    "with the same noise. In brackets: the 95 % interval of the mean over the seeds, from a "
    "bootstrap over prompts, which takes the trained weights as given. Behind it: each seed by "
    "itself, which is what says how much training varies."
)


def document(runs: Sequence[ArmRun], commands: Sequence[str], example: Sequence[str]) -> str:
    """The generated part of docs/comparison.md."""
    columns = score_columns(runs)
    seeds = sorted({run.seed for run in runs})
    some = runs[0]
    prompts = {line["prompt"] for line in some.lines["after"]}
    names = {"lines": len(some.lines["after"]), "prompts": len(prompts)}
    parts = [
        "![learning curves](images/comparison.png)",
        f"{len(runs)} runs, seeds {', '.join(map(str, seeds))}. {ABOUT_CURVES}",
        "## What each arm gained",
        ABOUT_GAINED.format(**names),
        *(f"### {score}\n\n{gained_table(runs, column)}" for score, column in columns.items()),
        "## What each arm cost",
        ABOUT_COST,
        cost_table(runs),
        "## How the arms differ",
        "Score after training, first arm minus second, paired by seed and line.",
        *(f"### {score}\n\n{pair_table(runs, column)}" for score, column in columns.items()),
        "## Training reward at equal cost",
        "Smoothed training reward when every arm has spent what the cheapest arm spent in all; "
        "mean over seeds.",
        equal_cost_table(runs),
        "## Commands",
        "```\n" + "\n".join(commands) + "\n```",
        "One of the runs it makes:",
        "```\n" + "\n".join(example) + "\n```",
    ]
    return "\n\n".join(part.strip() for part in parts)


def score_columns(runs: Sequence[ArmRun]) -> dict[str, str]:
    """Reward column of each score, from the first run's config."""
    settings = runs[0].run.config.get("evaluation", {})
    return {score: settings[score] for score in ("graded", "strict") if settings.get(score)}


def gained_table(runs: Sequence[ArmRun], column: str) -> str:
    """Paired difference of every arm."""
    rows = []
    for arm, members in by_arm(runs).items():
        estimate, seeds = difference(members, members, column, ("before", "after"))
        rows.append([arm, signed(estimate), by_seed(seeds)])
    return table(["arm", "after - before", "by seed"], rows)


def cost_table(runs: Sequence[ArmRun]) -> str:
    """Counts and seconds of every arm, as the summaries of its runs give them."""
    counted = ("images", "network_calls", "reward_calls")
    header = ["arm", "runs", *(name.replace("_", " ") for name in counted)]
    header += ["seconds of training", "images/s", "seconds in all"]
    rows = []
    for arm, members in by_arm(runs).items():
        summaries = [run.run.summary for run in members]
        counts = [np.mean([summary["counts"][name] for summary in summaries]) for name in counted]
        training, total = (
            np.array([summary["seconds"][name] for summary in summaries])
            for name in ("training", "total")
        )
        seconds = f"{training.mean():,.0f} [{training.min():,.0f}, {training.max():,.0f}]"
        rate = counts[0] / training.mean()
        row = [arm, str(len(members)), *(f"{count:,.0f}" for count in counts), seconds]
        rows.append([*row, f"{rate:.1f}", f"{total.mean():,.0f}"])
    return table(header, rows)


def pair_table(runs: Sequence[ArmRun], column: str) -> str:
    """Paired difference of every pair of arms that share a seed."""
    arms, rows = by_arm(runs), []
    for first, second in PAIRS:
        firsts = {run.seed: run for run in arms.get(first, ())}
        seconds = {run.seed: run for run in arms.get(second, ())}
        shared = sorted(firsts.keys() & seconds.keys())
        if shared:
            estimate, seeds = difference(
                [seconds[seed] for seed in shared],
                [firsts[seed] for seed in shared],
                column,
                ("after", "after"),
            )
            rows.append([f"{first} - {second}", signed(estimate), by_seed(seeds)])
    return table(["arms", "difference", "by seed"], rows) if rows else "No two arms share a seed.\n"


def difference(
    olds: Sequence[ArmRun], news: Sequence[ArmRun], column: str, names: tuple[str, str]
) -> tuple[Estimate, list[float]]:
    """Mean of new minus old over seeds and lines with its interval over prompts; and by seed."""
    first, second = (
        np.array([[line["rewards"][column] for line in run.lines[name]] for run in side])
        for side, name in zip((olds, news), names, strict=True)
    )
    prompts = [[line["prompt"] for line in run.lines["after"]] for run in (*olds, *news)]
    if any(asked != prompts[0] for asked in prompts):
        raise ValueError("the runs were evaluated on different prompts; they can't be compared")
    estimate = paired_interval(first.mean(axis=0), second.mean(axis=0), prompts[0])
    return estimate, (second - first).mean(axis=1).tolist()


def equal_cost_table(runs: Sequence[ArmRun]) -> str:
    """Training reward of each arm at the total cost of the cheapest."""
    arms = by_arm(runs)
    limits = {axis: min(run.spent(axis)[-1] for run in runs) for axis in AXES}
    header = ["arm", *(f"at {limit:,.0f} {AXES[axis]}" for axis, limit in limits.items())]
    rows = [
        [arm]
        + [
            f"{np.mean([run.reward_at(axis, limit) for run in members]):.3f}"
            for axis, limit in limits.items()
        ]
        for arm, members in arms.items()
    ]
    return table(header, rows)


def signed(estimate: Estimate) -> str:
    """Mean and interval, with signs."""
    return f"{estimate.mean:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}]"


def by_seed(values: Sequence[float]) -> str:
    """Each seed's mean, and their standard deviation where there is more than one."""
    spread = f"; std {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    return ", ".join(f"{value:+.4f}" for value in values) + spread


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
