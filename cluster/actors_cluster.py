"""Joining a Ray cluster, or starting a local one; whether it has room for the run is `cluster.placement`'s to say."""

import logging
import os
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ConfigError, RunConfig
from cluster.folder_probe import complaint, node_name, refusal
from cluster.placement import missing, needs

LOOK_TIMEOUT_S = 120.0
"""A node that has not looked at the run folder after so long is taken for one that can't."""


def connect(config: RunConfig, address: str | None) -> None:
    """Join the cluster at `address` (or RAY_ADDRESS), or start a local one with slots enough for this config.

    On one machine the parts take turns more than they overlap, so slots may outnumber the cores. Raises ConfigError
    when the cluster has no room for what the run needs to begin, and gets none within run.wait_for_nodes_s.
    """
    if not ray.is_initialized():
        _connect(config, address)
    deadline = time.monotonic() + config.run.wait_for_nodes_s
    while lacking := missing(needs(config), _nodes()):
        if time.monotonic() >= deadline:
            raise ConfigError(
                "the Ray cluster has no room for this run:\n  " + "\n  ".join(lacking)
            )
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def check_nodes(config: RunConfig, run_dir: str, token: str) -> None:
    """Have every node that may hold a learner rank look for the driver's token in the run folder, and write there.

    Nobody but the driver and the ranks touches the folder (`cluster.actors`), so the nodes of a rollout pool may lack
    it. Which node gets which rank is not known yet, and changes in a roll-back: any that has the resources is asked.
    The driver's own is not, since the driver has just written there. A node that joins later is asked by the rank
    that is placed on it (`LearnerActor.start`). Raises ConfigError naming every node that can't use the folder.
    """
    (rank, *_) = needs(config)
    own = ray.get_runtime_context().get_node_id()
    asked = {
        _look_on(node["NodeID"]).remote(run_dir, token, True): node
        for node in ray.nodes()
        if node["Alive"]
        and node["NodeID"] != own
        and all(node["Resources"].get(name, 0) >= amount for name, amount in rank.resources.items())
    }
    if asked:
        ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_TIMEOUT_S)
    complaints = {
        node_name(node["NodeID"], node["NodeManagerAddress"]): seen
        for answer, node in asked.items()
        if (seen := _seen(answer)) is not None
    }
    if complaints:
        raise ConfigError(refusal(run_dir, complaints))


def _look_on(node_id: str) -> Any:
    """Return the remote function that looks at the run folder on that node, whatever is going on there."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(complaint).options(num_cpus=0, max_retries=0, scheduling_strategy=there)


def _seen(answer: Any) -> str | None:
    """Return what a node had to complain of."""
    try:
        return ray.get(answer, timeout=0)
    except GetTimeoutError:
        return f"no answer within {LOOK_TIMEOUT_S:g} s, as of a network file system that hangs"
    except RayError as error:
        return f"it could not be asked: {type(error).__name__}: {error}"


def _nodes() -> list[dict[str, float]]:
    """Return the total resources of each live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _connect(config: RunConfig, address: str | None) -> None:
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, log_to_driver=False)
        return
    # A cluster of this process's own, behind loopback: that tokens are on by default needs no warning.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(
        logging.ERROR
    )
    ray.init(
        address="local",
        num_cpus=max(_num_cpus(config), os.cpu_count() or 1),
        resources=_custom_resources(config) or None,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def _num_cpus(config: RunConfig) -> int:
    """Return the CPU slots of what the config starts."""
    return (
        config.rollout.workers.start * config.rollout.threads_per_worker
        + config.learner.num_ranks * config.learner.threads_per_rank
        + sum(reward.replicas * reward.threads for reward in config.rewards.components)
    )


def _custom_resources(config: RunConfig) -> dict[str, float]:
    """Return as much of every custom resource as the config starts with: one machine is every pool."""
    amounts: dict[str, float] = {}
    parts = [
        (config.rollout.workers.start, config.rollout.resources),
        (config.learner.num_ranks, config.learner.resources),
        *((reward.replicas, reward.resources) for reward in config.rewards.components),
    ]
    for count, resources in parts:
        for name, amount in resources.items():
            amounts[name] = amounts.get(name, 0.0) + count * amount
    return amounts
