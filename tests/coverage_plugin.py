"""Keeps the coverage of code that runs in Ray workers (named in pyproject.toml, tool.coverage.run).

A Ray worker ends by a SIGKILL-like exit unless it was asked to terminate, so nothing of what
coverage saves at exit would be left. Here each worker saves while it runs. Coverage starts in
a worker through its own .pth file and `patch = ["subprocess"]`; workers find this module
because tests/conftest.py puts the repository's root on PYTHONPATH.

Not measured on Python 3.11: methods of actors with max_concurrency > 1 that are not async,
since those run in threads that C++ made. Use an async actor, or a thread pool inside it.
"""

import sys
import threading
import time

from coverage import Coverage
from coverage.types import TPluginConfig

SAVE_INTERVAL_S = 1.0
"""Each saving takes some 10 ms of a core in every process."""


def _save_while_running() -> None:
    while True:
        time.sleep(SAVE_INTERVAL_S)
        measurement = Coverage.current()
        if measurement is not None:
            measurement.save()


def coverage_init(_registry: object, _options: TPluginConfig) -> None:
    """Called by coverage in every process that it measures."""
    if any("default_worker.py" in argument for argument in sys.orig_argv):
        threading.Thread(target=_save_while_running, name="coverage-save", daemon=True).start()
