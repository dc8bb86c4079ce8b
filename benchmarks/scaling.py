"""How the system scales, without GPUs: workers, rewards and the learner sleep for as long as one would work.

    python -m benchmarks.scaling [--only workers controller lag publish recovery elastic] [--docs docs] [--out FILE]

    workers     images/s against rollout workers, on real Ray
    controller  how busy the controller is with up to 1,000 workers, in virtual time, without Ray
    lag         throughput with max_policy_lag = 1 over that with 0, on real Ray
    publish     seconds from a publish to the last worker's checksum, against workers, on real Ray
    recovery    seconds to recover from a SIGKILL of each kind of part, on real Ray
    elastic     `flowcredit scale` 1 -> 3 -> 1 from another process while a run trains, on real Ray

Every ratio is taken within one run of the script. It prints and writes what it finds, and asserts no time. With
--docs docs each figure goes to its own section of docs/scaling.md; the others, and what people wrote, stay.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import scaling_page as page
from benchmarks.marked_section import BEGIN, END, write_marked
from benchmarks.scaling_setup import QUIET

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that is measured on its own."""

    title: str
    measure: Callable[[argparse.Namespace], Figures]
    text: Callable[[Figures], str]
    draw: Callable[[Figures, Path], None] | None = None


def _workers(args: argparse.Namespace) -> Figures:
    from benchmarks.scaling_workers import measure_workers

    return measure_workers(args.workers, args.settle_s, args.window_s)


def _controller(args: argparse.Namespace) -> Figures:
    from benchmarks.scaling_controller import measure_controller

    return measure_controller(args.fakes, args.virtual_settle_s, args.virtual_window_s)


def _lag(args: argparse.Namespace) -> Figures:
    from benchmarks.scaling_lag import measure_lag

    return measure_lag(args.phase_s, args.iterations)


def _publish(args: argparse.Namespace) -> Figures:
    from benchmarks.scaling_workers import measure_publish

    return measure_publish(args.workers, args.settle_s, args.window_s, int(args.mb * 1e6 / 4))


def _recovery(args: argparse.Namespace) -> Figures:
    from benchmarks.scaling_recovery import measure_recovery

    return measure_recovery(args.kills)


def _elastic(args: argparse.Namespace) -> Figures:
    from benchmarks.scaling_elastic import measure_elastic

    return measure_elastic(args.elastic_call_s, args.rows)


ITEMS = {
    "workers": Item(
        title="Images per second against rollout workers",
        measure=_workers,
        text=page.workers_text,
        draw=page.draw_workers,
    ),
    "controller": Item(
        title="How busy the controller is",
        measure=_controller,
        text=page.controller_text,
        draw=page.draw_controller,
    ),
    "lag": Item(title="What a policy lag of one is worth", measure=_lag, text=page.lag_text),
    "publish": Item(
        title="From a publish to the last checksum",
        measure=_publish,
        text=page.publish_text,
        draw=page.draw_publish,
    ),
    "recovery": Item(title="Recovery from a kill", measure=_recovery, text=page.recovery_text),
    "elastic": Item(title="Scaling while it trains", measure=_elastic, text=page.elastic_text),
}


def mark(name: str) -> str:
    """What an item's section of the page is marked with."""
    return f"benchmarks/scaling.py {name}"


def skeleton() -> str:
    """A page without figures."""
    parts = ["# How it scales"]
    for name, item in ITEMS.items():
        begin, end = (line.format(script=mark(name)) for line in (BEGIN, END))
        parts.append(f"## {item.title}\n\n{begin}\nNot measured yet.\n{end}")
    parts.append(
        "## Reading\n\nNot written yet. (What lies between the marked sections is written by hand; running the "
        "benchmark again leaves it alone.)\n"
    )
    return "\n\n".join(parts)


def write_section(docs: Path, name: str, figures: Figures, command: Sequence[str]) -> None:
    """Put an item's figures into its section of scaling.md, and draw its picture."""
    item, path = ITEMS[name], docs / "scaling.md"
    parts = [item.text(figures)]
    if item.draw is not None:
        file = f"scaling_{name}.png"
        item.draw(figures, docs / "images" / file)
        parts.append(f"![{item.title.lower()}](images/{file})")
    parts.append(
        f"`{shlex.join(command)}`, on {os.cpu_count()} cores ({platform.machine()}, Python "
        f"{platform.python_version()})."
    )
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(skeleton(), encoding="utf-8")
    write_marked(path, mark(name), "\n\n".join(parts), skeleton())


def counts(text: str) -> list[int]:
    """Rising numbers of workers, as in "1,2,4"; argparse's error otherwise."""
    found = [int(word) for word in text.split(",")]
    if found[0] < 1 or sorted(set(found)) != found:
        raise argparse.ArgumentTypeError(f"{text} must be rising numbers from 1 on, as 1,2,4")
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--only", nargs="+", choices=ITEMS, default=list(ITEMS), metavar="ITEM")
    add("--workers", type=counts, default=counts("1,2,4,8,16,32,64"), help="workers, publish")
    add("--settle-s", type=float, default=10.0, help="before each window: workers, publish")
    add("--window-s", type=float, default=60.0, help="measured at each number: workers, publish")
    add("--mb", type=float, default=4.0, help="of a version: publish")
    add("--fakes", type=counts, default=counts("125,250,500,1000"), help="workers: controller")
    add("--virtual-settle-s", type=float, default=30.0, help="controller")
    add("--virtual-window-s", type=float, default=60.0, help="controller")
    add("--phase-s", type=float, default=6.0, help="of sampling and of learning: lag")
    add("--iterations", type=int, default=8, help="of each run, at least 4: lag")
    add("--kills", type=int, default=3, help="of each part: recovery")
    add("--elastic-call-s", type=float, default=0.5, help="of a slice: elastic")
    add("--rows", type=int, default=4, help="iterations at each number: elastic")
    add("--out", type=Path, help="also write the figures as JSON")
    add("--docs", type=Path, help="also write scaling.md and its pictures into this folder")
    args = parser.parse_args(argv)
    if args.iterations < 4 or min(args.kills, args.rows) < 1:
        parser.error("--iterations must be at least 4, --kills and --rows at least 1")
    if (
        min(args.settle_s, args.virtual_settle_s) < 0
        or min(args.window_s, args.virtual_window_s) <= 0
    ):
        parser.error("windows must be longer than 0 s, and settling may not be shorter")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what was asked for, one after another; print, and write each as soon as it is there."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    os.environ.update(QUIET)
    found: dict[str, Figures] = {}
    for name in args.only:
        item = ITEMS[name]
        print(f"{name}:", flush=True)
        found[name] = item.measure(args)
        print(f"\n{item.text(found[name])}\n", flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        if args.docs:
            command = ["python", "-m", "benchmarks.scaling", *argv]
            write_section(args.docs, name, found[name], command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
