"""`flowcredit train` and `resume`: open the folder, join the cluster, run to the end or to a stop in good order."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from cluster.actors_cluster import check_nodes, connect
from cluster.actors_control import claimed
from cluster.config import ConfigError, RunConfig, load, user_mistakes
from cluster.events import Events, StopRequested
from cluster.folder_lock import locked
from cluster.folder_probe import token_in
from cluster.open_run import chosen_folder, control_name, open_folder
from cluster.remote_folder import fetched
from cluster.remote_path import Place, place_at
from cluster.run_folder import CONFIG
from cluster.training_run import TrainingRun


class Stopped(Exception):
    """The run was asked to stop, and did; `resume` continues it."""

    def __init__(self, folder: Place, iteration: int, signal_number: int):
        super().__init__(
            f"stopped after iteration {iteration}; `flowcredit resume {folder}` continues"
        )
        self.exit_code = 128 + signal_number


def train(config: RunConfig, address: str | None = None) -> tuple[Place, dict[str, Any]]:
    """Train as the config says, or continue what its folder holds; return the folder and the summary.

    Nothing in the folder is touched before this driver alone has it: neither on this machine (`locked`) nor on the
    Ray cluster (`claimed`) may another one be at work there.

    Raises ConfigError for what the user can mend, Stopped after SIGTERM or Ctrl-C; anything else is a failure of the
    run.
    """
    with user_mistakes():
        where = chosen_folder(config)
    with locked(where):
        with user_mistakes():
            connect(config, address)
        with claimed(control_name(where)) as control:
            return where, _train(config, where, control)


def _train(config: RunConfig, where: Place, control: Any) -> dict[str, Any]:
    with user_mistakes():
        place, continued = open_folder(where, config)
    try:
        with user_mistakes():
            run = TrainingRun(config, place, continued)
        with token_in(where) as token:
            with user_mistakes():
                check_nodes(run.config, str(where), token)
            return _run(run, control, token)
    finally:
        place.close()


def _run(run: TrainingRun, control: Any, token: str) -> dict[str, Any]:
    """Drive the run to its end, or to a stop in good order; return the summary."""
    where = run.place.where
    with run.progress:
        run.progress.note(f"run folder: {where}")
        if not run.continued:
            run.begin()
        try:
            run.open(control=control, token=token)
            with stopped_by_signals(run.fleet.events) as received:
                try:
                    with user_mistakes():
                        run.start()
                    return run.go()
                except StopRequested:
                    run.stop()
                    raise Stopped(where, run.consumed, received[0]) from None
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
    folder: Path | str, overrides: list[str], address: str | None = None
) -> tuple[Place, dict[str, Any]]:
    """Continue the run in `folder`, a path or URL, from its last checkpoint."""
    where = place_at(str(folder))
    if not (where / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run: {CONFIG} is missing")
    again = [f'run.dir="{where}"', 'run.resume="auto"']
    with fetched(where / CONFIG) as path:
        config = load(path, [*overrides, *again])
    return train(config, address)
