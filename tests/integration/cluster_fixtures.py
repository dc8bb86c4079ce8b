"""Ray clusters apart from the session's, for tests that need several nodes, an autoscaler or the job server.

Each lives in processes of its own, under a temporary home with a token of its own, on ports outside 10002-19999,
which are Ray's workers'. Whatever a cluster starts, however deep, inherits a mark in its environment; at the end
whoever bears it is ended. Never `ray stop`: that ends every Ray of the machine.

    python -m tests.integration.cluster_fixtures host NODES                 keeps a ray.cluster_utils.Cluster
    python -m tests.integration.cluster_fixtures train NOTES CLI_WORDS...   trains, and notes what its actors did
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import psutil
import ray

from cluster import actors_backend, cli, training_run
from cluster.actors_backend import RayBackend
from cluster.config import RunConfig
from cluster.run_folder import METRICS
from rollout.records import SliceRequest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MARK = "FLOWCREDIT_TEST_CLUSTER"
STORE_BYTES = 128 * 2**20
OF_A_CLUSTER = ("ADDRESS", "AUTH", "JOB", "TMPDIR", "NAMESPACE")
"""What names of Ray's variables hold that say which cluster, or how to get in."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A running cluster, and how to reach it."""

    address: str
    """Of the control plane, host:port."""
    dashboard: str
    """http://host:port of the job server and the state API."""
    env: dict[str, str]
    """For every command that shall reach it; holds the mark and the way to the token."""

    def run(
        self, *words: str, cwd: Path = ROOT, timeout_s: float = 200.0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; "ray" and "python" are this environment's."""
        return subprocess.run(
            [_own(words[0]), *words[1:]],
            cwd=cwd,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """All that a command wrote, in one line."""
    return " ".join((done.stdout + done.stderr).split())


def _own(program: str) -> str:
    return sys.executable if program == "python" else str(BIN / program)


# ----------------------------------------------------------------------------------- starting, ending


@contextmanager
def own_environment() -> Iterator[dict[str, str]]:
    """The environment of a new cluster: a home with a token, a mark. Whoever bears the mark is ended afterwards."""
    # A Unix socket's path is at most 107 bytes long, and pytest's tmp_path is too long for that.
    home = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    env = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("RAY_") and any(word in name for word in OF_A_CLUSTER))
    }
    env |= {
        "HOME": home,
        "RAY_TMPDIR": home,
        "RAY_AUTH_MODE": "token",
        "PATH": os.pathsep.join([str(BIN), env.get("PATH", os.defpath)]),
        MARK: home,
    }
    try:
        make_token = [_own("ray"), "get-auth-token", "--generate"]
        subprocess.run(make_token, env=env, check=True, capture_output=True, timeout=60)
        yield env
    finally:
        end_marked(home)
        shutil.rmtree(home, ignore_errors=True)


def end_marked(mark: str) -> None:
    """SIGKILL every process that inherited the mark, until there is none; also what they start meanwhile."""
    for _ in range(20):
        left = [process for process in psutil.process_iter() if _bears(process, mark)]
        if not left:
            return
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=5)
    raise AssertionError(f"still alive: {[process.pid for process in left]}")


