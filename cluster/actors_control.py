"""A run's control actor: its name on the Ray cluster, which one driver has at a time, and how others ask it."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError

from cluster.actors import ControlActor
from cluster.backend import ScaleCommand
from cluster.config import ConfigError

log = logging.getLogger(__name__)

NAMESPACE = "flowcredit"
"""Ray namespace of the named control actors."""
NAME_TAKEN_S = 90.0
"""How long a run's name may still be taken by a driver that has ended: Ray notices a lost node after about a minute."""


@contextmanager
def claimed(name: str) -> Iterator[Any]:
    """Have the run's name, and give its control actor, while the block lasts.

    A driver does this before it touches the run folder. ConfigError when another driver keeps the name.
    """
    control = _make_control(name)
    try:
        yield control
    finally:
        ray.kill(control)


def _make_control(name: str) -> Any:
    """Start the control actor; one of that name, of a driver that was killed just now, gets time to go away."""
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 100}
    deadline = time.monotonic() + NAME_TAKEN_S
    waited = False
    while True:
        try:
            return ControlActor.options(name=name, namespace=NAMESPACE, **options).remote()
        except ActorAlreadyExistsError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"another driver on this cluster has the same run folder ({name}); stop it first, or choose "
                    "another run.dir"
                ) from error
        if not waited:
            log.warning(
                "another driver has %s; waiting up to %g s for it to end", name, NAME_TAKEN_S
            )
        waited = True
        time.sleep(1.0)


def ask_run(name: str, command: ScaleCommand, address: str | None) -> dict[str, Any]:
    """Pass a command to the control actor called `name`; return the run's status. ConfigError when there is none."""
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ConfigError(
                f"no Ray cluster found ({error}); run this on one of its nodes, or give --address"
            ) from error
    try:
        control = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        raise ConfigError(
            f"no {name} is going on in the Ray cluster at {address}; is the folder the one it was started with?"
        ) from error
    status: Any = ray.get(control.command.remote(command), timeout=60)
    return status
