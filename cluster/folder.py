"""Making and re-opening a run folder, and the rows that go into its metrics."""

import hashlib
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from cluster.config import ConfigError, RunConfig, dump
from cluster.iteration import IterationRecord
from cluster.run_folder import CONFIG, ENVIRONMENT, write_json
from rollout.trajectory import read_group

PACKAGES = ("torch", "ray", "diffusers", "transformers", "deepspeed", "pyarrow", "peft", "numpy")
CHECKPOINTS = "checkpoints"
TRAJECTORIES = "trajectories"
WEIGHTS = "weights"


def open_folder(config: RunConfig) -> tuple[Path, bool]:
    """Choose and prepare the run folder; True when it already holds this run, to be continued.

    Raises ConfigError when the folder can't be written, or holds a run that may not be continued.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(config.run.dir or f"runs/{config.run.name}/{stamp}").absolute()
    _check_writable(folder)
    if not (folder / CONFIG).exists():
        return folder, False
    if config.run.resume == "never":
        raise ConfigError(
            f"run.dir = {str(folder)!r} already holds a run; continue it with `flowcredit resume {folder}` "
            "(or run.resume=auto), or choose another run.dir"
        )
    return folder, True


def _check_writable(folder: Path) -> None:
    probe = folder / f".writable.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run.dir = {str(folder)!r} can't be written: {error}; choose another run.dir"
        ) from error


def write_start(folder: Path, config: RunConfig) -> None:
    """Write the resolved config and what the run ran on."""
    (folder / CONFIG).write_text(dump(config))
    write_json(
        folder / ENVIRONMENT,
        {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "packages": {name: version(name) for name in PACKAGES},
            "command": sys.argv[1:],
            "config_digest": config_digest(config),
        },
    )


def config_digest(config: RunConfig) -> str:
    """Return a digest of everything that decides a run's numbers: all tables but where and how long it runs."""
    table = config.model_dump(
        exclude={"run": {"dir", "resume", "num_iterations", "keep_checkpoints"}}
    )
    return hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=16).hexdigest()


def metrics_row(record: IterationRecord, policy_lag: int, elapsed_s: float) -> dict[str, Any]:
    """Return the line that metrics.jsonl holds for one iteration (docs/formats.md)."""
    learned, sampled = record.learner_stats, record.rollout_stats
    groups = [read_group(batch) for batch in record.batches]
    finals = np.concatenate([group.rewards[:, -1] for group in groups])
    parts = {
        name: np.concatenate([g.parts[name][:, -1] for g in groups]) for name in groups[0].parts
    }
    return {
        "iteration": record.iteration,
        "policy_version": groups[0].policy_version,
        "policy_lag": policy_lag,
        "elapsed_s": elapsed_s,
        "counts": {
            "images": sampled.num_images,
            "transitions": sampled.num_transitions,
            "network_calls": sampled.num_network_calls + learned.num_network_calls,
            "reward_calls": record.num_scored,
            "dropped_groups": record.num_dropped,
            "reward_failures": record.failures,
        },
        "seconds": record.seconds,
        "worker_seconds": {
            name.removesuffix("_s"): getattr(sampled, name)
            for name in ("encode_s", "sample_s", "estimate_s", "decode_s", "record_s")
        },
        "learner_seconds": learned.seconds,
        "push_s": record.push_s,
        "weight_bytes": record.weight_bytes,
        "images_per_s": sampled.num_images / record.seconds["total"],
        "reward": {
            "mean": float(finals.mean()),
            "std": float(finals.std()),
            "parts": {name: float(values.mean()) for name, values in parts.items()},
        },
        "gain_per_step": learned.gain_per_step,
        "abs_advantage_per_step": learned.abs_advantage_per_step,
        "zero_variance_frac": learned.zero_variance_frac,
        "loss": learned.loss,
        "kl": learned.kl,
        "clipped_frac": learned.clipped_frac,
        "max_abs_log_ratio": learned.max_abs_log_ratio,
        "grad_norm": float(np.mean(learned.grad_norm)),
    }