def _bears(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark and process.pid != os.getpid()
    except (psutil.Error, OSError):  # it ended just now, or it is somebody else's
        return False


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different, none of the range that Ray gives its workers."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    assert not any(10_002 <= port <= 19_999 for port in ports), ports
    return ports


@contextmanager
def head_node(
    resources: dict[str, float],
    autoscaling: Callable[[str], dict[str, Any]] | None = None,
    **more_env: str,
) -> Iterator[LocalCluster]:
    """`ray start --head` with a dashboard on loopback and these resources, CPU among them.

    `autoscaling` makes the autoscaler's config of the control plane's address. A variable of `more_env` that is given
    as "" is taken out of the environment.
    """
    custom = {name: amount for name, amount in resources.items() if name != "CPU"}
    port, dashboard, agent, client = free_ports(4)
    address = f"{ray.util.get_node_ip_address()}:{port}"
    with own_environment() as env:
        env = {name: value for name, value in (env | more_env).items() if value}
        words = ["start", "--head", f"--port={port}", f"--ray-client-server-port={client}"]
        words += ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
        words += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
        words += ["--min-worker-port=0", "--max-worker-port=0"]  # 0: where the system has room
        words += [f"--num-cpus={resources['CPU']:g}", "--num-gpus=0"]
        words += [f"--resources={json.dumps(custom)}", f"--object-store-memory={STORE_BYTES}"]
        if autoscaling is not None:
            file = Path(env["HOME"]) / "autoscaling.json"
            file.write_text(json.dumps(autoscaling(address)))
            words.append(f"--autoscaling-config={file}")
        url = f"http://127.0.0.1:{dashboard}"
        cluster = LocalCluster(address=address, dashboard=url, env=env)
        started = cluster.run("ray", *words)
        assert started.returncode == 0, said(started)
        yield cluster


@contextmanager
def several_nodes(nodes: Sequence[dict[str, Any]]) -> Iterator[LocalCluster]:
    """A `ray.cluster_utils.Cluster` of these nodes, the first one its head, in a process of its own.

    Apart, because its end would reset parts of a Ray that this process is connected to.
    """
    words = [sys.executable, "-m", __name__, "host", json.dumps(list(nodes))]
    with own_environment() as env:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(words, cwd=ROOT, env=env, text=True, **pipes) as host:
            try:
                assert host.stdin is not None
                assert host.stdout is not None
                line = next((line for line in host.stdout if line.startswith("{")), None)
                assert line is not None, "the cluster did not start; its log is above"
                yield LocalCluster(**json.loads(line), env=env)
            finally:
                host.kill()  # its nodes die with it


def host(nodes: list[dict[str, Any]]) -> None:
    """Start the nodes, say where, and keep them until stdin ends."""
    from ray.cluster_utils import Cluster

    dashboard, agent = free_ports(2)
    head = {"dashboard_port": dashboard, "dashboard_agent_listen_port": agent}
    cluster = Cluster()
    for number, node in enumerate(nodes):
        place = {"include_dashboard": True, **head} if number == 0 else {}
        cluster.add_node(object_store_memory=STORE_BYTES, **place, **node)
    cluster.wait_for_nodes()
    where = {"address": cluster.address, "dashboard": f"http://127.0.0.1:{dashboard}"}
    print(json.dumps(where), flush=True)
    sys.stdin.read()


# ----------------------------------------------------------------------------------- runs to watch


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that another process may be writing; none if it is not there yet."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A run in a process of its own."""

    process: subprocess.Popen[Any]
    folder: Path
    """The run's."""
    notes: Path
    """JSON lines of what its actors were asked for and answered: see NotingBackend."""
    log: Path

    def wait_for(self, found: Callable[[], T], timeout_s: float = 150.0) -> T:
        """Poll until `found` gives something true; AssertionError with the log if the driver ends before."""
        deadline = time.monotonic() + timeout_s
        while not (seen := found()):
            ended = self.process.poll()
            assert ended is None, f"the driver ended with {ended}:\n{self.text}"
            assert time.monotonic() < deadline, f"nothing for {timeout_s:g} s:\n{self.text}"
            time.sleep(0.2)
        return seen

    @property
    def text(self) -> str:
        """The end of what the driver wrote to its terminal."""
        return self.log.read_text(errors="replace")[-6000:]

    @property
    def events(self) -> list[dict[str, Any]]:
        """What was noted so far."""
        return json_lines(self.notes)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far."""
        return json_lines(self.folder / METRICS)

    def stop(self) -> int:
        """SIGTERM, and wait for a stop in good order; return the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=120)


@contextmanager
def driver(
    folder: Path, address: str, env: dict[str, str], config: str, settings: Sequence[str]
) -> Iterator[Driver]:
    """Train as a config says on the cluster at `address`, in another process; `folder` is for notes and log.

    `settings` name the run folder as run.dir = folder / "run".
    """
    made = {"folder": folder / "run", "notes": folder / "notes.jsonl", "log": folder / "driver.log"}
    words = [sys.executable, "-m", __name__, "train", str(made["notes"])]
    words += ["train", config, *settings, "--address", address]
    with made["log"].open("wb") as log:
        pipes: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
        with subprocess.Popen(
            words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, **pipes
        ) as made_by:
            try:
                yield Driver(process=made_by, **made)
            finally:
                made_by.kill()  # Ray ends its actors


