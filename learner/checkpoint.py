"""Checkpoints that hold no pickle, appear whole or not at all, and open under any number of ranks
and ZeRO stage.

    <dir>/step_000020/
        weights.safetensors     trainable tensors, float32
        optimizer.safetensors   "exp_avg.<name>", "exp_avg_sq.<name>", float32
        ema.safetensors         averaged weights; only with learner.ema_decay > 0
        manifest.json           format_version, files {name: blake2b}, policy_version,
                                optimizer_step, identity, config_digest,
                                state (the caller's: prompt cursor, counters, ...)

A checkpoint is written to a hidden folder beside its place, every file flushed to disk, then
renamed; so a folder that has the final name was whole when it was written. `latest` still reads it
back and checks, since disks lie.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT_VERSION = 1
MANIFEST, WEIGHTS, OPTIMIZER, EMA = (
    "manifest.json",
    "weights.safetensors",
    "optimizer.safetensors",
    "ema.safetensors",
)
FIELDS = ("policy_version", "optimizer_step", "identity", "config_digest", "state")
"""What a manifest holds beside its format and files."""
NAME = re.compile(r"step_\d{6,}")
LEFTOVER = re.compile(r"\.step_\d{6,}\.(\d+)\.(partial|old)")
"""The hidden folders of a save under way; the number is the saving process."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


class CheckpointError(ValueError):
    """A folder that isn't a whole checkpoint of ours, or not one of this learner."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """AdamW's state by parameter name, whole, float32 on the CPU; the same under any ZeRO stage."""

    step: int
    """Optimizer steps taken."""
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a learner needs to go on as if it had never stopped."""

    weights: Mapping[str, Tensor]
    optimizer: OptimizerState
    ema: Mapping[str, Tensor] | None
    policy_version: int
    identity: dict[str, Any]
    """What must be equal for the tensors to mean the same: adapter, rank, alpha."""
    config_digest: str
    """Of the configuration that wrote it; for people, not checked."""
    state: dict[str, Any] = field(default_factory=dict)
    """The caller's; JSON."""


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write `folder`, replacing one of that name. TypeError when `state` is no JSON; OSError when
    it can't be written."""
    state = json.dumps(checkpoint.state, allow_nan=False)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    moments = {
        f"{key}.{name}": tensor
        for key in MOMENTS
        for name, tensor in getattr(checkpoint.optimizer, key).items()
    }
    files: dict[str, Mapping[str, Tensor]] = {WEIGHTS: checkpoint.weights, OPTIMIZER: moments}
    if checkpoint.ema is not None:
        files[EMA] = checkpoint.ema
    for name, tensors in files.items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, aside / name)
    manifest = {
        "format_version": FORMAT_VERSION,
        "files": {name: _digest(aside / name) for name in files},
        "policy_version": checkpoint.policy_version,
        "optimizer_step": checkpoint.optimizer.step,
        "identity": checkpoint.identity,
        "config_digest": checkpoint.config_digest,
        "state": json.loads(state),
    }
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in [*aside.iterdir(), aside]:
        _flush(path)
    _put_in_place(aside, folder)


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint, every file checked against the manifest. CheckpointError says what is
    wrong."""
    manifest = check(folder)
    try:
        weights, moments = load_file(folder / WEIGHTS), load_file(folder / OPTIMIZER)
        ema = load_file(folder / EMA) if EMA in manifest["files"] else None
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    split = {
        key: {
            name.removeprefix(f"{key}."): t
            for name, t in moments.items()
            if name.startswith(f"{key}.")
        }
        for key in MOMENTS
    }
    return Checkpoint(
        weights=weights,
        optimizer=OptimizerState(manifest["optimizer_step"], **split),
        ema=ema,
        policy_version=manifest["policy_version"],
        identity=manifest["identity"],
        config_digest=manifest["config_digest"],
        state=manifest["state"],
    )


def check(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files are all there and unchanged; CheckpointError
    otherwise."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format_version"], manifest.get("files", {})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has checkpoint format {version}, this code reads format {FORMAT_VERSION}"
        )
    for name in {WEIGHTS, OPTIMIZER, *files}:
        if name not in files or not (folder / name).is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing")
        if _digest(folder / name) != files[name]:
            raise CheckpointError(
                f"{folder} is damaged: the checksum of {name} is not the manifest's"
            )
    lacking = [name for name in FIELDS if name not in manifest]
    if lacking:
        raise CheckpointError(f"{path} is damaged: it has no {', '.join(lacking)}")
    return manifest


def latest(directory: Path) -> Path | None:
    """Return the newest whole checkpoint under `directory`, None if there is none; warns of damaged
    ones it passes."""
    for folder in _newest_first(directory):
        try:
            check(folder)
        except CheckpointError as error:
            warnings.warn(f"passing over a checkpoint: {error}", stacklevel=2)
            continue
        return folder
    return None


def prune(directory: Path, keep: int) -> list[Path]:
    """Remove all checkpoints but the newest `keep`, damaged or not, and return what was removed.
    ValueError: keep < 1.

    Sweeps, too, what killed processes left of their saves; that of a process which lives (on this
    machine) stays. Not for calls during a save by another machine.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep} must be >= 1")
    removed = _newest_first(directory)[keep:]
    for folder in removed:
        shutil.rmtree(folder)
    for folder in directory.glob(".step_*"):
        leftover = LEFTOVER.fullmatch(folder.name)
        if leftover and not _is_alive(int(leftover[1])):
            shutil.rmtree(folder, ignore_errors=True)
    return removed


def _is_alive(process: int) -> bool:
    """Whether this machine runs a process of that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _newest_first(directory: Path) -> list[Path]:
    found = [
        path for path in directory.glob("step_*") if path.is_dir() and NAME.fullmatch(path.name)
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def _put_in_place(aside: Path, folder: Path) -> None:
    """Rename; what bore the name before goes away only after the new one has it."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.rename(folder, old)
    os.rename(aside, folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    """Have the file or folder on disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
