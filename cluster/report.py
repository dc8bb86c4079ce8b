"""report.html: one run on one page that needs no network and no other file.

Everything comes from the run folder (`docs/formats.md`); what the run has not written is said so.
"""

import base64
import io
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from PIL import Image

from cluster.curves import CHARTS, DARK, LIGHT, chart_png
from cluster.evaluation_table import PARTS, SCORES, paired_rows
from cluster.pictures import before_after
from cluster.run_folder import (
    CONFIG,
    EVALUATION,
    REPORT,
    SAMPLES,
    Run,
    evaluation_lines,
    evaluation_picture,
    read_jsonl,
    read_run,
)

MAX_PAIRS = 24
COUNT_NAMES = ("images", "transitions", "network_calls", "reward_calls")


def write_report(run_dir: Path) -> Path:
    """Write report.html and return its path. Works on a run that is still going, or has failed."""
    run = read_run(run_dir)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["signed"] = lambda number: f"{number:+.3f}"
    environment.filters["picture"] = data_uri
    template = files("cluster").joinpath("report_template.html").read_text(encoding="utf-8")
    path = run_dir / REPORT
    path.write_text(environment.from_string(template).render(context(run)), encoding="utf-8")
    return path


def context(run: Run) -> dict[str, Any]:
    """What the template shows, by name."""
    config_path = run.dir / CONFIG
    details = {key: value for key, value in run.environment.items() if key != "format_version"}
    section = run.summary.get("evaluation", {})
    return {
        "name": run.config.get("run", {}).get("name", run.dir.name),
        "seed": run.config.get("run", {}).get("seed"),
        "summary": run.summary,
        "last": run.metrics[-1] if run.metrics else None,
        "first": run.metrics[0] if run.metrics else None,
        "evaluation": section,
        "level": f"{100 * section.get('level', 0.95):g} %",
        "scores": [score for score in SCORES if score in section.get("before", {})],
        "parts": PARTS,
        "charts": list(charts(run)),
        "pairs": list(pairs(run)),
        "strip": strip(run),
        "counts": counts(run),
        "seconds": seconds(run),
        "config": config_path.read_text(encoding="utf-8") if config_path.exists() else "",
        "environment": json.dumps(details, indent=2) if details else "",
    }


def charts(run: Run) -> Iterator[dict[str, Any]]:
    """Every chart twice, for light and dark pages; none before the first iteration has ended."""
    for chart in CHARTS if run.metrics else ():
        light, dark = chart_png(run, chart, LIGHT), chart_png(run, chart, DARK)
        yield {"title": chart.title, "light": light, "dark": dark}


def pairs(run: Run) -> Iterator[dict[str, Any]]:
    """Evaluation lines that kept their image before and after, with both images and both scores."""
    paths = [evaluation_lines(run.dir, name) for name in ("before", "after")]
    if not all(path.exists() for path in paths):
        return
    config = run.config.get("evaluation", {})
    columns = {score: config.get(score) for score in SCORES if config.get(score)}
    num_shown = 0
    for old, new in paired_rows(*(read_jsonl(path) for path in paths)):
        pictures = [evaluation_picture(run.dir, name, old["index"]) for name in ("before", "after")]
        if num_shown < MAX_PAIRS and all(picture.exists() for picture in pictures):
            num_shown += 1
            yield {
                "prompt": old["prompt"],
                "before": pictures[0].read_bytes(),
                "after": pictures[1].read_bytes(),
                "scores": {
                    score: (old["rewards"][reward], new["rewards"][reward])
                    for score, reward in columns.items()
                    if reward in old["rewards"]
                },
            }


def before_after_png(run_dir: Path) -> Path | None:
    """Draw evaluation/before_after.png, pairs side by side; none where no pictures were kept."""
    shown = list(pairs(read_run(run_dir)))
    if not shown:
        return None
    before, after = (
        [np.asarray(Image.open(io.BytesIO(pair[side]))) for pair in shown]
        for side in ("before", "after")
    )
    scores = [pair["scores"]["graded"] for pair in shown if "graded" in pair["scores"]]
    path = run_dir / EVALUATION / "before_after.png"
    before_after(before, after, [pair["prompt"] for pair in shown], scores).save(path)
    return path


def strip(run: Run) -> bytes | None:
    """The newest picture of one trajectory's previews."""
    pictures = sorted((run.dir / SAMPLES).glob("trajectory_*.png"))
    return pictures[-1].read_bytes() if pictures else None


def counts(run: Run) -> dict[str, int]:
    """The summary's counts; before it is written, the sums over the iterations so far."""
    if "counts" in run.summary:
        return run.summary["counts"]
    return {name: sum(line["counts"][name] for line in run.metrics) for name in COUNT_NAMES}


def seconds(run: Run) -> dict[str, dict[str, float]]:
    """Tables of seconds by title: of the run, and inside its iterations by kind of process."""
    inside = {
        "seconds of the iterations": "seconds",
        "in the rollout workers, added up": "worker_seconds",
        "in the learner (rank 0)": "learner_seconds",
    }
    tables = {"seconds of the run": run.summary.get("seconds", {})}
    for title, key in inside.items():
        names = dict.fromkeys(name for line in run.metrics for name in line.get(key, {}))
        tables[title] = {
            name: sum(line.get(key, {}).get(name, 0.0) for line in run.metrics) for name in names
        }
    return {title: table for title, table in tables.items() if table}


def data_uri(png: bytes) -> str:
    """The picture as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
