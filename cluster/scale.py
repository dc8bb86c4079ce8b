"""`flowcredit scale`: ask a running run, found by its folder, for other numbers of actors."""

from typing import Any

from rich.table import Table

from cluster.actors_control import ask_run
from cluster.backend import ScaleCommand
from cluster.config import ConfigError, RunConfig, load
from cluster.open_run import control_name
from cluster.remote_folder import fetched
from cluster.remote_path import place_at
from cluster.run_folder import CONFIG


def scale(
    run: str,
    rollout_workers: int | None,
    reward: str | None,
    replicas: int | None,
    address: str | None,
) -> dict[str, Any]:
    """Send the numbers to a run, by path or URL; return how it stood when it took them. ConfigError on a mistake."""
    where = place_at(run)
    if not (where / CONFIG).is_file():
        raise ConfigError(f"{run} holds no run: {CONFIG} is missing")
    with fetched(where / CONFIG) as path:
        config = load(path)
    command = ScaleCommand(
        rollout_workers=_checked_workers(config, rollout_workers),
        replicas=_checked_replicas(config, reward, replicas),
    )
    if command == ScaleCommand():
        raise ConfigError(
            "nothing to change: give --rollout-workers N, or --reward NAME --replicas N"
        )
    return ask_run(control_name(where), command, address)


def _checked_workers(config: RunConfig, wanted: int | None) -> int | None:
    bounds = config.rollout.workers
    if wanted is not None and not bounds.min <= wanted <= bounds.max:
        raise ConfigError(
            f"--rollout-workers {wanted} is outside rollout.workers = {{min = {bounds.min}, max = {bounds.max}}}"
        )
    return wanted


def _checked_replicas(
    config: RunConfig, reward: str | None, replicas: int | None
) -> dict[str, int] | None:
    if reward is None and replicas is None:
        return None
    if reward is None or replicas is None:
        raise ConfigError("--reward NAME and --replicas N belong together")
    if reward not in config.reward_names:
        raise ConfigError(f"--reward {reward}: the run has {', '.join(config.reward_names)}")
    if replicas < 1:
        raise ConfigError(f"--replicas {replicas} must be at least 1")
    return {reward: replicas}


def status_table(status: dict[str, Any]) -> Table:
    """Return how the run stood when it took the command."""
    table = Table(
        "part", "wanted before", "ready", title="The run took the command", title_justify="left"
    )
    workers = status["rollout_workers"]
    table.add_row("rollout workers", str(workers["target"]), str(workers["ready"]))
    for name, servers in status["reward_servers"].items():
        table.add_row(f"servers of reward {name}", str(servers["target"]), str(servers["ready"]))
    return table
