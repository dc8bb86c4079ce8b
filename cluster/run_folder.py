"""Names and plain readers of the files in a run folder; `docs/formats.md` documents each of them.

Written by the controller, read by reports, benchmarks and tests. Imports neither torch nor ray.
"""

import json
import logging
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Of every JSON object in a run folder; raised when a field changes its meaning or goes away."""

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CURVES = "curves.png"
REPORT = "report.html"
EVALUATION = "evaluation"
SAMPLES = "samples"
CHECKPOINTS = "checkpoints"
TRAJECTORIES = "trajectories"
WEIGHTS = "weights"
BEST = "best.json"
LOOKS = "evaluation/looks.json"


def evaluation_lines(run_dir: Path, name: str) -> Path:
    """Where the evaluation called `name` (before | after) keeps its lines."""
    return run_dir / EVALUATION / f"{name}.jsonl"


def evaluation_picture(run_dir: Path, name: str, index: int) -> Path:
    """Where the evaluation called `name` keeps the image of line `index`, at its own size."""
    return run_dir / EVALUATION / name / f"{index:04d}.png"


def trajectory_picture(run_dir: Path, iteration: int) -> Path:
    """Where the preview strip of one trajectory of `iteration` lies."""
    return run_dir / SAMPLES / f"trajectory_{iteration:06d}.png"


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Add one line, on disk when this returns: a run that dies keeps what it has measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())


def cut_unfinished_line(path: Path) -> None:
    """Remove the half line that a process killed within `append_jsonl` left at the end, if there is one."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        log.warning("%s ended in the middle of a line, which is removed", path)
        os.truncate(path, whole)


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, each with `format_version`; the file appears whole or not at all."""
    _write_atomically(path, "".join(_line(record) for record in records))


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """One indented JSON object with `format_version`; the file appears whole or not at all."""
    content = {"format_version": FORMAT_VERSION, **record}
    _write_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All lines. A line that is no JSON object, or of another format version, is named."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        records.append(_checked(record, f"{path}, line {number}"))
    return records


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object of this format version."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return _checked(record, str(path))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The iterations of a run in order; none before the first has ended.

    A run that rolled back to a checkpoint writes an iteration again: the last writing counts.
    """
    path = run_dir / METRICS
    lines = read_jsonl(path) if path.exists() else []
    by_iteration = {line["iteration"]: line for line in lines}
    return [by_iteration[iteration] for iteration in sorted(by_iteration)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run has written so far; empty parts are not there yet."""

    dir: Path
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    held_out: dict[int, dict[str, float]]
    """Mean scores of the evaluations during training, by iteration."""


def read_run(run_dir: Path) -> Run:
    """Everything but the lines of the evaluations and the pictures."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"run folder {run_dir} does not exist")
    return Run(
        dir=run_dir,
        metrics=read_metrics(run_dir),
        summary=read_optional(run_dir, SUMMARY),
        config=read_config(run_dir),
        environment=read_optional(run_dir, ENVIRONMENT),
        held_out=read_held_out(run_dir),
    )


def read_held_out(run_dir: Path) -> dict[int, dict[str, float]]:
    """Mean graded and strict score of every evaluation/iteration_NNNNNN.jsonl, by iteration."""
    settings = read_config(run_dir).get("evaluation", {})
    scores = {score: settings[score] for score in ("graded", "strict") if settings.get(score)}
    means = {}
    for path in sorted((run_dir / EVALUATION).glob("iteration_*.jsonl")):
        scored = [line["rewards"] for line in read_jsonl(path)]
        means[int(path.stem.removeprefix("iteration_"))] = {
            score: sum(values[reward] for values in scored) / len(scored)
            for score, reward in scores.items()
            if all(reward in values for values in scored)
        }
    return means


def read_optional(run_dir: Path, name: str) -> dict[str, Any]:
    """A JSON file of the run folder, empty where the run has not written it (yet)."""
    path = run_dir / name
    return read_json(path) if path.exists() else {}


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved config as plain tables, empty where there is none."""
    path = run_dir / CONFIG
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({"format_version": FORMAT_VERSION, **record}, allow_nan=False) + "\n"


def _checked(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"{where} holds {type(record).__name__}, not a JSON object")
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{where} has format_version {record.get('format_version')!r}; "
            f"this flowcredit reads {FORMAT_VERSION}"
        )
    return record


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
