"""The command line: `flowcredit train | resume | scale | evaluate | sample | plan` (also `python -m cluster`)."""

import argparse
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from cluster.config import ConfigError, load, user_mistakes
from cluster.remote_path import Place

EXIT_MISTAKE, EXIT_FAILED = 2, 1
PACKAGES = ("rollout", "learner", "rewards", "cluster")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="flowcredit", description="Post-train flow-matching image models with per-step credit."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    train = commands.add_parser("train", help="train as a config says")
    train.add_argument("config", type=Path, help="TOML file, such as configs/quickstart.toml")
    resume = commands.add_parser("resume", help="continue a run from its last checkpoint")
    resume.add_argument("run", help="run folder, or its URL")
    plan = commands.add_parser("plan", help="print what a config will run, and run nothing")
    plan.add_argument("config", type=Path)
    for name, text in (
        ("evaluate", "score held-out prompts with a run, a checkpoint or a model"),
        ("sample", "draw prompts to PNG files, with the noise they began from"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "target", help="run folder, checkpoint folder (or the URL of either), or model folder"
        )
        command.add_argument(
            "--config",
            type=Path,
            help="config for a model folder (default: configs/quickstart.toml)",
        )
        command.add_argument(
            "--base", action="store_true", help="a run's model without its trained weights"
        )
        command.add_argument(
            "--out", type=Path, required=name == "sample", help="folder for the results"
        )
        if name == "sample":
            command.add_argument(
                "--prompt", action="append", required=True, help="may be given several times"
            )
            command.add_argument("--seed", type=int, default=0)
    scale = commands.add_parser("scale", help="change a run's actors while it goes on")
    scale.add_argument("run", help="run folder, or its URL")
    scale.add_argument("--rollout-workers", type=int, metavar="N")
    scale.add_argument("--reward", metavar="NAME", help="with --replicas: which reward's servers")
    scale.add_argument("--replicas", type=int, metavar="N")
    for command in commands.choices.values():
        command.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help="settings over the file's"
        )
        command.add_argument(
            "--address", help="Ray cluster to join (default: RAY_ADDRESS, else a local one)"
        )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code: 0 done, 1 the run failed, 2 a mistake in what was asked."""
    args = _parse(argv)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    _quiet_libraries()
    try:
        check_packages({name: find_spec(name) for name in PACKAGES})
        return COMMANDS[args.command](args)
    except ConfigError as error:
        errors.print(f"error: {error}", style="red", markup=False)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        errors.print(
            "interrupted; `flowcredit resume RUN` continues from the last checkpoint", markup=False
        )
        return 130
    except Exception as error:  # supervision boundary: the process ends here, and says why
        errors.print_exception(show_locals=False)
        cause = getattr(error, "cause", None) or error  # Ray wraps what an actor raised
        errors.print(f"error: {type(cause).__name__}: {cause}", style="red", markup=False)
        return EXIT_FAILED


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse; overrides may stand before, between and after options."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    for word in rest:
        if word.startswith("-") or "=" not in word:
            parser.error(f"unrecognized argument: {word}")
    args.overrides += rest
    return args


def check_packages(found: dict[str, ModuleSpec | None]) -> None:
    """Refuse to run a mixture: names as plain as ours may be taken by something else on the import path."""
    files = {name: spec.origin if spec else None for name, spec in found.items()}
    if len({Path(file).parents[1] if file else None for file in files.values()}) != 1:
        raise ConfigError(
            f"the packages {', '.join(files)} must lie in one folder, but Python finds {files}"
        )


def _quiet_libraries() -> None:
    """Keep other libraries' greetings off the terminal, here and in the actors, which inherit the environment."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }.items():
        os.environ.setdefault(name, value)


def _train(args: argparse.Namespace) -> int:
    from cluster.train import train

    return _until_stopped(lambda: train(load(args.config, args.overrides), args.address))


def _resume(args: argparse.Namespace) -> int:
    from cluster.train import resume

    return _until_stopped(lambda: resume(args.run, args.overrides, args.address))


def _until_stopped(run: Callable[[], tuple[Place, dict]]) -> int:
    from cluster.train import Stopped

    try:
        _show(*run())
    except Stopped as stopped:
        Console(stderr=True, soft_wrap=True).print(str(stopped), markup=False, highlight=False)
        return stopped.exit_code
    return 0


def _scale(args: argparse.Namespace) -> int:
    from cluster.scale import scale, status_table

    status = scale(args.run, args.rollout_workers, args.reward, args.replicas, args.address)
    Console().print(status_table(status))
    return 0


def _show(folder: Place, summary: dict) -> None:
    from cluster.evaluation_table import terminal_table

    console = Console()
    console.print(
        terminal_table(summary["evaluation"], f"Held-out prompts ({summary['weights']} weights)")
    )
    console.print(
        f"report:  {folder / 'report.html'}\nweights: {folder / 'weights'}",
        soft_wrap=True,
        highlight=False,
    )


def _plan(args: argparse.Namespace) -> int:
    from cluster.costs import describe

    console = Console()
    with user_mistakes():
        tables = describe(load(args.config, args.overrides))
    for table in tables:
        console.print(table)
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from cluster.commands import evaluate_target
    from cluster.target import found_target

    with found_target(args.target, args.config, args.overrides, args.base) as target:
        evaluate_target(target, args.out, args.address)
    return 0


def _sample(args: argparse.Namespace) -> int:
    from cluster.commands import sample_target
    from cluster.target import found_target

    with found_target(args.target, args.config, args.overrides, args.base) as target:
        sample_target(target, args.out, args.address, args.prompt, args.seed)
    return 0


COMMANDS = {
    "train": _train,
    "resume": _resume,
    "plan": _plan,
    "evaluate": _evaluate,
    "sample": _sample,
    "scale": _scale,
}

if __name__ == "__main__":
    sys.exit(main())
