"""Checkpoints that hold no pickle, appear whole or not at all, and open under any number of ranks
and ZeRO stage.

    <dir>/step_000020/
        weights.safetensors     trainable tensors, float32
        optimizer.safetensors   "exp_avg.<name>", "exp_avg_sq.<name>", float32
        ema.safetensors         averaged weights; only with learner.ema_decay > 0
        version_000018.safetensors, version_000019.safetensors
                                older published weights, each in the dtypes that the rollout holds;
                                only with run.max_policy_lag > 0
        manifest.json           format_version, files {name: blake2b}, policy_version,
                                kept_versions [..], optimizer_step, identity, config_digest,
                                state (the caller's: prompt cursor, counters, ...), digest

A checkpoint is written to a hidden folder beside its place, every file flushed to disk, then
renamed; so a folder that has the final name was whole when it was written. `latest` still reads it
back and checks, since disks lie.

An object store can't rename. There the files are uploaded one by one, the manifest last
(`cluster.remote_folder`): a folder without a manifest is an upload that did not end. `latest`,
`names` and `prune` read and clean such places too; `save` and `load` need a local folder.
"""

import json
import os
import platform
import re
import shutil
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.manifest import (
    EMA,
    FORMAT_VERSION,
    MANIFEST,
    OPTIMIZER,
    WEIGHTS,
    CheckpointError,
    Place,
    check,
    check_files,
    digest,
    manifest_digest,
    read_manifest,
    version_file,
)

NAME = re.compile(r"step_\d{6,}")
LEFTOVER = re.compile(
    r"\.(?P<place>step_(?P<number>\d{6,}))\.(?P<process>\d+)@(?P<host>.*)\.(?P<kind>partial|old)"
)
"""The hidden folders of a save under way: the new checkpoint, and what it replaces."""
STALE_S = 3600.0
"""A hidden folder of another machine is taken for abandoned when nothing in it changed for so long."""
OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How safetensors, which raises no OSError, ends the text of one."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""
P = TypeVar("P", bound=Place)
"""A local folder, or one in an object store."""


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


def save(
    folder: Path, checkpoint: Checkpoint, kept: Mapping[int, Mapping[str, Tensor]] | None = None
) -> None:
    """Write `folder`, replacing one of that name.

    kept: older versions of the weights, by policy version, on the CPU, as they were published.
    Raises ValueError when one isn't older or has other names than the weights, TypeError or
    ValueError when `state` is no JSON, and OSError when it can't be written, on a full disk for
    example; then nothing of it stays, and what bore the name before still does.
    """
    kept = {} if kept is None else kept
    _check_kept(checkpoint, kept)
    state = json.loads(json.dumps(checkpoint.state, allow_nan=False))
    aside = _beside(folder, "partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _write(aside, checkpoint, kept, state)
        _put_in_place(aside, folder)
    except OSError as error:
        error.add_note(f"while writing checkpoint {folder}; those before it are as they were")
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # not there any more if all went well


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint, every file checked against the manifest. CheckpointError says what is
    wrong."""
    manifest = check(folder)
    moments = _load_file(folder / OPTIMIZER)
    split = {
        key: {
            name.removeprefix(f"{key}."): t
            for name, t in moments.items()
            if name.startswith(f"{key}.")
        }
        for key in MOMENTS
    }
    return Checkpoint(
        weights=_load_file(folder / WEIGHTS),
        optimizer=OptimizerState(manifest["optimizer_step"], **split),
        ema=_load_file(folder / EMA) if EMA in manifest["files"] else None,
        policy_version=manifest["policy_version"],
        identity=manifest["identity"],
        config_digest=manifest["config_digest"],
        state=manifest["state"],
    )


def load_kept(folder: Path) -> dict[int, dict[str, Tensor]]:
    """Read the older versions of the weights that a checkpoint holds, by policy version, ascending;
    {} if none. Their files are checked against the manifest; CheckpointError."""
    manifest = read_manifest(folder)
    names = {version: version_file(version) for version in manifest["kept_versions"]}
    check_files(folder, manifest, names.values())
    return {version: _load_file(folder / name) for version, name in names.items()}


def latest(directory: P) -> P | None:
    """Return the newest whole checkpoint under `directory`, None if there is none; warns of damaged
    ones it passes.

    One that a save had just moved aside when it was killed is found there, under its hidden name:
    read it, but don't take its name apart (`described` tells people what it is).
    """
    for folder in sorted(_candidates(directory), key=_number, reverse=True):
        try:
            check(folder)
        except CheckpointError as error:
            warnings.warn(f"passing over a checkpoint: {error}", stacklevel=2)
            continue
        return folder
    return None


def names(directory: Place) -> list[str]:
    """Return the names of all checkpoints under `directory` that were whole once, damaged or not, oldest
    first; an upload that did not end was not."""
    found = [
        folder
        for folder in _candidates(directory)
        if isinstance(folder, Path) or (folder / MANIFEST).is_file()
    ]
    return [f"step_{number:06d}" for number in sorted(_number(folder) for folder in found)]


def described(folder: Place) -> str:
    """Return what to call a checkpoint in a message."""
    hidden = LEFTOVER.fullmatch(folder.name)
    if hidden is None or not isinstance(folder, Path):
        return str(folder)
    return f"{folder.with_name(hidden['place'])} (found as {folder.name}, where a save that was killed left it)"


def prune(directory: P, keep: int, spare: Collection[str] = ()) -> list[P]:
    """Remove all checkpoints but the newest `keep` and those named in `spare` ("step_000040"),
    damaged or not, and return what was removed. ValueError: keep < 1, or `spare` holds no names.

    Sweeps, too, what killed processes left of their saves; that of a process which lives stays (on
    another machine: whose files changed within STALE_S), so this may run beside a save.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep} must be >= 1")
    strangers = [name for name in spare if not NAME.fullmatch(name)]
    if strangers:
        raise ValueError(f"spare = {spare!r}: {strangers[0]!r} is no name such as 'step_000040'")
    if isinstance(directory, Path):
        _sweep(directory)
    newest_first = sorted(_finished(directory), key=_number, reverse=True)
    removed = [folder for folder in newest_first[keep:] if folder.name not in spare]
    for folder in removed:
        _remove(folder)
    return removed


