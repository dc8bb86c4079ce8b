"""Starting the learner: again when it is lost while it starts, and not in silence when the cluster has no room."""

import logging
from collections.abc import Callable
from typing import Any

from cluster.backend import Backend, PartLost
from cluster.config import FaultsConfig
from cluster.events import Events

log = logging.getLogger(__name__)

SAY_EVERY_S = 60.0


class RunGivenUp(RuntimeError):
    """The learner was lost again and again at the same place."""


def start_learner(
    events: Events, backend: Backend, faults: FaultsConfig, note: Callable[[str], None]
) -> list[Any]:
    """Start the learner; the list has its facts as soon as it is there.

    One that is lost while it starts, or is not there after faults.start_timeout_s, is started again, after a pause: Ray
    may take a dead node for a live one for a while, and place it there. RunGivenUp after losses_in_a_row.
    """
    started: list[Any] = []
    num_lost, began = 0, events.now

    def begin() -> None:
        future = backend.start_learner()
        events.expect(future, started.append, again, timeout_s=faults.start_timeout_s)

    def again(lost: PartLost) -> None:
        nonlocal num_lost
        num_lost += 1
        log.warning("the learner is lost while it starts: %s", lost.reason)
        if num_lost == faults.losses_in_a_row:
            raise RunGivenUp(
                f"the learner was lost {num_lost} times while it started; the last time: {lost}"
            ) from lost
        events.after(faults.pause_s(num_lost), begin)

    def say() -> None:
        if not started:
            waited = events.now - began
            note(
                f"the learner is not ready after {waited:.0f} s; `ray status` says whether it waits for room"
            )
            events.after(SAY_EVERY_S, say, background=True)

    begin()
    events.after(SAY_EVERY_S, say, background=True)
    return started
