"""A checkpoint's manifest: what it must hold, and whether the folder's files are those that it names.

Reads local folders and, through `StoredPath`, folders in an object store, without copying them. The
format is described in `learner.checkpoint`. Imports no torch.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, Self

FORMAT_VERSION = 1
MANIFEST, WEIGHTS, OPTIMIZER, EMA = (
    "manifest.json",
    "weights.safetensors",
    "optimizer.safetensors",
    "ema.safetensors",
)
FIELDS = ("policy_version", "optimizer_step", "identity", "config_digest", "state")
"""What a manifest holds beside its format and files."""


class CheckpointError(ValueError):
    """A folder that isn't a whole checkpoint of ours, or not one of this learner."""


class StoredPath(Protocol):
    """A file or folder of an object store, asked like a pathlib.Path (`cluster.remote_path`)."""

    @property
    def name(self) -> str: ...
    def __truediv__(self, name: str, /) -> Self: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def exists(self) -> bool: ...
    def glob(self, pattern: str, /) -> Iterable[Self]: ...
    def open(self, mode: Literal["rb"], /) -> BinaryIO: ...
    def read_text(self, encoding: str = ...) -> str: ...
    def unlink(self, missing_ok: bool = ...) -> None: ...
    def rmtree(self) -> None: ...


Place = Path | StoredPath


def check(folder: Place) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files are all there and unchanged; CheckpointError
    otherwise."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, manifest["files"])
    return manifest


def version_file(version: int) -> str:
    """Name of the file that holds an older version of the weights."""
    return f"version_{version:06d}.safetensors"


def read_manifest(folder: Place) -> dict[str, Any]:
    """The manifest, itself unchanged; with fields that older code didn't write. CheckpointError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format_version"], dict(manifest.get("files", {}))
        kept = {version_file(number) for number in manifest.setdefault("kept_versions", [])}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has checkpoint format {version}, this code reads format {FORMAT_VERSION}"
        )
    lacking = [name for name in FIELDS if name not in manifest]
    if lacking:
        raise CheckpointError(f"{path} is damaged: it has no {', '.join(lacking)}")
    unlisted = sorted({WEIGHTS, OPTIMIZER, *kept} - files.keys())
    if unlisted:
        raise CheckpointError(f"{folder} is damaged: {unlisted[0]} is missing")
    if manifest.get("digest", manifest_digest(manifest)) != manifest_digest(manifest):
        raise CheckpointError(f"{path} is damaged: its checksum is not its own")
    return manifest


def check_files(folder: Place, manifest: Mapping[str, Any], names: Iterable[str]) -> None:
    """CheckpointError unless the files of these names are those that the manifest speaks of."""
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing")
        if digest(folder / name) != manifest["files"][name]:
            raise CheckpointError(
                f"{folder} is damaged: the checksum of {name} is not the manifest's"
            )


def digest(path: Place) -> str:
    """Return the checksum of a file's content."""
    found = blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            found.update(chunk)
    return found.hexdigest()


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the checksum of all fields but `digest` itself."""
    body = {key: value for key, value in manifest.items() if key != "digest"}
    return blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
