"""A run folder in an object store: who writes what there, in which order, and what is copied where.

    driver                     staging folder  --push-->  URL/config.toml, metrics.jsonl, evaluation/, ...
    learner rank 0, its node   scratch folder  --upload-> URL/checkpoints/step_000040/, weights/
    every rank, its node       scratch folder  <-download- a checkpoint that is to be loaded

An object store can neither append nor rename, so:

- The driver pushes what changed when a look at the held-out prompts has ended, before every checkpoint, and at the
  end. So whatever checkpoint a crash leaves, the metrics that belong to it are there already.
- A checkpoint's manifest is uploaded last and makes it whole, and is removed first.
- The URL is the run; a staging folder is new and empty at every start, filled from the URL, and goes away at the end.

Staging and scratch folders are `flowcredit-*` in the temporary directory (TMPDIR). A local run folder needs none of
this: what is written is there, and `push` does nothing.
"""

import logging
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster.remote_path import Place, RemotePath, place_at
from cluster.run_folder import CHECKPOINTS, CONFIG, SUMMARY, TRAJECTORIES, WEIGHTS
from learner.manifest import MANIFEST

log = logging.getLogger(__name__)

PREFIX = "flowcredit-"
NOT_STAGED = (CHECKPOINTS, TRAJECTORIES, WEIGHTS, "nonfinite_version_")
"""Beginnings of paths that a driver that continues a run does not need."""


@dataclass(slots=True)
class RunPlace:
    """Where a run is kept, and where its driver reads and writes it; the same unless it is kept at a URL."""

    where: Place
    folder: Path
    _pushed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What the store has: relative path -> (mtime in ns, bytes) of the staged file."""

    @staticmethod
    def at(where: Place) -> "RunPlace":
        """Return the place with an empty staging folder, if it needs one."""
        folder = where if isinstance(where, Path) else Path(tempfile.mkdtemp(prefix=PREFIX))
        return RunPlace(where, folder)

    def pull(self) -> None:
        """Fill the staging folder with what a driver needs to continue the run."""
        if isinstance(self.where, Path):
            return
        for name in self.where.files():
            if not name.startswith(NOT_STAGED):
                (self.where / name).download(self.folder / name)
                self._pushed[name] = _signature(self.folder / name)

    def push(self) -> None:
        """Make the store hold what the staging folder holds: remove what went away, upload what changed.

        summary.json, which says that the run has ended, comes last. Trajectories, which nobody reads here, are moved.
        """
        if isinstance(self.where, Path):
            return
        staged = {name: _signature(self.folder / name) for name in _files(self.folder)}
        for name in self._pushed.keys() - staged.keys():
            (self.where / name).unlink(missing_ok=True)
            del self._pushed[name]
        for name in sorted(staged, key=lambda name: (name == SUMMARY, name)):
            if self._pushed.get(name) == staged[name]:
                continue
            (self.where / name).upload(self.folder / name)
            if name.startswith(TRAJECTORIES):
                (self.folder / name).unlink()
            else:
                self._pushed[name] = staged[name]

    def close(self) -> None:
        """Push what is left and remove the staging folder; keep it, and say where it is, when that fails."""
        if isinstance(self.where, Path):
            return
        try:
            self.push()
        except Exception as error:  # supervision boundary: the run's own error must not be hidden
            log.error("%s lacks what lies in %s, which stays: %s", self.where, self.folder, error)
        else:
            shutil.rmtree(self.folder)


@contextmanager
def written(folder: str) -> Iterator[str]:
    """Give a local folder to write the contents of `folder` into: itself, or a scratch folder that is uploaded
    when the block ends, a manifest last, and removed."""
    where = place_at(folder)
    if isinstance(where, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=PREFIX) as scratch:
        local = Path(scratch) / where.name
        yield str(local)
        upload(local, where)


def scratch_name() -> str:
    """Return the path of a scratch folder that is yet to be made."""
    return str(Path(tempfile.gettempdir()) / f"{PREFIX}{uuid.uuid4().hex}")


def move(local: Path, url: str) -> None:
    """Upload all files below `local`, if there is such a folder, and remove it."""
    upload(local, RemotePath(url))
    shutil.rmtree(local, ignore_errors=True)


@contextmanager
def fetched(place: Place) -> Iterator[Path]:
    """Give a local copy of a file or folder while the block lasts: itself, or a download."""
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory(prefix=PREFIX) as scratch:
        local = Path(scratch) / place.name
        download(place, local)
        yield local


def upload(local: Path, where: RemotePath) -> None:
    """Upload all files below `local`, which may not exist; a manifest that is there already goes first, the new one
    comes last, so that no manifest ever stands beside files that are not its own."""
    names = _files(local)
    if MANIFEST in names:
        (where / MANIFEST).unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
        (where / name).upload(local / name)


def download(where: RemotePath, local: Path) -> None:
    """Download a file, or all files below a folder."""
    if where.is_file():
        where.download(local)
        return
    for name in where.files():
        (where / name).download(local / name)


@contextmanager
def run_fetched(where: RemotePath) -> Iterator[Path]:
    """Give a local path that `evaluate` and `sample` take for what the URL names: a run with its newest whole
    checkpoint, or one of its checkpoints. Whether it is either is for them to say.
    """
    from learner.checkpoint import latest

    is_checkpoint = (where / MANIFEST).is_file()
    run = where.parent.parent if is_checkpoint else where
    checkpoint = where if is_checkpoint else latest(where / CHECKPOINTS)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as scratch:
        local = Path(scratch) / run.name
        local.mkdir()
        if (run / CONFIG).is_file():
            (run / CONFIG).download(local / CONFIG)
        if checkpoint is not None:
            download(checkpoint, local / CHECKPOINTS / checkpoint.name)
        yield local / CHECKPOINTS / where.name if is_checkpoint else local


def _files(folder: Path) -> list[str]:
    """Relative paths of all files below, but for hidden ones, which are being written; [] for no folder."""
    return [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    ]


def _signature(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
