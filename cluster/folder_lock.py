"""One driver a run folder: a lock in the folder, which the kernel gives back however the driver ends. No ray.

Two drivers on one Ray cluster also meet at the run's name (`cluster.actors_control`); this is for those that have a
cluster of their own each. A run at a URL has no lock, since an object store has none.
"""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.config import ConfigError
from cluster.remote_path import Place

log = logging.getLogger(__name__)

LOCK = ".driver"
"""The lock's file; it says who has it."""
LOCK_WAIT_S = 90.0
"""How long a file server may keep the lock of a driver whose node is gone."""


@contextmanager
def locked(where: Place, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Keep other drivers out of a local run folder while the block lasts; it must exist.

    Raises ConfigError when another driver still has it after `wait_s`. Where the file system has no locks, that is
    said, and nobody is kept out.
    """
    if not isinstance(where, Path):
        yield
        return
    with (where / LOCK).open("a+", encoding="utf-8") as file:
        if _take(file.fileno(), where, wait_s):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


def _take(descriptor: int, where: Path, wait_s: float) -> bool:
    """Take the lock; False where there are none."""
    deadline = time.monotonic() + wait_s
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = (where / LOCK).read_text(encoding="utf-8") or "another driver"
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"run.dir = {str(where)!r} is in use by {owner}; stop it first, or choose another run.dir"
                ) from error
            if not waited:
                log.warning("%s is in use by %s; waiting up to %g s", where, owner, wait_s)
            waited = True
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
        except OSError as error:
            log.warning("%s has no locks (%s): see that one driver has it at a time", where, error)
            return False
        else:
            return True
