"""`flowcredit train` and `resume`: open the folder, join the cluster, run to the end or to a stop in good order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from cluster.actors_cluster import connect
from cluster.config import ConfigError, RunConfig, load, user_mistakes
from cluster.events import Events, StopRequested
from cluster.open_run import open_folder, write_start
from cluster.run_folder import CONFIG
from cluster.training_run import TrainingRun


class Stopped(Exception):
    """The run was asked to stop, and did; `resume` continues it."""

    def __init__(self, folder: Path, iteration: int, signal_number: int):
        super().__init__(
            f"stopped after iteration {iteration}; `flowcredit resume {folder}` continues"
        )
        self.exit_code = 128 + signal_number


def train(config: RunConfig, address: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Train as the config says, or continue what its folder holds; return the folder and the summary.

    Raises ConfigError for what the user can mend, Stopped after SIGTERM or Ctrl-C; anything else is a failure of the
    run.
    """
    with user_mistakes():
        folder, continued = open_folder(config)
        run = TrainingRun(config, folder, continued)
        connect(run.config, address)
    write_start(folder, run.config)
    with run.progress:
        run.progress.note(f"run folder: {folder}")
        try:
            run.open()
            with stopped_by_signals(run.fleet.events) as received:
                try:
                    with user_mistakes():
                        run.start()
                    return folder, run.go()
                except StopRequested:
                    run.stop()
                    raise Stopped(folder, run.consumed, received[0]) from None
        finally:
            run.close()


@contextmanager
def stopped_by_signals(events: Events) -> Iterator[list[int]]:
    """Have the first SIGTERM or SIGINT stop the loop in good order, a second one at once; yields what came."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        events.stop_requested = True

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resume(
    folder: Path, overrides: list[str], address: str | None = None
) -> tuple[Path, dict[str, Any]]:
    """Continue the run in `folder` from its last checkpoint."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run: {CONFIG} is missing")
    again = [f'run.dir="{folder}"', 'run.resume="auto"']
    return train(load(folder / CONFIG, [*overrides, *again]), address)
