"""Several raylets on one machine, a node for each pool, and the processes on them: found and killed by pid.

    head (control plane, driver)    rollout (2 workers)    reward (servers)    learner (ranks)

Only descendants of our own raylets are looked at, whatever else runs on this machine.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

import psutil

TITLES = {
    "worker": "ray::RolloutActor",
    "replica": "ray::RewardActor",
    "rank": "ray::LearnerActor",
}
POOLS = ("rollout", "reward", "learner")
SLOTS = 4
"""Actors of its pool that a node has room for."""
STORE_BYTES = 80 * 2**20
HEALTH = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
"""Ray's own notice a lost node after half a minute. Looser than they could be: two cores are busy, and a node that
answers late must not be called dead."""


class Machines(Protocol):
    """Where a run's parts live; a test stands other processes in their place."""

    def driver(self, words: list[str], log: Path) -> "subprocess.Popen[bytes]":
        """Start `flowcredit train` with these words."""
        ...

    def parts(self) -> dict[str, list[int]]:
        """Kind (worker, replica, rank) -> pids of its live processes."""
        ...

    def nodes(self) -> dict[str, list[int]]:
        """Name of each node but the head -> pids of all its processes."""
        ...

    def replace_node(self, name: str) -> None:
        """Clear away what is left of a node that was killed, and start another one in its place."""
        ...


class RayMachines:
    """A context: a Ray cluster of its own, token-protected, all ports chosen by the system."""

    def __enter__(self) -> "RayMachines":
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        from ray.cluster_utils import Cluster  # reads the environment when it is imported

        # A Unix socket's path is at most 107 bytes long.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "temp_dir": self._folder,
            "_system_config": HEALTH,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes = {name: self._start(name) for name in POOLS}
        return self

    def __exit__(self, *_: object) -> None:
        pids = [pid for tree in self.nodes().values() for pid in tree]
        self._cluster.shutdown()
        kill(pids)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, name: str) -> Any:
        return self._cluster.add_node(
            num_cpus=SLOTS, resources={name: SLOTS}, object_store_memory=STORE_BYTES
        )

    def driver(self, words: list[str], log: Path) -> "subprocess.Popen[bytes]":
        address = self._cluster.address
        assert address is not None, "the head is there"
        program = [sys.executable, "-m", "cluster", "train", *words, "--address", address]
        with log.open("ab") as file:
            return subprocess.Popen(program, stdout=file, stderr=file)

    def parts(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {kind: [] for kind in TITLES}
        for node in self._nodes.values():
            for process in family_of(_raylet(node)):
                words = words_of(process)
                for kind, title in TITLES.items():
                    if words and words[0].startswith(title):
                        found[kind].append(process.pid)
        return {kind: sorted(pids) for kind, pids in found.items()}

    def nodes(self) -> dict[str, list[int]]:
        return {
            name: [_raylet(node), *(process.pid for process in family_of(_raylet(node)))]
            for name, node in self._nodes.items()
        }

    def replace_node(self, name: str) -> None:
        self._cluster.remove_node(self._nodes[name], allow_graceful=False)
        self._nodes[name] = self._start(name)


def _raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def family_of(pid: int) -> list[psutil.Process]:
    """Return the live descendants of a process; none when it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def words_of(process: psutil.Process) -> list[str]:
    """Return the command line, [] when the process is gone."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to each that is there still."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it ended by itself, as a node's processes do when their raylet is gone
