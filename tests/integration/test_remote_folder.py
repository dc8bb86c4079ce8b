"""A run folder at a URL that works across processes, on real Ray; and nodes that do not see a local one."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray

from cluster.actors_cluster import check_nodes
from cluster.config import ConfigError, load
from cluster.folder_probe import token_in
from cluster.remote_folder import fetched
from cluster.remote_path import place_at
from cluster.run_folder import read_metrics
from cluster.train import resume, train
from learner.checkpoint import load as load_checkpoint
from learner.checkpoint import names
from tests.integration.cluster_fixtures import head_node, said
from tests.integration.test_system import settings

pytestmark = pytest.mark.ray


def settings_at(tmp_path, run_dir, *more):
    """Four iterations, a checkpoint after every second, of which the newest stays."""
    length = ["run.num_iterations=4", "run.keep_checkpoints=1"]
    return settings(tmp_path, f'run.dir="{run_dir}"', *length, *more)


def test_a_run_at_a_url_stops_resumes_and_equals_the_local_one(ray_session, tmp_path, monkeypatch):
    """Driver, ranks and their scratch folders share nothing but the URL; nothing is left of those folders."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    url = f"file://{tmp_path}/store/run"
    _, local = train(load("configs/quickstart.toml", settings_at(tmp_path, tmp_path / "local")))
    halfway = settings_at(tmp_path, url, "run.num_iterations=2", "run.record_trajectories=true")
    where, _ = train(load("configs/quickstart.toml", halfway))
    assert where == place_at(url)
    assert names(where / "checkpoints") == ["step_000002"]
    again, summary = resume(url, ["run.num_iterations=4"])
    assert again == where
    assert names(where / "checkpoints") == ["step_000004"]
    assert (summary["counts"], summary["evaluation"]) == (local["counts"], local["evaluation"])
    ours = tmp_path / "local" / "checkpoints" / "step_000004"
    with fetched(where / "checkpoints" / "step_000004") as folder:
        for name, tensor in load_checkpoint(ours).weights.items():
            assert (load_checkpoint(folder).weights[name] == tensor).all(), name
    stored = tmp_path / "store" / "run"
    assert [row["iteration"] for row in read_metrics(stored)] == [1, 2, 3, 4]
    for name in ("report.html", "summary.json", "weights", "trajectories/batch_000004.arrow"):
        assert (stored / name).exists(), name
    assert not [path for path in stored.rglob(".*") if path.is_file()], "no token is left"
    assert list(scratch.iterdir()) == []


INSIDE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
"""A mount of its own, that goes away with its processes; no root is needed where users may have namespaces."""
MOUNT = 'mount -t tmpfs none "$0" && exec "$@"'


def test_a_node_that_may_hold_a_rank_must_see_the_folder(tmp_path):
    """The second node has an empty disk of its own at the run folder's path. As one of a rollout pool it may."""
    shared = tmp_path / "shared"
    shared.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("this system has no unshare to give a node another disk")
    if subprocess.run([*INSIDE, MOUNT, str(shared), "true"], capture_output=True).returncode:
        pytest.skip("this system lets no user mount a disk of its own")
    with head_node({"CPU": 2}) as here:
        join = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={here.address}"]
        join += ["--num-cpus=2", '--resources={"rollout": 1}', f"--object-store-memory={2**27}"]
        join += ["--min-worker-port=0", "--max-worker-port=0"]
        joined = subprocess.run(
            [*INSIDE, MOUNT, str(shared), *join], env=here.env, capture_output=True, text=True
        )
        assert joined.returncode == 0, joined.stdout + joined.stderr
        done = here.run("python", "-m", __name__, str(shared), str(tmp_path), here.address)
    assert done.returncode == 0, said(done)
    seen = json.loads(done.stdout.splitlines()[-1])
    for refused in ("anywhere", "on the second"):
        assert f"node {seen['second']}: there is such a folder, but it is another" in seen[refused]
        assert "choose a folder that all of them share" in seen[refused]
    assert seen["too large for the second"] is None
    assert seen["in a pool that has no node yet"] is None


def ask_two_nodes(shared, folder, address):
    """Print which settings are refused, and why: setting -> message or None; and the second node's name."""
    ray.init(address=address, log_to_driver=False)
    own = ray.get_runtime_context().get_node_id()
    (other,) = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own]
    seen = {"second": f"{other['NodeID']} ({other['NodeManagerAddress']})"}
    cases = {
        "anywhere": "learner.threads_per_rank=1",
        "on the second": "learner.resources={rollout=1}",
        "too large for the second": "learner.threads_per_rank=3",
        "in a pool that has no node yet": "learner.resources={learner=1}",
    }
    with token_in(shared) as token:
        for name, setting in cases.items():
            config = load("configs/quickstart.toml", settings_at(folder, shared, setting))
            try:
                check_nodes(config, str(shared), token)
                seen[name] = None
            except ConfigError as error:
                seen[name] = str(error)
    print(json.dumps(seen))


def test_a_rank_on_a_node_without_the_drivers_token_does_not_start(ray_session, tmp_path):
    """As on a node that joined after the others were asked."""
    from cluster.actors_backend import RayBackend
    from cluster.events import Events

    config = load("configs/quickstart.toml", settings_at(tmp_path, tmp_path))
    backend = RayBackend(config, "all", str(tmp_path), folder_token="not there")
    try:
        with pytest.raises(ValueError, match="its token is missing"):
            Events(backend).answer(backend.start_learner())
    finally:
        backend.close()


if __name__ == "__main__":
    ask_two_nodes(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
