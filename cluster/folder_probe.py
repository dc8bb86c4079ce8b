"""Whether another process, on another node, sees the run folder that the driver sees. No ray.

The driver leaves a token in the folder while the run goes on; whoever will use the folder looks for that very token.
The token's file has a new name each time, so that no network file system answers from what it remembers.
"""

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.remote_path import Place, place_at

TOKEN = ".token-"
PROBE = ".writable-"


@contextmanager
def token_in(where: Place) -> Iterator[str]:
    """Leave a token in the run folder while the block lasts, and give it."""
    for left in where.glob(f"{TOKEN}*"):  # by a driver that was killed
        left.unlink(missing_ok=True)
    token = uuid.uuid4().hex
    (where / f"{TOKEN}{token}").write_text(token)
    try:
        yield token
    finally:
        (where / f"{TOKEN}{token}").unlink(missing_ok=True)


def complaint(folder: str, token: str, write: bool) -> str | None:
    """Return what is wrong with the run folder as this process sees it; None when all is well.

    write: it must be possible to write there, too.
    """
    try:
        where = place_at(folder)
        if not (where / f"{TOKEN}{token}").is_file():
            if where.is_dir():
                return "there is such a folder, but it is another one than the driver's: its token is missing"
            return "there is no such folder"
        seen = (where / f"{TOKEN}{token}").read_text(encoding="utf-8")
        if seen != token:
            return f"the driver's token reads {seen[:40]!r} there"
        if write:
            check_writable(where)
    except Exception as error:  # supervision boundary: drivers have errors of their own
        return f"{type(error).__name__}: {error}"
    return None


def check_writable(where: Place) -> None:
    """Write a file and remove it; whatever the disk or the object store raises."""
    probe = where / f"{PROBE}{socket.gethostname()}-{os.getpid()}"
    probe.write_text("")
    probe.unlink()


def node_name(node_id: str, address: str) -> str:
    """Return how messages name a node."""
    return f"node {node_id} ({address})"


def refusal(folder: str, complaints: dict[str, str]) -> str:
    """Return the message for nodes that can't use the run folder: node -> its complaint."""
    lines = "\n".join(f"  {node}: {text}" for node, text in complaints.items())
    return (
        f"run.dir = {folder!r} can't be used on every node that may hold a learner rank:\n{lines}\n"
        "choose a folder that all of them share (NFS, for example) or a URL such as s3://bucket/run whose driver and "
        "credentials they have, or keep the ranks to other nodes with learner.resources"
    )
