"""The square {outcome, gain} x {flow_sde, ddim_sde}, and gain with T' = 5, over several seeds.

    python -m benchmarks.comparison --seeds 0 1 2 --iterations 40

Every run is the ordinary command line, two of them side by side on one thread each; finished runs
are skipped and interrupted ones continued, so it may be stopped and started again. A run folder that
was made with other settings (iterations, config, model or prompt files) is removed and its run made
anew. Writes docs/comparison.md and docs/images/comparison.png; what people wrote into the document
stays.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.comparison_plot import ArmRun, draw
from benchmarks.comparison_table import document
from benchmarks.marked_section import write_marked
from cluster.config import ConfigError, RunConfig, load
from cluster.open_run import settings_that_count
from cluster.run_folder import CONFIG, ENVIRONMENT, SUMMARY, read_optional, read_run

SHIPPED = "configs/quickstart.toml"


def overrides_of(rule: str, kernel: str, num_substeps: int) -> tuple[str, ...]:
    """The overrides of one arm."""
    return (
        f'credit.rule="{rule}"',
        f'sampling.kernel="{kernel}"',
        f"sampling.num_substeps={num_substeps}",
    )


ARMS = {
    "outcome-flow_sde": overrides_of("outcome", "flow_sde", 1),
    "outcome-ddim_sde": overrides_of("outcome", "ddim_sde", 1),
    "gain-flow_sde": overrides_of("gain", "flow_sde", 1),
    "gain-ddim_sde": overrides_of("gain", "ddim_sde", 1),
    "gain-ddim_sde-3": overrides_of("gain", "ddim_sde", 3),
    "gain-ddim_sde-5": overrides_of("gain", "ddim_sde", 5),
}
"""What tells the arms apart; everything else is the config's. `-3` and `-5` are T' = 3 and 5."""
ONE_THREAD = ("rollout.workers=1", "rollout.threads_per_worker=1", "learner.threads_per_rank=1")
WHERE: dict[str, Any] = {
    "run": {"dir", "resume", "checkpoint_every", "keep_checkpoints"},
    "model": {"path"},
    "prompts": {"path"},
    "evaluation": {"path"},
}
"""Settings in which a folder may differ from the run that is wanted. Files count by content."""
CONTENT = ("model.content", "prompts.content", "evaluation.content")
SKELETON = """# The comparison: credit and kernel

{generated}

## Reading

Not written yet. (This section is written by hand; running the comparison again leaves it alone.)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then draw and write. The exit status is 1 when a run failed."""
    args = parse(argv)
    todo = [(arm, seed) for seed in args.seeds for arm in args.arms]
    commands = {(arm, seed): command(arm, seed, args) for arm, seed in todo}
    with ThreadPoolExecutor(args.jobs) as pool:
        failed = sum(
            pool.map(lambda key: run_one(folder(key[0], key[1], args), commands[key]), todo)
        )
    runs = [
        ArmRun.read(arm, seed, read_run(folder(arm, seed, args)))
        for arm, seed in todo
        if finished(folder(arm, seed, args))
    ]
    if runs:
        draw(runs, args.docs / "images" / "comparison.png")
        example = [shlex.join(commands[todo[0]])]
        text = document(
            runs, [shlex.join(["python", "-m", "benchmarks.comparison", *args.argv])], example
        )
        write_marked(args.docs / "comparison.md", "benchmarks/comparison.py", text, SKELETON)
        print(f"{len(runs)} runs -> {args.docs / 'comparison.md'}")
    return 1 if failed else 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `argv` as given is kept for the document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", default=SHIPPED)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=None, help="default: the config's")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--every", type=int, default=10, help="iterations between evaluations; 0: before and after"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--runs", type=Path, default=Path("runs/comparison"))
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="section.key=value", dest="settings"
    )
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def folder(arm: str, seed: int, args: argparse.Namespace) -> Path:
    """The run folder of one arm and seed."""
    return args.runs / arm / str(seed)


def command(arm: str, seed: int, args: argparse.Namespace) -> list[str]:
    """The command line of one run."""
    length = [] if args.iterations is None else [f"run.num_iterations={args.iterations}"]
    where = [f'run.dir="{folder(arm, seed, args)}"', 'run.resume="auto"']
    named = [f'run.name="{arm}"', f"run.seed={seed}"]
    held_out = [f"evaluation.every={args.every}"]
    overrides = [*named, *where, *length, *held_out, *ONE_THREAD, *args.settings, *ARMS[arm]]
    return ["python", "-m", "cluster", "train", args.config, *overrides]


def finished(run_dir: Path) -> bool:
    """Whether the run has ended well."""
    return read_optional(run_dir, SUMMARY).get("status") == "finished"


def differences(run_dir: Path, wanted: RunConfig) -> list[str]:
    """What tells the run in `run_dir` from the one that is wanted, a line each; none for a new folder."""
    if not (run_dir / CONFIG).is_file():
        return []
    kept = read_optional(run_dir, ENVIRONMENT).get("settings", {})
    try:
        old = settings(load(run_dir / CONFIG), kept)
    except ConfigError as error:
        return [f"its config can't be read any more: {error}"]
    new = settings(wanted, settings_that_count(wanted))
    return [
        f"{key}: was {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def settings(config: RunConfig, contents: dict[str, Any]) -> dict[str, Any]:
    """All settings by dotted key but WHERE, and the digests of the files that they name."""
    tables = config.model_dump(mode="json", exclude=WHERE)
    flat = {
        f"{section}.{key}": value
        for section, table in tables.items()
        for key, value in table.items()
    }
    return flat | {key: contents.get(key) for key in CONTENT}


def run_one(run_dir: Path, words: Sequence[str]) -> bool:
    """Run one command to its end, output into a log beside the run folder; true when it failed."""
    if changed := differences(run_dir, load(words[4], list(words[5:]))):
        print(f"{run_dir}: removed, made with other settings\n  " + "\n  ".join(changed))
        shutil.rmtree(run_dir)
    if finished(run_dir):
        print(f"{run_dir}: finished before")
        return False
    log = run_dir.with_name(f"{run_dir.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{run_dir}: started, output in {log}", flush=True)
    start = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with log.open("a", encoding="utf-8") as output:
        output.write(shlex.join(words) + "\n")
        output.flush()
        status = subprocess.run(
            [sys.executable, *words[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        ).returncode
    outcome = "done" if status == 0 else f"FAILED with exit status {status}"
    print(f"{run_dir}: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
    return status != 0


if __name__ == "__main__":
    sys.exit(main())
