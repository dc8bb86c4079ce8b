"""Files and folders in an object store, asked like a pathlib.Path; the only door to fsspec.

Listings are read anew at each question: other processes write to the same place.
"""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

from cluster.config import ConfigError

PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")
"""user:password@host."""


class RemotePath:
    """One file or folder at a URL. Errors of the store's own driver pass through as they are."""

    def __init__(self, url: str):
        """Raises ConfigError for a URL that fsspec can't open, naming the package that is missing."""
        self.url = _checked(url)
        import fsspec  # a tenth of a second, which runs in local folders need not pay

        protocol = url.partition("://")[0]
        # Folders of a store come into being with their files; a local disk, in tests, must be told.
        options: dict[str, Any] = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        try:
            self._store, path = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url!r} can't be opened on this node: {error}") from error
        self._path = path.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.url.rpartition("/")[0])

    @property
    def _fresh(self) -> Any:
        """The store, its remembered listings forgotten."""
        self._store.invalidate_cache()
        return self._store

    def is_file(self) -> bool:
        return self._fresh.isfile(self._path)

    def is_dir(self) -> bool:
        return self._fresh.isdir(self._path)

    def exists(self) -> bool:
        return self._fresh.exists(self._path)

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """The files and folders right below whose name fits; none where there is no such folder."""
        try:
            paths = self._fresh.ls(self._path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in sorted({path.rstrip("/").rpartition("/")[2] for path in paths}):
            if fnmatchcase(name, pattern):
                yield self / name

    def files(self) -> list[str]:
        """Paths of all files below, relative to this folder, at any depth."""
        found = self._fresh.find(self._path)
        return sorted(path[len(self._path) + 1 :] for path in found if path != self._path)

    def open(self, mode: str = "rb") -> BinaryIO:
        return self._store.open(self._path, mode)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self._store.cat_file(self._path).decode(encoding)

    def write_text(self, text: str) -> None:
        self._store.pipe_file(self._path, text.encode())

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._fresh.rm(self._path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmtree(self) -> None:
        """Remove the folder and all below."""
        if self.exists():
            self._store.rm(self._path, recursive=True)

    def upload(self, local: Path) -> None:
        """Write a local file here; a store shows the old content or the new, nothing in between."""
        self._store.put_file(str(local), self._path)

    def download(self, local: Path) -> None:
        """Copy this file to a local one."""
        local.parent.mkdir(parents=True, exist_ok=True)
        self._store.get_file(self._path, str(local))


Place = Path | RemotePath


def place_at(text: str) -> Place:
    """Return the absolute path, or the place of an object store, that a user named. ConfigError."""
    return RemotePath(text) if is_url(text) else Path(text).absolute()


def is_url(text: str) -> bool:
    """Whether `text` names a place in an object store, such as s3://bucket/runs/mine."""
    return "://" in text


def _checked(url: str) -> str:
    if PASSWORD.search(url):  # it would stand in config.toml and in every log
        raise ConfigError(
            f"the {url.partition('://')[0]} URL holds a password; give credentials as the driver's "
            "environment variables, on every node"
        )
    if "::" in url:
        raise ConfigError(f"{url!r}: a chain of URLs (::) is not supported; give a plain one")
    if not url.partition("://")[2].strip("/"):
        raise ConfigError(f"{url!r} names no folder; write it like s3://bucket/runs/mine")
    return url.rstrip("/")
