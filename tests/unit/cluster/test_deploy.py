"""The files of cluster/deploy/: schemas, and that they agree with each other, with configs/cluster.toml and the docs.

A check takes a file's text and yields complaints. Each is also shown the shipped file with one thing broken, so
that none can pass by never looking. slurm.sh is run as well, with stand-ins for Slurm's commands and Ray's.
"""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.cli import build_parser
from cluster.config import RunConfig, load
from cluster.costs import iteration_costs, step_plan

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = "cluster/deploy"
LAUNCHER, CLUSTER, JOB, POLICY, SLURM, DOCKERFILE, README = (
    f"{DEPLOY}/{name}"
    for name in (
        "ray-cluster.yaml",
        "raycluster.yaml",
        "rayjob.yaml",
        "network-policy.yaml",
        "slurm.sh",
        "Dockerfile",
        "README.md",
    )
)
CONFIG = "configs/cluster.toml"
DOCS = ("docs/operations.md", "docs/security.md")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)
IMAGE = f"registry.example.com/flowcredit:{PYPROJECT['project']['version']}"
RAY_WORKER_PORTS = range(10002, 20000)
"""Ray's defaults of --min-worker-port and --max-worker-port."""
LEAST_STOP_WAIT_S = 60
"""`ray job stop` waits so long, or longer, before it kills: a checkpoint may be under way."""

Check = Callable[[str], Iterator[str]]