class NotingBackend(RayBackend):
    """Notes, one JSON object a line, in the order in which things happened here:

    ready: an actor has started (node, pid, accelerators)        removed: one is ended
    published: the learner's weights (version, checksum)         proof: what a worker read back of them
    sample: a worker is given slices [[group, first], ...]       sampled: it has answered      score: a server is asked
    """

    notes: ClassVar[Path]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asked: dict[Any, dict[str, Any]] = {}

    def _note(self, event: str, **facts: Any) -> None:
        with self.notes.open("a") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")

    def _ask(self, future: Any, event: str, **facts: Any) -> Any:
        """Have the future's answer noted."""
        self._asked[future] = {"event": event, **facts}
        return future

    def result(self, future: Any) -> Any:
        asked = self._asked.pop(future, None)
        answer = super().result(future)
        if asked is not None:
            keys = ("node", "pid", "accelerators", "version", "checksum")
            facts = (
                answer if isinstance(answer, dict) else {k: getattr(answer, k, None) for k in keys}
            )
            self._note(
                asked.pop("event"),
                **asked,
                **{key: facts[key] for key in keys if facts.get(key) is not None},
            )
        return answer

    def add_worker(self, worker: int) -> Any:
        return self._ask(super().add_worker(worker), "ready", part="worker", worker=worker)

    def remove_worker(self, worker: int) -> None:
        self._note("removed", part="worker", worker=worker)
        super().remove_worker(worker)

    def add_replica(self, reward: str, replica: int) -> Any:
        return self._ask(
            super().add_replica(reward, replica), "ready", part="reward", replica=replica
        )

    def remove_replica(self, reward: str, replica: int) -> None:
        self._note("removed", part="reward", replica=replica)
        super().remove_replica(reward, replica)

    def start_learner(self) -> Any:
        return self._ask(super().start_learner(), "ready", part="learner")

    def weights(self, kind: str) -> Any:
        return self._ask(super().weights(kind), "published", kind=kind)

    def load_weights(self, worker: int, version: int, tensors: Any) -> Any:
        return self._ask(super().load_weights(worker, version, tensors), "proof", worker=worker)

    def sample(self, worker: int, requests: Sequence[SliceRequest]) -> Any:
        slices = [[request.group.group_id, request.first] for request in requests]
        version = requests[0].group.policy_version
        self._note("sample", worker=worker, version=version, slices=slices)
        return self._ask(super().sample(worker, requests), "sampled", worker=worker)

    def score(self, reward: str, replica: int, previews: Any, request: SliceRequest | None) -> Any:
        self._note("score", replica=replica)
        return super().score(reward, replica, previews, request)


class OnTheCpu:
    """An actor class whose actors take GPUs in Ray's books and compute on the CPU: a fake GPU is only a number."""

    def __init__(self, actor_class: Any) -> None:
        self.actor_class = actor_class

    def options(self, **options: Any) -> SimpleNamespace:
        made = self.actor_class.options(**options)
        return SimpleNamespace(remote=lambda config, *rest: made.remote(self._blind(config), *rest))

    @staticmethod
    def _blind(config: RunConfig) -> RunConfig:
        workers = config.rollout.model_copy(update={"gpus_per_worker": 0.0})
        ranks = config.learner.model_copy(update={"gpus_per_rank": 0.0})
        return config.model_copy(update={"rollout": workers, "learner": ranks})


def train_noting(notes: Path, words: list[str]) -> int:
    """`flowcredit WORDS` with actors of no real GPU, and notes of what they do."""
    for name in ("RolloutActor", "LearnerActor"):
        setattr(actors_backend, name, OnTheCpu(getattr(actors_backend, name)))
    NotingBackend.notes = notes
    training_run.RayBackend = NotingBackend
    return cli.main(words)


if __name__ == "__main__":
    task, *rest = sys.argv[1:]
    if task == "host":
        host(json.loads(rest[0]))
    else:
        assert task == "train", task
        sys.exit(train_noting(Path(rest[0]), rest[1:]))
