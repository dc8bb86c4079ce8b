"""Making and re-opening a run folder, and telling whether a config would continue the run that it holds."""

import os
import platform
import sys
import time
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cluster.config import ConfigError, RunConfig, dump
from cluster.folder_probe import check_writable
from cluster.remote_folder import RunPlace, fetched
from cluster.remote_path import Place, place_at
from cluster.run_folder import CONFIG, ENVIRONMENT, read_json, write_json

PACKAGES = ("torch", "ray", "diffusers", "transformers", "deepspeed", "pyarrow", "peft", "numpy")

NOT_THE_NUMBERS: dict[str, Any] = {
    "run": {
        "name",
        "dir",
        "resume",
        "num_iterations",
        "checkpoint_every",
        "keep_checkpoints",
        "record_trajectories",
        "wait_for_nodes_s",
    },
    "model": {"path"},
    "prompts": {"path"},
    "rollout": {
        "workers",
        "threads_per_worker",
        "gpus_per_worker",
        "resources",
        "preview_groups",
        "preview_samples",
    },
    "rewards": {
        "components": {
            "__all__": {"replicas", "threads", "gpus", "resources", "max_wait_s", "timeout_s"}
        }
    },
    "learner": {
        "num_ranks",
        "threads_per_rank",
        "gpus_per_rank",
        "resources",
        "zero_stage",
        "ratio_tolerance",
    },
    "evaluation": {"path", "every", "both_kinds", "batch"},
    "faults": True,
}
"""Settings that may change when a run is continued. Files count by content, not by path."""


def chosen_folder(config: RunConfig) -> Place:
    """Return the run folder, which is there and can be written. ConfigError when it can't."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    where = place_at(config.run.dir or f"runs/{config.run.name}/{stamp}")
    _check_writable(where)
    return where


def open_folder(where: Place, config: RunConfig) -> tuple[RunPlace, bool]:
    """Prepare the run folder, which no other driver has; True when it already holds this run, to be continued.

    Raises ConfigError when it holds a run that may not or can't be continued.
    """
    if not (where / CONFIG).exists():
        return RunPlace.at(where), False
    if config.run.resume == "never":
        raise ConfigError(
            f"run.dir = {str(where)!r} already holds a run; continue it with `flowcredit resume {where}` "
            "(or run.resume=auto), or choose another run.dir"
        )
    _check_same_run(where, config)
    place = RunPlace.at(where)
    place.pull()
    return place, True


def control_name(where: Place) -> str:
    """Return the name under which the run kept there can be found on its Ray cluster."""
    return f"run {where.absolute() if isinstance(where, Path) else where}"


def _check_writable(where: Place) -> None:
    try:
        if isinstance(where, Path):
            where.mkdir(parents=True, exist_ok=True)
        check_writable(where)
    except Exception as error:  # supervision boundary: drivers have errors of their own
        raise ConfigError(
            f"run.dir = {str(where)!r} can't be written: {error}; choose another run.dir"
        ) from error


def _check_same_run(folder: Place, config: RunConfig) -> None:
    """Compare what decides the numbers, key by key."""
    if not (folder / ENVIRONMENT).is_file():
        raise ConfigError(
            f"{folder} has a {CONFIG} but no {ENVIRONMENT}: not a run of ours; choose another run.dir"
        )
    with fetched(folder / ENVIRONMENT) as path:
        kept, wanted = read_json(path)["settings"], settings_that_count(config)
    different = [
        f"{key}: the run has {kept.get(key)!r}, asked for {wanted.get(key)!r}"
        for key in sorted(kept.keys() | wanted.keys())
        if kept.get(key) != wanted.get(key)
    ]
    if different:
        raise ConfigError(
            f"{folder} holds a run with other settings, so it can't be continued (choose another run.dir):\n  "
            + "\n  ".join(different)
        )


def write_start(folder: Path, config: RunConfig) -> None:
    """Write the resolved config and what the run runs on; also when it is continued, with its present settings."""
    (folder / CONFIG).write_text(dump(config))
    write_json(
        folder / ENVIRONMENT,
        {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "packages": {name: version(name) for name in PACKAGES},
            "command": sys.argv[1:],
            "settings": settings_that_count(config),
        },
    )


def settings_that_count(config: RunConfig) -> dict[str, Any]:
    """Return everything that decides a run's numbers, by dotted key: settings, and digests of the files they name."""
    table = config.model_dump(mode="json", exclude=NOT_THE_NUMBERS)
    flat = dict(_flatten(table, ""))
    flat["model.content"] = _model_digest(Path(config.model.path))
    for section in ("prompts", "evaluation"):
        flat[f"{section}.content"] = _file_digest(Path(getattr(config, section).path))
    return flat


def _flatten(table: dict[str, Any], prefix: str) -> Any:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _file_digest(path: Path) -> str:
    return blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else "missing"


def _model_digest(folder: Path) -> str:
    """Names and sizes of a model's files: reading tens of GB of weights at each start would take too long."""
    if not folder.is_dir():
        return str(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = "\n".join(f"{path.relative_to(folder)} {path.stat().st_size}" for path in files)
    return blake2b(names.encode(), digest_size=16).hexdigest()
