"""Follows a metrics.jsonl while it grows."""

import json
from pathlib import Path


class History:
    """What the file said when it was last looked at; a line without its end is not there yet."""

    def __init__(self, path: Path):
        self.path = path
        self.num_lines = 0
        """Lines since the beginning, iterations written again included."""
        self.newest = 0
        """The latest iteration that ever ended."""
        self._read_bytes = 0

    def look(self) -> "History":
        """Read what was added. A run that began anew has removed its file: then only `newest` is forgotten."""
        content = self.path.read_bytes() if self.path.exists() else b""
        if len(content) < self._read_bytes:
            self._read_bytes, self.newest = 0, 0
        whole, end, _ = content[self._read_bytes :].rpartition(b"\n")
        self._read_bytes += len(whole) + len(end)
        for line in whole.splitlines():
            self.num_lines += 1
            self.newest = max(self.newest, json.loads(line)["iteration"])
        return self