def _remove(folder: Place) -> None:
    """The manifest first, so that what is left of it after an interruption is no checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        folder.rmtree()


def _check_kept(checkpoint: Checkpoint, kept: Mapping[int, Mapping[str, Tensor]]) -> None:
    for version, tensors in kept.items():
        if not 0 <= version < checkpoint.policy_version:
            raise ValueError(
                f"kept version {version} is not older than the checkpoint's own "
                f"({checkpoint.policy_version}), which needs no keeping"
            )
        if tensors.keys() != checkpoint.weights.keys():
            different = sorted(tensors.keys() ^ checkpoint.weights.keys())
            raise ValueError(f"kept version {version} has other tensors: {different[:5]}")


def _write(
    aside: Path, checkpoint: Checkpoint, kept: Mapping[int, Mapping[str, Tensor]], state: Any
) -> None:
    """Fill the folder `aside` and have it all on disk."""
    moments = {
        f"{key}.{name}": tensor
        for key in MOMENTS
        for name, tensor in getattr(checkpoint.optimizer, key).items()
    }
    files: dict[str, Mapping[str, Tensor]] = {WEIGHTS: checkpoint.weights, OPTIMIZER: moments}
    if checkpoint.ema is not None:
        files[EMA] = checkpoint.ema
    files |= {version_file(version): tensors for version, tensors in kept.items()}
    for name, tensors in files.items():
        _save_file(tensors, aside / name)
    manifest = {
        "format_version": FORMAT_VERSION,
        "files": {name: digest(aside / name) for name in files},
        "policy_version": checkpoint.policy_version,
        "kept_versions": sorted(kept),
        "optimizer_step": checkpoint.optimizer.step,
        "identity": checkpoint.identity,
        "config_digest": checkpoint.config_digest,
        "state": state,
    }
    manifest["digest"] = manifest_digest(manifest)
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in [*aside.iterdir(), aside]:
        _flush(path)


def _save_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors; what the system refuses is an OSError, as from Python's own files."""
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    except SafetensorError as error:
        found = OS_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def _load_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _candidates(directory: P) -> list[P]:
    """Folders that may be whole checkpoints."""
    if not isinstance(directory, Path):
        return _finished(directory)
    aside = [path for path, _ in _moved_aside(directory)]
    return [*_finished(directory), *cast("list[P]", aside)]


def _finished(directory: P) -> list[P]:
    """Folders that bear a checkpoint's name."""
    return [p for p in directory.glob("step_*") if p.is_dir() and NAME.fullmatch(p.name)]


def _leftovers(directory: Path) -> list[tuple[Path, re.Match[str]]]:
    """Hidden folders of saves, dead or under way, with what their names say."""
    found = [(path, LEFTOVER.fullmatch(path.name)) for path in directory.glob(".step_*")]
    return [(path, match) for path, match in found if match]


def _moved_aside(directory: Path) -> list[tuple[Path, re.Match[str]]]:
    """Checkpoints that were being replaced, when the new one had not got their name yet."""
    return [
        (path, match)
        for path, match in _leftovers(directory)
        if match["kind"] == "old" and not (directory / match["place"]).exists()
    ]


def _number(folder: Place) -> int:
    """40 of step_000040, hidden or not."""
    leftover = LEFTOVER.fullmatch(folder.name)
    return int(leftover["number"] if leftover else folder.name.removeprefix("step_"))


def _sweep(directory: Path) -> None:
    """Remove what dead processes left; what they were replacing gets its name back first."""
    for path, match in _moved_aside(directory):
        if _is_abandoned(path, match):
            os.rename(path, directory / match["place"])
    for path, match in _leftovers(directory):
        if _is_abandoned(path, match):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(folder: Path, match: re.Match[str]) -> bool:
    """Whether nobody works on a hidden folder any more."""
    if match["host"] == platform.node():
        return not _is_alive(int(match["process"]))
    try:
        changed = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
    except FileNotFoundError:  # it got its name just now
        return False
    return time.time() - changed > STALE_S


def _is_alive(process: int) -> bool:
    """Whether this machine runs a process of that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _beside(folder: Path, kind: str) -> Path:
    """The hidden folder of this process's save; its name matches LEFTOVER."""
    return folder.with_name(f".{folder.name}.{os.getpid()}@{platform.node()}.{kind}")


def _put_in_place(aside: Path, folder: Path) -> None:
    """Rename; what bore the name before goes away only after the new one has it."""
    old = _beside(folder, "old")
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
