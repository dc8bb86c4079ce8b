"""Pools of a cluster: where a run's actors land, what is said when they can't, and a node that comes later."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster_fixtures import (
    LocalCluster,
    driver,
    head_node,
    said,
    several_nodes,
)
from tests.integration.test_elastic import sleeping_settings

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REWARD = "benchmarks.sleeping:SleepingReward"
NODES: list[dict[str, Any]] = [
    {"num_cpus": 4, "num_gpus": 2, "resources": {"rollout": 2}},
    {"num_cpus": 2, "num_gpus": 1, "resources": {"reward": 1}},
    {"num_cpus": 2, "num_gpus": 1, "resources": {"learner": 1}},
]
POOLS = {"RolloutActor": "rollout", "RewardActor": "reward", "LearnerActor": "learner"}
"""Actor class -> the custom resource that configs/cluster.toml gives it."""


def settings(folder: Path, *more: str) -> list[str]:
    """configs/cluster.toml on a model that sleeps; its reward on a GPU as well."""
    reward = f'{{name="{REWARD}", resources={{reward=1}}, gpus=1}}'
    return sleeping_settings(
        folder, f"rewards.components=[{reward}]", "run.wait_for_nodes_s=0", *more
    )


def actors(cluster: LocalCluster) -> list[dict[str, Any]]:
    """What Ray's state API says of the live actors."""
    words = ["list", "actors", "--detail", "--format", "json", "--filter", "state=ALIVE"]
    listed = cluster.run("ray", *words, "--address", cluster.dashboard)
    assert listed.returncode == 0, said(listed)
    return [actor for actor in json.loads(listed.stdout) if actor["class_name"] in POOLS]


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[LocalCluster]:
    with several_nodes(NODES) as cluster:
        yield cluster


def test_every_actor_has_a_device_of_its_own_in_its_pool(three_nodes, tmp_path):
    words = settings(tmp_path)
    config = "configs/cluster.toml"
    with driver(tmp_path, three_nodes.address, three_nodes.env, config, words) as run:
        run.wait_for(lambda: run.rows)
        seen = {actor["pid"]: actor for actor in actors(three_nodes)}
        facts = {event["pid"]: event for event in run.events if event["event"] == "ready"}
        assert run.stop() == 143, run.text
    assert seen.keys() == facts.keys()
    assert sorted(actor["class_name"] for actor in seen.values()) == [
        "LearnerActor", "RewardActor", "RolloutActor", "RolloutActor",
    ]  # fmt: skip
    nodes: dict[str, set[str]] = {}
    devices: list[tuple[str, str]] = []
    for pid, actor in seen.items():
        pool = POOLS[actor["class_name"]]
        asked = actor["required_resources"]
        assert (asked["GPU"], asked[pool]) == (1, 1)
        assert not {"rollout", "reward", "learner"} - {pool} & asked.keys()
        assert actor["node_id"] == facts[pid]["node"]
        nodes.setdefault(pool, set()).add(actor["node_id"])
        devices += [(actor["node_id"], gpu) for gpu in facts[pid]["accelerators"]["GPU"]]
    assert [len(of_a_pool) for of_a_pool in nodes.values()] == [1, 1, 1]
    assert len(set.union(*nodes.values())) == 3
    assert len(devices) == len(set(devices)) == 4


def test_what_an_unplaceable_config_lacks_is_told_for_each_part(three_nodes, tmp_path):
    words = settings(tmp_path, "learner.gpus_per_rank=4", "rollout.resources={sampler=1}")
    command = ["-m", "cluster", "train", "configs/cluster.toml", *words]
    refused = three_nodes.run("python", *command, "--address", three_nodes.address)
    text = said(refused)
    assert refused.returncode == 2, text
    assert "learner ranks: one needs 4 GPU (learner.gpus_per_rank), the largest node has 2" in text
    assert "rollout workers: no node has the resource 'sampler' (rollout.resources.sampler)" in text
    assert "nodes offer CPU, GPU, " in text
    assert "reward benchmarks.sleeping" not in text, "that one fits"


COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)


def autoscaling(address: str) -> dict[str, Any]:
    """Of an autoscaler that may add one node with room for one rollout worker.

    What `ray.cluster_utils.AutoscalingCluster` writes from a file that Ray's wheel lacks; that class also begins and
    ends with `ray stop --force`, which would end the session's Ray and any other on this machine.
    """
    head = {"CPU": 4, "rollout": 1, "reward": 1, "learner": 1}
    store = {"object_store_memory": 128 * 2**20}
    return {
        "cluster_name": "fake_multinode",
        "max_workers": 1,
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": address,
        },
        "available_node_types": {
            "ray.head.default": {"resources": head, "node_config": {}, "max_workers": 0},
            "sampler": {
                "resources": {"CPU": 1, "rollout": 1, **store},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 1,
            },
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 30,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        **{key: [] for key in COMMANDS},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
    }


@pytest.mark.long
def test_a_pending_worker_starts_when_the_autoscaler_brings_a_node(tmp_path):
    """Two workers are wanted, the head has room for one: the run begins with it, and the other brings its node."""
    words = settings(
        tmp_path,
        "rollout.workers={start=2, min=1, max=2}",
        "rollout.gpus_per_worker=0",
        "learner.gpus_per_rank=0",
        f'rewards.components=[{{name="{REWARD}", resources={{reward=1}}}}]',
    )
    head = {"CPU": 4.0, "rollout": 1.0, "reward": 1.0, "learner": 1.0}
    fake = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    with head_node(head, autoscaling, **fake) as cluster:
        config = "configs/cluster.toml"
        with driver(tmp_path, cluster.address, cluster.env, config, words) as run:

            def both() -> list[dict[str, Any]]:
                rows = [row["parts"]["rollout_workers"] for row in run.rows]
                return rows if rows[-1:] == [{"target": 2, "ready": 2}] else []

            run.wait_for(both)
            ready = [e for e in run.events if e["event"] == "ready" and e["part"] == "worker"]
            assert len({event["node"] for event in ready}) == 2
            newcomer = ready[-1]["worker"]

            def worked() -> bool:
                return any(
                    event["event"] == "sampled" and event["worker"] == newcomer
                    for event in run.events
                )

            run.wait_for(worked)
            assert run.stop() == 143, run.text
