"""Prompts from a JSONL file, by index, in a seeded order that changes each epoch."""

import json
from codecs import BOM_UTF8
from hashlib import blake2b
from pathlib import Path
from typing import Any


class PromptSource:
    """Prompts by group index: group i gets the (i mod n)-th prompt of epoch (i div n)'s order.

    The order is a function of (seed, epoch) alone, so `at` is random access and a run needs no
    state of it. Example line:
    {"prompt": "a photo of two red circles", "tag": "counting", "include": [...]}
    """

    def __init__(self, path: str | Path, shuffle: bool = True, seed: int = 0) -> None:
        """Read the whole file, UTF-8 with or without a byte order mark; ValueError when it is
        missing, empty, or has a malformed line (with its number)."""
        self._shuffle, self._seed = shuffle, seed
        self._lines = _read(Path(path))
        self._order: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        """Number of prompts in the file, one epoch."""
        return len(self._lines)

    def at(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return (prompt, its line's other fields) of group `index` >= 0; IndexError when it is
        negative."""
        if index < 0:
            raise IndexError(f"prompt index {index} is negative")
        epoch, place = divmod(index, len(self))
        if self._shuffle:
            if self._order[0] != epoch:
                self._order = (epoch, self._shuffled(epoch))
            place = self._order[1][place]
        prompt, metadata = self._lines[place]
        return prompt, dict(metadata)

    def _shuffled(self, epoch: int) -> list[int]:
        """Order by a hash of (seed, epoch, line), which no library's version can change."""

        def key(line: int) -> bytes:
            return blake2b(f"{self._seed}|{epoch}|{line}".encode(), digest_size=16).digest()

        return sorted(range(len(self)), key=key)


def _read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the (prompt, metadata) of every line that isn't blank."""
    if not path.is_file():
        raise ValueError(f"prompt file {path} does not exist; give a JSONL file")
    content = path.read_bytes().removeprefix(BOM_UTF8)
    lines = [
        _parse(path, number, line)
        for number, line in enumerate(content.split(b"\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise ValueError(f"prompt file {path} is empty; it needs one JSON object a line")
    return lines


def _parse(path: Path, number: int, content: bytes) -> tuple[str, dict[str, Any]]:
    try:
        line = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: byte {content[error.start]:#04x} at column {error.start + 1} "
            f"isn't UTF-8 ({error.reason}): {content[:80]!r}"
        ) from None
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error.msg}): {line[:80]!r}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}, line {number}: a JSON object is wanted, not {line[:80]!r}")
    prompt = fields.pop("prompt", None)
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(
            f'{path}, line {number}: no "prompt" (a text that isn\'t empty): {line[:80]!r}'
        )
    return prompt, fields