def text_of(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def shipped_config() -> RunConfig:
    return load(ROOT / CONFIG)


# what the files say, in one shape


def cluster_spec(text: str) -> dict[str, Any]:
    """The RayCluster's spec in a KubeRay manifest."""
    table = yaml.safe_load(text)
    return table["spec"]["rayClusterSpec"] if table["kind"] == "RayJob" else table["spec"]


def containers(text: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(group's name, pod spec, container) of every container in a KubeRay manifest."""
    spec = cluster_spec(text)
    groups = [("head", spec["headGroupSpec"])]
    groups += [(group["groupName"], group) for group in spec["workerGroupSpecs"]]
    for name, group in groups:
        pod = group["template"]["spec"]
        yield from ((name, pod, container) for container in pod["containers"])


def launcher(text: str) -> dict[str, Any]:
    """The launcher's table as Ray sees it: merged with Ray's defaults for the provider."""
    return prepare_config(yaml.safe_load(text))


def commands(table: dict[str, Any]) -> list[str]:
    return [line for key, lines in table.items() if key.endswith("_commands") for line in lines]


@dataclass(frozen=True)
class Node:
    """A kind of node: what one offers to Ray, and how many there are."""

    name: str
    offers: dict[str, float]
    least: int
    most: int


def nodes_of(text: str) -> list[Node]:
    """The nodes of a manifest, as Ray's autoscaler reads them; of slurm.sh, as its own run starts them."""
    if text.startswith("#!"):
        return slurm_nodes(text)
    table = yaml.safe_load(text)
    if "kind" in table:
        named = {"metadata": {"name": "a", "namespace": "b"}, "spec": cluster_spec(text)}
        table = autoscaling_config._derive_autoscaling_config_from_ray_cr(named)
    else:
        table = launcher(text)
    head = table["head_node_type"]
    return [
        Node(name, kind["resources"], 1, 1)
        if name == head
        else Node(name, kind["resources"], kind["min_workers"], kind["max_workers"])
        for name, kind in table["available_node_types"].items()
    ]


@dataclass(frozen=True)
class Pool:
    """The actors of one part: what each takes, and how many a run has."""

    name: str
    takes: dict[str, float]
    least: int
    start: int
    most: int


def pools(config: RunConfig) -> list[Pool]:
    rollout, learner = config.rollout, config.learner
    workers = rollout.workers
    found = [
        Pool(
            "rollout",
            {"CPU": rollout.threads_per_worker, "GPU": rollout.gpus_per_worker} | rollout.resources,
            workers.min,
            workers.start,
            workers.max,
        ),
        Pool(
            "learner",
            {"CPU": learner.threads_per_rank, "GPU": learner.gpus_per_rank} | learner.resources,
            *[learner.num_ranks] * 3,
        ),
    ]
    for reward in config.rewards.components:
        takes = {"CPU": reward.threads, "GPU": reward.gpus} | reward.resources
        found.append(Pool(f"reward {reward.name}", takes, *[reward.replicas] * 3))
    return found


def room(node: Node, pool: Pool) -> int:
    """How many of a pool's actors one node holds."""
    return min(
        int(node.offers.get(name, 0) // amount) for name, amount in pool.takes.items() if amount
    )


# checks


def ray_accepts_the_launchers_table(text: str) -> Iterator[str]:
    try:
        table = launcher(text)
        validate_config(table)
    except (jsonschema.ValidationError, ValueError, KeyError, AssertionError) as error:
        yield f"Ray refuses it: {error}"
        return
    asked = yaml.safe_load(text)
    for key in (key for key in table if key.endswith("_commands")):
        if key not in asked and table[key]:
            yield f"{key} is left to Ray's defaults: {table[key]}"
    for command in commands(table):
        run = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
        if run.returncode:
            yield f"{command!r}: {run.stderr}"


def kubernetes_fields_are_known(text: str) -> Iterator[str]:
    schema = json.loads((Path(__file__).parent / "kuberay_schema.json").read_text())
    table = yaml.safe_load(text)
    closed = schema | {"oneOf": [{"$ref": f"#/$defs/{table.get('kind')}"}]}
    if table.get("kind") not in schema["$defs"]:
        yield f"kind {table.get('kind')} is not in the schema"
        return
    for error in jsonschema.Draft202012Validator(closed).iter_errors(table):
        for part in error.context or [error]:
            yield f"{'.'.join(map(str, part.absolute_path))}: {part.message}"


def three_worker_groups(text: str) -> Iterator[str]:
    names = [group["groupName"] for group in cluster_spec(text)["workerGroupSpecs"]]
    if sorted(names) != ["learner", "reward", "rollout"]:
        yield f"worker groups {names}"
    for name, _, container in containers(text):
        resources = container["resources"]
        if resources["requests"] != resources["limits"]:
            yield f"{name}: requests are not the limits, which Ray takes for the node's size"


def nodes_offer_what_the_config_takes(text: str) -> Iterator[str]:
    nodes, wanted = nodes_of(text), pools(shipped_config())
    builtin = {"CPU", "GPU", "memory"}
    offered = {name for node in nodes for name in node.offers} - builtin
    taken = {name for pool in wanted for name in pool.takes} - builtin
    if offered != taken:
        yield f"nodes offer {sorted(offered)}, {CONFIG} takes {sorted(taken)}"
    elastic = any(node.least < node.most for node in nodes)
    for pool in wanted:
        at_first = sum(room(node, pool) * node.least for node in nodes)
        in_all = sum(room(node, pool) * node.most for node in nodes)
        if at_first < pool.least:
            yield f"{pool.name}: the first nodes hold {at_first}, a run begins with {pool.least}"
        if in_all < (pool.most if elastic else pool.start):
            yield f"{pool.name}: all nodes hold {in_all}, fewer than the config may ask for"
    for node in nodes:
        sharing = [pool.name for pool in wanted if room(node, pool)]
        if len(sharing) > 1:
            yield f"node {node.name} holds {' and '.join(sharing)}"


def one_image(text: str) -> Iterator[str]:
    found = re.findall(r"(?:image: |docker push |docker build .* -t )(\S+)", text)
    if not found:
        yield "names no image"
    yield from (f"image {name}, not {IMAGE}" for name in found if name != IMAGE)


def kubernetes_asks_for_the_token(text: str) -> Iterator[str]:
    options = cluster_spec(text).get("authOptions", {})
    if options.get("mode") != "token" or not options.get("secretName"):
        yield f"authOptions are {options}"
    for name, _, container in containers(text):
        variables = {variable["name"]: variable for variable in container.get("env", [])}
        if variables.get("RAY_AUTH_MODE", {}).get("value") != "token":
            yield f"{name}: RAY_AUTH_MODE is not token"
        source = variables.get("RAY_AUTH_TOKEN", {}).get("valueFrom", {}).get("secretKeyRef", {})
        if (source.get("name"), source.get("key")) != (options.get("secretName"), "auth_token"):
            yield f"{name}: RAY_AUTH_TOKEN is not the operator's secret"


def launcher_asks_for_the_token(text: str) -> Iterator[str]:
    table = launcher(text)
    starts = [command for command in commands(table) if "ray start" in command]
    if not starts:
        yield "starts no Ray"
    for command in starts:
        if not re.match(r"RAY_AUTH_MODE=token ray start ", command):
            yield f"without RAY_AUTH_MODE=token: {command}"
        if "--head" in command and "--dashboard-host=127.0.0.1" not in command:
            yield f"the dashboard listens beyond loopback: {command}"
    if "-e RAY_AUTH_MODE=token" not in table["docker"]["run_options"]:
        yield "the container is run without RAY_AUTH_MODE=token"
    home = dict(env_of(text_of(DOCKERFILE)))["HOME"]
    if table["file_mounts"].get(f"{home}/.ray/auth_token") != "~/.ray/auth_token":
        yield f"the token is not mounted where the image's Ray looks, under {home}"


def policy_opens_only_the_dashboard(text: str) -> Iterator[str]:
    """To our own pods everything, to others the one port that asks for the token."""
    spec = yaml.safe_load(text)["spec"]
    label = spec["podSelector"]["matchLabels"]
    if "Ingress" not in spec.get("policyTypes", []):
        yield "calls to the pods are not restricted"
    for rule in spec["ingress"]:
        ours = rule.get("from") == [{"podSelector": {"matchLabels": label}}]
        if not ours and [port.get("port") for port in rule.get("ports", [])] != [8265]:
            yield f"others may call: {rule}"
    for path in (CLUSTER, JOB):
        groups = [
            cluster_spec(text_of(path))["headGroupSpec"],
            *cluster_spec(text_of(path))["workerGroupSpecs"],
        ]
        if any(not label.items() <= group["template"]["metadata"]["labels"].items() for group in groups):  # fmt: skip
            yield f"{path} has pods that the policy does not select"


def job_stops_in_its_own_time(text: str) -> Iterator[str]:
    runtime_env = yaml.safe_load(yaml.safe_load(text)["spec"]["runtimeEnvYAML"])
    yield from short_stops([runtime_env])


def documented_jobs_stop_in_their_own_time(text: str) -> Iterator[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    runs = [line for line in lines if re.match(r"ray job submit .* -- .* train ", line)]
    if not runs:
        yield "submits no run"
    for line in runs:
        yield from short_stops(runtime_envs(shlex.split(line)))


def runtime_envs(words: list[str]) -> list[dict[str, Any]]:
    """The runtime_env of a `ray job submit` command line."""
    option = "--runtime-env-json="
    return [json.loads(word.removeprefix(option)) for word in words if word.startswith(option)]


def short_stops(found: list[dict[str, Any]]) -> Iterator[str]:
    values = [table.get("env_vars", {}).get("RAY_JOB_STOP_WAIT_TIME_S") for table in found]
    if len(values) != 1 or not isinstance(values[0], str) or int(values[0]) < LEAST_STOP_WAIT_S:
        yield f"RAY_JOB_STOP_WAIT_TIME_S is {values}: not a string, or short of {LEAST_STOP_WAIT_S}"


def job_runs_the_shipped_config(text: str) -> Iterator[str]:
    spec = yaml.safe_load(text)["spec"]
    program, *words = shlex.split(spec["entrypoint"].removeprefix("python -m "))
    arguments = build_parser().parse_args(words)
    if (program, arguments.command, str(arguments.config)) != ("cluster", "train", CONFIG):
        yield f"the job is {spec['entrypoint']!r}"
    uploaded = yaml.safe_load(spec["runtimeEnvYAML"]).get("working_dir")
    copied = [args for name, args in instructions(text_of(DOCKERFILE)) if name == "COPY"]
    if not any(args.endswith(f" . {uploaded}") for args in copied):
        yield f"the image has no code in {uploaded}"
    if cluster_spec(text) != cluster_spec(text_of(CLUSTER)):
        yield f"its cluster is not that of {CLUSTER}"


def ray_is_the_pinned_one(text: str) -> Iterator[str]:
    version = cluster_spec(text)["rayVersion"]
    if version != PINS["ray"]:
        yield f"rayVersion {version}, constraints.txt pins {PINS['ray']}"


def run_folder_is_shared_and_the_cache_is_not(text: str) -> Iterator[str]:
    """run.dir lies on a volume that all nodes mount, HF_HOME on one of the node's own."""
    run_dir, cache = shipped_config().run.dir or "", dict(env_of(text_of(DOCKERFILE)))["HF_HOME"]
    table = yaml.safe_load(text)
    places: list[tuple[str, dict[str, bool]]] = []  # who, mount path -> whether it is shared
    if "kind" in table:
        for name, pod, container in containers(text):
            shared = {v["name"]: "persistentVolumeClaim" in v for v in pod["volumes"]}
            mounts = container["volumeMounts"]
            places.append((name, {m["mountPath"]: shared[m["name"]] for m in mounts}))
            set_to = [v.get("value") for v in container["env"] if v["name"] == "HF_HOME"]
            if set_to != [cache]:
                yield f"{name}: HF_HOME is {set_to}, the image's is {cache}"
    else:
        options = " ".join(table["docker"]["run_options"])
        mounted = " ".join(table["initialization_commands"])
        found = re.findall(r"-v (\S+):(\S+)", options)
        places.append(("nodes", {path: f" {host};" in f"{mounted};" for host, path in found}))
    for name, mounts in places:
        for path, wanted in ((run_dir, True), (cache, False)):
            shared = [mounts[mount] for mount in mounts if Path(path).is_relative_to(mount)]
            if shared != [wanted]:
                yield f"{name}: {path} is on {'no' if not shared else 'the wrong'} volume: {mounts}"


PORT = re.compile(r"(?:port|PORT)[\"']?\s*[=:]\s*[\"']?(\d+)|[\w}]:(\d{4,5})\b")


def ports_keep_out_of_rays_range(text: str) -> Iterator[str]:
    ports = [int(port) for pair in re.findall(PORT, text) for port in pair if port]
    ports += [int(port) for port in re.findall(r"containerPort: (\d+)", text)]
    if not ports:
        yield "fixes no port: look again at the pattern"
    yield from (f"port {p} is one of Ray's workers'" for p in ports if p in RAY_WORKER_PORTS)


SECRET_SHAPES = re.compile(
    r"hf_\w{20,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16}|-----BEGIN|eyJ[\w-]{20,}|\b[0-9a-f]{32,}\b"
)
ASSIGNED = re.compile(r"\b(\w*(?:TOKEN|SECRET|PASSWORD|API_KEY))=(?![\"']?\$)[\"']?([^\s\"']+)")
LITERAL = re.compile(
    r"\b(\w*(?:token|secret|password|api_key))[\"']?\s*[:=]\s*[\"']([^$\"'{][^\"']*)", re.IGNORECASE
)


def no_secrets(text: str) -> Iterator[str]:
    yield from (f"looks like a secret: {found[:8]}..." for found in SECRET_SHAPES.findall(text))
    for pattern in (ASSIGNED, LITERAL):
        yield from (f"{name} is given a value" for name, _ in pattern.findall(text))
    for name, value in re.findall(r"name: (\w*(?:TOKEN|SECRET|PASSWORD|KEY)), value: (\S+)", text):
        yield f"{name} is given the value {value[:2]}..."


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions: (NAME, the rest with its lines joined)."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


def env_of(dockerfile: str) -> Iterator[tuple[str, str]]:
    for name, rest in instructions(dockerfile):
        if name == "ENV":
            for word in shlex.split(rest):
                key, _, value = word.partition("=")
                yield key, value


def image_holds_the_tested_set(text: str) -> Iterator[str]:
    steps = instructions(text)
    names = [name for name, _ in steps]
    base = re.fullmatch(r"python:(\d+)\.(\d+)-\S+", steps[names.index("FROM")][1])
    if not base or (int(base[1]), int(base[2])) < (3, 11):
        yield "the base image is no Python 3.11 or newer"
    installs = [args for name, args in steps if name == "RUN" and "pip install" in args]
    if len(installs) != 1:
        yield f"{len(installs)} steps install packages"
        return
    (install,) = installs
    before = " ".join(args for name, args in steps[: steps.index(("RUN", install))] if name == "COPY")  # fmt: skip
    if not {"pyproject.toml", "constraints.txt"} <= set(before.split()):
        yield "pyproject.toml and constraints.txt are not there when packages are installed"
    for command in re.findall(r"pip install (.*?)(?:&&|$)", install):
        if "constraints.txt" not in command:
            yield f"installs what constraints.txt does not pin: {command}"
    reader = re.search(r"python -c (\".*?\") > requirements.txt", install)
    if not reader or requirements(reader[1]) != PYPROJECT["project"]["dependencies"]:
        yield "what it installs is not pyproject.toml's dependencies"


def requirements(quoted: str) -> list[str]:
    code = shlex.split(quoted)[0]
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.split("\n")[:-1]


def image_is_safe_by_default(text: str) -> Iterator[str]:
    users = [args for name, args in instructions(text) if name == "USER"]
    if not users or users[-1] in ("root", "0"):
        yield "runs as root"
    if dict(env_of(text)).get("RAY_AUTH_MODE") != "token":
        yield "a Ray started in it asks for no token"


def build_context_names_exist(text: str) -> Iterator[str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if lines[0] != "*":
        yield "lets everything in"
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    needed = {"pyproject.toml", "constraints.txt", ".rayignore", "configs"}
    needed |= {"rollout", "learner", "rewards", "cluster"}
    yield from (f"{name} is kept out" for name in sorted(needed - let_in))
    yield from (f"{name} does not exist" for name in sorted(let_in) if not (ROOT / name).exists())


# slurm.sh, run


STAND_INS = {
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        exec "$@"
    """,
    "scontrol": """
        say scontrol "$@"
        if [[ $1 == show ]]; then printf '%s\\n' node-a node-b node-c node-d; fi
    """,
    "hostname": "echo 10.0.0.1 10.0.1.1",
    "python": """
        cat >"$LOG.wait.py"
        say python "$@"
        for _ in {1..500}; do
          if (($(grep -c "ray start" "$LOG") >= $3)); then exit 0; fi
          sleep 0.02
        done
        exit 98
    """,
    "ray": """
        say ray "$@"
        case "$1 $2" in
          "start --block") exec sleep 60 ;;
          "job stop") touch "$LOG.stopped" ;;
          "job submit")
            if [[ -z $HANG ]]; then exit "$SUBMIT_CODE"; fi
            for _ in {1..500}; do
              if [[ -e $LOG.stopped ]]; then exit 0; fi
              sleep 0.02
            done
            exit 99 ;;
        esac
    """,
}
SAY = 'say() { echo "auth=${RAY_AUTH_MODE-} $(printf "%q " "$@")" >>"$LOG"; }\n'


@dataclass(frozen=True)
class SlurmRun:
    """What slurm.sh did among stand-ins."""

    code: int
    output: str
    calls: list[tuple[str, list[str]]]
    """(RAY_AUTH_MODE, words) of each call of ray, scontrol and python."""
    waiting: str
    """The Python that waits for the nodes."""

    def of(self, *beginning: str) -> list[list[str]]:
        return [words for _, words in self.calls if tuple(words[: len(beginning)]) == beginning]


@cache
def run_slurm(text: str, submit_code: int = 0, send: int | None = None) -> SlurmRun:
    """Run the script with one override; with `send`, its job goes on until that signal has it stopped."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        log.touch()
        (folder / "bin").mkdir()
        for program, body in STAND_INS.items():
            (folder / "bin" / program).write_text(f"#!/usr/bin/env bash\nset -u\n{SAY}{body}\n")
            (folder / "bin" / program).chmod(0o755)
        (folder / "slurm.sh").write_text(text)
        environment = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "LOG": str(log),
            "HANG": "yes" if send else "",
            "SUBMIT_CODE": str(submit_code),
            "RUN_DIR": "/shared/runs/mine",
            "SLURM_SUBMIT_DIR": name,
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node-[a-d]",
            "SLURM_CPUS_PER_TASK": "8",
        }
        process = subprocess.Popen(
            ["bash", "slurm.sh", "learner.lr=1e-4"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if send:
            deadline = time.monotonic() + 30
            while "ray job submit" not in log.read_text() and process.poll() is None:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            process.send_signal(send)
        output, _ = process.communicate(timeout=30)
        lines = [shlex.split(line) for line in log.read_text().splitlines()]
        waiting = folder / "log.wait.py"
        return SlurmRun(
            process.returncode,
            output,
            [(auth.removeprefix("auth="), words) for auth, *words in lines],
            waiting.read_text() if waiting.exists() else "",
        )


def slurm_nodes(text: str) -> list[Node]:
    """The nodes that the script starts: their own resources, and what #SBATCH asks Slurm for."""
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    machine = {"CPU": float(asked["cpus-per-task"]), "GPU": float(asked["gpus-per-node"])}
    nodes: list[Node] = []
    for words in run_slurm(text).of("ray", "start"):
        (own,) = (word.split("=", 1)[1] for word in words if word.startswith("--resources="))
        nodes.append(Node(own, machine | json.loads(own), 1, 1))
    if len(nodes) != int(asked["nodes"]):
        raise AssertionError(f"{len(nodes)} Ray nodes on {asked['nodes']} machines")
    return nodes


def slurm_script_runs(text: str) -> Iterator[str]:
    parsed = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if parsed.returncode:
        yield parsed.stderr
        return
    run = run_slurm(text)
    if run.code:
        yield f"exit code {run.code}: {run.output}"
    try:
        ast.parse(run.waiting)
    except SyntaxError as error:
        yield f"its Python: {error}"
    heads = [words for words in run.of("ray", "start") if "--head" in words]
    if len(heads) != 1 or "--dashboard-host=127.0.0.1" not in heads[0]:
        yield f"not one head with its dashboard on loopback: {heads}"
    others = [words for words in run.of("ray", "start") if "--head" not in words]
    if not all("--address=10.0.0.1:6379" in words for words in others):
        yield f"nodes that do not join the head: {others}"
    if run_slurm(text, submit_code=1).code != 1:
        yield "the run's exit code is lost"


def slurm_asks_for_the_token(text: str) -> Iterator[str]:
    run = run_slurm(text)
    for auth, words in run.calls:
        if words[0] in ("ray", "python") and auth != "token":
            yield f"without RAY_AUTH_MODE=token: {' '.join(words)}"
    if run.of("ray")[:1] != [["ray", "get-auth-token", "--generate"]]:
        yield "no token is made before Ray starts"


def slurm_submits_a_run_that_continues(text: str) -> Iterator[str]:
    (words,) = run_slurm(text).of("ray", "job", "submit")
    yield from short_stops(runtime_envs(words))
    if "--working-dir=." not in words:
        yield "uploads no code"
    command = words[words.index("--") + 1 :]
    arguments = build_parser().parse_args(command[3:])
    overrides = ["run.dir=/shared/runs/mine", "run.resume=auto", "learner.lr=1e-4"]
    if command[:3] != ["python", "-m", "cluster"] or str(arguments.config) != CONFIG:
        yield f"the job is {command}"
    if arguments.overrides != overrides:
        yield f"overrides {arguments.overrides}, not {overrides}"


def slurm_stops_the_run_and_queues_again(text: str) -> Iterator[str]:
    asked = re.search(r"^#SBATCH --signal=B:(\w+)@(\d+)", text, re.MULTILINE)
    if not asked or asked[1] != "USR1" or int(asked[2]) < 2 * LEAST_STOP_WAIT_S:
        yield "no signal to the script, in time before the limit"
    for number, wanted in ((signal.SIGUSR1, 1), (signal.SIGTERM, 0)):
        run = run_slurm(text, send=number)
        stopped, queued = len(run.of("ray", "job", "stop")), len(run.of("scontrol", "requeue"))
        if (stopped, queued, run.code) != (1, wanted, 0):
            yield f"{number.name}: {stopped} stops, queued again {queued} times, exit {run.code}"


# every check on its files

KUBERAY = (CLUSTER, JOB)
CLUSTERS = (LAUNCHER, *KUBERAY, SLURM)
CHECKS: dict[Check, tuple[str, ...]] = {
    ray_accepts_the_launchers_table: (LAUNCHER,),
    kubernetes_fields_are_known: (*KUBERAY, POLICY),
    three_worker_groups: KUBERAY,
    nodes_offer_what_the_config_takes: CLUSTERS,
    one_image: (LAUNCHER, *KUBERAY, DOCKERFILE, README),
    launcher_asks_for_the_token: (LAUNCHER,),
    kubernetes_asks_for_the_token: KUBERAY,
    slurm_asks_for_the_token: (SLURM,),
    policy_opens_only_the_dashboard: (POLICY,),
    job_stops_in_its_own_time: (JOB,),
    documented_jobs_stop_in_their_own_time: ("docs/operations.md",),
    job_runs_the_shipped_config: (JOB,),
    ray_is_the_pinned_one: KUBERAY,
    run_folder_is_shared_and_the_cache_is_not: (LAUNCHER, *KUBERAY),
    ports_keep_out_of_rays_range: (*CLUSTERS, POLICY),
    no_secrets: (*CLUSTERS, POLICY, DOCKERFILE, README, CONFIG, *DOCS),
    image_holds_the_tested_set: (DOCKERFILE,),
    image_is_safe_by_default: (DOCKERFILE,),
    build_context_names_exist: (f"{DOCKERFILE}.dockerignore",),
    slurm_script_runs: (SLURM,),
    slurm_submits_a_run_that_continues: (SLURM,),
    slurm_stops_the_run_and_queues_again: (SLURM,),
}


@pytest.mark.parametrize(
    ("check", "path"),
    [
        pytest.param(check, path, id=f"{check.__name__}-{Path(path).name}")
        for check, paths in CHECKS.items()
        for path in paths
    ],
)
def test_a_shipped_file_passes(check: Check, path: str) -> None:
    found = list(check(text_of(path)))
    assert not found, "\n".join(found)


CLAIM = "persistentVolumeClaim: {claimName: flowcredit-shared}"
INLINE = "{name: RAY_AUTH_TOKEN, value: abc}"
HEAD_AUTH = "RAY_AUTH_MODE=token ray start --head"
TOKEN_ENV = "{name: RAY_AUTH_MODE, value: token}"
BROKEN: list[tuple[Check, str, str, str, str]] = [
    (ray_accepts_the_launchers_table, LAUNCHER, "max_workers: 18", "max_workers: many", "'many'"),
    (ray_accepts_the_launchers_table, LAUNCHER, "max_workers: 18", "max_workers: 1", "is smaller"),
    (ray_accepts_the_launchers_table, LAUNCHER, "node_type: head-learner", "node_type: x", "one of"),
    (ray_accepts_the_launchers_table, LAUNCHER, "  container_name:", "  name:", "Must provide"),
    (ray_accepts_the_launchers_table, LAUNCHER, "\nsetup_commands: []", "", "to Ray's defaults"),
    (ray_accepts_the_launchers_table, LAUNCHER, "- ray stop", "- if ray stop", "syntax error"),
    (kubernetes_fields_are_known, CLUSTER, "maxReplicas: 16", "maxReplica: 16", "'maxReplica' was"),
    (kubernetes_fields_are_known, CLUSTER, 'num-cpus: "0"', "num-cpus: 0", "not of type 'string'"),
    (kubernetes_fields_are_known, CLUSTER, "mode: token", "mode: tokens", "not one of"),
    (kubernetes_fields_are_known, JOB, "backoffLimit", "backOffLimit", "'backOffLimit' was"),
    (kubernetes_fields_are_known, JOB, "kind: RayJob", "kind: RayService", "not in the schema"),
    (kubernetes_fields_are_known, POLICY, "port: 8265", "port: 82650", "greater than the maximum"),
    (three_worker_groups, CLUSTER, "groupName: reward", "groupName: judge", "judge"),
    (three_worker_groups, JOB, 'limits: {cpu: "8"', 'limits: {cpu: "9"', "not the limits"),
    (nodes_offer_what_the_config_takes, CLUSTER, r'\"rollout\"', r'\"rollouts\"', "nodes offer"),
    (nodes_offer_what_the_config_takes, JOB, ', nvidia.com/gpu: "1"', "", "hold 0"),
    (nodes_offer_what_the_config_takes, LAUNCHER, "max_workers: 16", "max_workers: 8", "hold 8"),
    (nodes_offer_what_the_config_takes, LAUNCHER, "learner: 1}", "learner: 1, reward: 1}", "holds"),
    (nodes_offer_what_the_config_takes, SLURM, "gpus-per-node=1", "gpus-per-node=0", "hold 0"),
    (nodes_offer_what_the_config_takes, SLURM, r'\"learner\"', r'\"rollout\"', "nodes offer"),
    (one_image, LAUNCHER, "flowcredit:0.1.0", "flowcredit:latest", "flowcredit:latest, not"),
    (one_image, DOCKERFILE, "docker build", "docker", "names no image"),
    (launcher_asks_for_the_token, LAUNCHER, HEAD_AUTH, "ray start --head", "without RAY_AUTH_MODE"),
    (launcher_asks_for_the_token, LAUNCHER, "host=127.0.0.1", "host=0.0.0.0", "beyond loopback"),
    (launcher_asks_for_the_token, LAUNCHER, "- -e RAY_AUTH_MODE=token", "", "container is run"),
    (launcher_asks_for_the_token, LAUNCHER, "/home/ray/.ray", "/root/.ray", "under /home/ray"),
    (kubernetes_asks_for_the_token, CLUSTER, "mode: token", "mode: disabled", "authOptions are"),
    (kubernetes_asks_for_the_token, CLUSTER, TOKEN_ENV, "{name: A, value: b}", "MODE is not"),
    (kubernetes_asks_for_the_token, JOB, "key: auth_token", "key: token", "the operator's secret"),
    (slurm_asks_for_the_token, SLURM, "export RAY_AUTH_MODE=token", "", "ray start --block"),
    (slurm_asks_for_the_token, SLURM, "ray get-auth-token --generate", "true", "no token is made"),
    (policy_opens_only_the_dashboard, POLICY, "port: 8265", "port: 6379", "others may call"),
    (policy_opens_only_the_dashboard, POLICY, "    - from:", "    - to:", "others may call"),
    (policy_opens_only_the_dashboard, POLICY, "[Ingress]", "[Egress]", "not restricted"),
    (policy_opens_only_the_dashboard, POLICY, "{app: flowcredit}", "{app: x}", "does not select"),
    (job_stops_in_its_own_time, JOB, 'TIME_S: "120"', 'TIME_S: "3"', "short of"),
    (job_stops_in_its_own_time, JOB, 'TIME_S: "120"', "TIME_S: 120", "not a string"),
    (documented_jobs_stop_in_their_own_time, DOCS[0], "STOP_WAIT", "WAIT", "[None]"),
    (job_runs_the_shipped_config, JOB, "configs/cluster.toml", "configs/demo.toml", "the job is"),
    (job_runs_the_shipped_config, JOB, "/opt/flowcredit", "/opt/elsewhere", "no code in"),
    (job_runs_the_shipped_config, JOB, "maxReplicas: 2", "maxReplicas: 3", "not that of"),
    (ray_is_the_pinned_one, CLUSTER, 'rayVersion: "', 'rayVersion: "1', "constraints.txt pins"),
    (run_folder_is_shared_and_the_cache_is_not, LAUNCHER, "/shared:/shared", "/a:/b", "no volume"),
    (run_folder_is_shared_and_the_cache_is_not, LAUNCHER, "/flowcredit /sha", "/ /a", "the wrong"),
    (run_folder_is_shared_and_the_cache_is_not, CLUSTER, "Path: /cache", "Path: /c", "no volume"),
    (run_folder_is_shared_and_the_cache_is_not, JOB, "emptyDir: {}", CLAIM, "the wrong volume"),
    (run_folder_is_shared_and_the_cache_is_not, JOB, "/cache/hug", "/shared/hug", "the image's is"),
    (ports_keep_out_of_rays_range, SLURM, "GCS_PORT=6379", "GCS_PORT=16379", "port 16379"),
    (ports_keep_out_of_rays_range, LAUNCHER, "IP:6379", "IP:10002", "port 10002"),
    (ports_keep_out_of_rays_range, CLUSTER, "containerPort: 8265", "containerPort: 18265", "18265"),
    (ports_keep_out_of_rays_range, POLICY, "port: 8265", "port: all", "fixes no port"),
    (no_secrets, LAUNCHER, "-e RAY_AUTH_MODE=token", "-e HF_TOKEN=abc", "HF_TOKEN is given"),
    (no_secrets, CLUSTER, TOKEN_ENV, INLINE, "given the value"),
    (no_secrets, SLURM, "export RAY", "export RAY_AUTH_TOKEN=abc RAY", "RAY_AUTH_TOKEN is given"),
    (no_secrets, DOCKERFILE, "HOME=/home/ray", "HOME=/home/ray X=hf_" + "a" * 34, "looks like"),
    (no_secrets, CONFIG, 'name = "shapes"', 'api_key = "abc"', "api_key is given"),
    (image_holds_the_tested_set, DOCKERFILE, "python:3.11", "python:3.10", "no Python 3.11"),
    (image_holds_the_tested_set, DOCKERFILE, "--constraint constraints.txt", "", "does not pin"),
    (image_holds_the_tested_set, DOCKERFILE, "pyproject.toml constraints.txt ./", "a ./", "there"),
    (image_holds_the_tested_set, DOCKERFILE, "['dependencies']", "['name']", "dependencies"),
    (image_is_safe_by_default, DOCKERFILE, "USER ray", "USER root", "runs as root"),
    (image_is_safe_by_default, DOCKERFILE, "RAY_AUTH_MODE=token", "A=b", "asks for no token"),
    (build_context_names_exist, f"{DOCKERFILE}.dockerignore", "!configs\n", "", "configs is kept"),
    (build_context_names_exist, f"{DOCKERFILE}.dockerignore", "!LICENSE", "!GONE", "GONE does not"),
    (build_context_names_exist, f"{DOCKERFILE}.dockerignore", "\n*\n", "\n", "everything in"),
    (slurm_script_runs, SLURM, "done\n", "\n", "syntax error"),
    (slurm_script_runs, SLURM, 'exit "$code"', "exit 0", "exit code is lost"),
    (slurm_script_runs, SLURM, "host=127.0.0.1", "host=0.0.0.0", "not one head"),
    (slurm_script_runs, SLURM, "time.sleep(2)", "time.sleep(2", "its Python"),
    (slurm_script_runs, SLURM, '"${nodes[1]}" --address="$head_ip:', '"${nodes[1]}" --a="', "join"),
    (slurm_submits_a_run_that_continues, SLURM, " run.resume=auto", "", "overrides"),
    (slurm_submits_a_run_that_continues, SLURM, '"120"', '"3"', "short of"),
    (slurm_submits_a_run_that_continues, SLURM, " --working-dir=.", "", "uploads no code"),
    (slurm_submits_a_run_that_continues, SLURM, "python -m cluster", "python -m x", "the job is"),
    (slurm_stops_the_run_and_queues_again, SLURM, "B:USR1@300", "USR1@300", "no signal"),
    (slurm_stops_the_run_and_queues_again, SLURM, "again=yes; ", "", "queued again 0 times"),
    (slurm_stops_the_run_and_queues_again, SLURM, "trap stop TERM\n", "", "SIGTERM: 0 stops"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("check", "path", "old", "new", "complaint"),
    BROKEN,
    ids=[f"{check.__name__}-{Path(path).name}-{new[:20]}" for check, path, _, new, _ in BROKEN],
)
def test_a_check_sees_what_is_broken(
    check: Check, path: str, old: str, new: str, complaint: str
) -> None:
    text = text_of(path)
    assert old in text
    assert complaint in "\n".join(check(text.replace(old, new)))


def test_every_check_was_seen_to_fail() -> None:
    assert {check for check, *_ in BROKEN} == set(CHECKS)


def test_every_file_of_the_folder_is_checked() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / DEPLOY).iterdir()}
    assert files <= {path for paths in CHECKS.values() for path in paths}


def test_the_clusters_config_is_the_quickstart_on_three_pools() -> None:
    ours, quickstart = (load(ROOT / path) for path in (CONFIG, "configs/quickstart.toml"))
    where = {
        "run": {"dir", "resume", "wait_for_nodes_s"},
        "rollout": {"workers", "resources", "gpus_per_worker", "slices_per_call"},
        "learner": {"resources", "gpus_per_rank"},
    }
    excluded: Any = {**where, "rewards": {"components": {"__all__": {"resources"}}}}
    assert ours.model_dump(exclude=excluded) == quickstart.model_dump(exclude=excluded)
    assert [list(pool.takes)[2:] for pool in pools(ours)] == [["rollout"], ["learner"], ["reward"]]
    counts = [iteration_costs(config, step_plan(config)[0]) for config in (ours, quickstart)]
    assert counts[0] == counts[1]


def test_the_clusters_config_has_work_for_all_its_workers_and_continues() -> None:
    config = shipped_config()
    calls = config.rollout.groups_per_batch * config.rollout.slices_per_group
    assert calls // config.rollout.slices_per_call >= config.rollout.workers.max
    assert config.run.resume == "auto"
    assert Path(config.run.dir or "").is_absolute()
