"""Copies a finished run's curve, table and pictures into docs/.

    python -m benchmarks.demo_docs runs/demo

Writes docs/demo.md and docs/images/demo_*.png; what people wrote into the document stays.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.marked_section import write_marked
from cluster.curves import curves_png
from cluster.evaluation_table import markdown_table
from cluster.report import before_after_png
from cluster.run_folder import SAMPLES, Run, read_run

SKELETON = """# A longer run

{generated}

## Reading

Not written yet. (This section is written by hand; making this page again leaves it alone.)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Copy the pictures and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo_docs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    parser.add_argument("--name", default="demo", help="of the page and its pictures")
    args = parser.parse_args(argv)
    run = read_run(args.run)
    if run.summary.get("status") != "finished":
        print(f"{args.run} is not a finished run: there is no summary of one", file=sys.stderr)
        return 1
    pictures = copy_pictures(run, args.docs / "images", args.name)
    page = args.docs / f"{args.name}.md"
    write_marked(page, "benchmarks/demo_docs.py", document(run, pictures), SKELETON)
    print(f"wrote {page} and {', '.join(pictures.values())}")
    return 0


def copy_pictures(run: Run, images: Path, name: str) -> dict[str, str]:
    """Draw and copy what the run has; returns caption -> file name."""
    images.mkdir(parents=True, exist_ok=True)
    strips = sorted((run.dir / SAMPLES).glob("trajectory_*.png"))
    found = {
        "curves": curves_png(run.dir),
        "before and after": before_after_png(run.dir),
        "one trajectory": strips[-1] if strips else None,
    }
    copied = {}
    for caption, path in found.items():
        if path is not None:
            copied[caption] = f"{name}_{caption.replace(' ', '_')}.png"
            shutil.copyfile(path, images / copied[caption])
    return copied


def document(run: Run, pictures: dict[str, str]) -> str:
    """The generated part of the page."""
    summary, section = run.summary, run.summary["evaluation"]
    seed = run.config.get("run", {}).get("seed", "?")
    minutes = summary["seconds"].get("total", 0.0) / 60
    work = ", ".join(
        f"{value:,} {name.replace('_', ' ')}" for name, value in summary["counts"].items()
    )
    parts = [
        f"{summary['iterations']} iterations in {minutes:.0f} minutes (start-up and evaluations "
        f"included), seed {seed}, {summary['weights']} weights. Training took {work}.",
        f"Held-out scores on {section['num_lines']} lines of {section['num_prompts']} prompts, the "
        "same prompts and noise before and after; in brackets the "
        f"{100 * section['level']:g} % interval of a bootstrap over prompts.",
        markdown_table(section),
        *(
            f"## {caption.capitalize()}\n\n![{caption}](images/{file})"
            for caption, file in pictures.items()
        ),
    ]
    return "\n\n".join(part.strip() for part in parts)


if __name__ == "__main__":
    sys.exit(main())
