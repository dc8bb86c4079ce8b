"""`ray job submit` on a cluster that asks for a token: code travels, exit codes and logs come back, a stop is clean."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from ray._private.runtime_env.packaging import create_package

from cluster.config import load
from cluster.run_folder import METRICS, SUMMARY, read_json, read_jsonl
from cluster.train import train
from tests.integration.cluster_fixtures import ROOT, LocalCluster, head_node, json_lines, said
from tests.integration.test_system import settings

pytestmark = [pytest.mark.ray, pytest.mark.slow]

UPLOAD_BYTES = 12 * 2**20
"""Most that an upload may take; the shipped model is 8 MB of it. Ray's own limit is 512 MiB."""
PLUGIN = "visiting_family"
STOP_WAIT = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}


@dataclass(frozen=True)
class Submitter:
    """A user's terminal in a working tree, with the cluster's token."""

    cluster: LocalCluster
    tree: Path

    def job(self, command: str, *words: str, **more: Any) -> Any:
        """`ray job COMMAND` to its end: the finished process, and all that it wrote, in one line."""
        more = {"cwd": self.tree, "RAY_API_SERVER_ADDRESS": self.cluster.dashboard, **more}
        done = self.cluster.run("ray", "job", command, *words, **more)
        return done, said(done)

    def submit(self, name: str, *command: str, wait: bool = True, **more: Any) -> Any:
        """`ray job submit` of `python -m cluster COMMAND` as docs/operations.md has it."""
        words = ["--submission-id", name, "--working-dir", "."]
        words += [f"--runtime-env-json={json.dumps(STOP_WAIT)}", *([] if wait else ["--no-wait"])]
        return self.job("submit", *words, "--", "python", "-m", "cluster", *command, **more)


@pytest.fixture(scope="module")
def upload(tmp_path_factory) -> Path:
    """The zip file that Ray makes of this working tree."""
    package = tmp_path_factory.mktemp("upload") / "package.zip"
    create_package(str(ROOT), package, include_gitignore=True)
    return package


@pytest.fixture(scope="module")
def submitter(upload, tmp_path_factory) -> Iterator[Submitter]:
    """A working tree that holds only what is uploaded, and a model family of its owner's."""
    tree = tmp_path_factory.mktemp("tree")
    with ZipFile(upload) as package:
        package.extractall(tree)
    family = (ROOT / "tests" / "fake_family.py").read_text()
    (tree / f"{PLUGIN}.py").write_text(family)
    # Without the way to this working tree, and unmeasured: what runs is the upload.
    alone: dict[str, str] = {
        "PYTHONPATH": "",
        "COVERAGE_PROCESS_START": "",
        "COVERAGE_PROCESS_CONFIG": "",
    }
    with head_node({"CPU": 8.0}, None, **alone) as cluster:
        yield Submitter(cluster, tree)


def overrides(folder: Path, *more: str, family: str) -> list[str]:
    """The tiny run of test_system.py, its reward one that every upload holds."""
    jpeg = ['rewards.components=[{name="jpeg"}]', 'evaluation.graded="jpeg"']
    return settings(folder, f'model.family="{family}:GaussianFamily"', *jpeg, *more)


def test_the_upload_is_small_and_holds_what_a_run_needs(upload):
    with ZipFile(upload) as package:
        names = package.namelist()
    assert upload.stat().st_size < UPLOAD_BYTES
    tops = {name.split("/")[0] for name in names}
    assert {"cluster", "learner", "rewards", "rollout", "configs", "pyproject.toml"} <= tops
    assert not tops & {".git", ".venv", "runs", "tests", "benchmarks", "docs", "dashboards"}
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.long
def test_a_submitted_run_ends_as_a_local_one(ray_session, submitter, tmp_path):
    (tmp_path / "local").mkdir()
    (tmp_path / "submitted").mkdir()
    train(
        load("configs/quickstart.toml", overrides(tmp_path / "local", family="tests.fake_family"))
    )
    words = overrides(tmp_path / "submitted", family=PLUGIN)
    done, text = submitter.submit("whole", "train", "configs/quickstart.toml", *words)
    assert done.returncode == 0, text
    assert "Job 'whole' succeeded" in text
    expected, found = (
        read_json(tmp_path / name / "run" / SUMMARY) for name in ("local", "submitted")
    )
    for section in ("status", "evaluation", "counts", "evaluation_counts"):
        assert found[section] == expected[section], section


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_quickstart_submitted_ends_as_the_local_one(submitter, tmp_path):
    """Both in full, one after the other, through the commands of README.md and docs/operations.md."""
    folders = [tmp_path / "local", tmp_path / "submitted"]
    words = ["train", "configs/quickstart.toml"]
    command = ["-m", "cluster", *words, f"run.dir={folders[0]}"]
    local = submitter.cluster.run("python", *command, cwd=submitter.tree, timeout_s=3000)
    assert local.returncode == 0, said(local)
    done, text = submitter.submit("quickstart", *words, f"run.dir={folders[1]}", timeout_s=3000)
    assert done.returncode == 0, text
    expected, found = (read_json(folder / SUMMARY) for folder in folders)
    for section in ("evaluation", "counts"):
        assert found[section] == expected[section], section


def test_a_mistake_in_the_config_reaches_the_submitter(submitter, tmp_path):
    words = overrides(tmp_path, "learner.learning_rate=1e-4", family=PLUGIN)
    done, text = submitter.submit("mistake", "train", "configs/quickstart.toml", *words)
    assert done.returncode == 1, text
    assert "learner.learning_rate = 0.0001: unknown key" in text
    assert "failed with exit code 2" in text
    assert not (tmp_path / "run").exists()


def test_without_the_token_nothing_is_taken(submitter, tmp_path):
    words = ["train", "configs/quickstart.toml", *overrides(tmp_path, family=PLUGIN)]
    for env in ({"HOME": str(tmp_path)}, {"RAY_AUTH_MODE": "disabled"}):
        done, text = submitter.submit("stranger", *words, **env)
        assert done.returncode != 0, text
        assert "token" in text.lower()
    for path in ("/api/jobs/", "/api/v0/actors"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(submitter.cluster.dashboard + path, timeout=30)
        assert refused.value.code == 401
        refused.value.close()
    done, text = submitter.job("list")
    assert done.returncode == 0
    assert "stranger" not in text


def wait_for_rows(folder: Path, count: int) -> None:
    """Poll until the run has done so many iterations."""
    deadline = time.monotonic() + 150
    while len(json_lines(folder / METRICS)) < count:
        assert time.monotonic() < deadline, f"no {count} iterations in {folder}"
        time.sleep(0.2)


def test_a_stopped_job_goes_on_when_it_is_submitted_again(submitter, tmp_path):
    folder = tmp_path / "run"
    words = overrides(tmp_path, 'run.resume="auto"', "run.checkpoint_every=100000", family=PLUGIN)
    endless = ["train", "configs/quickstart.toml", *words, "run.num_iterations=100000"]
    done, text = submitter.submit("first", *endless, wait=False)
    assert done.returncode == 0, text
    wait_for_rows(folder, 3)
    command = ["-m", "cluster", "scale", str(folder), "--rollout-workers", "2"]
    scaled = submitter.cluster.run(
        "python", *command, "--address", submitter.cluster.address, cwd=submitter.tree
    )
    assert scaled.returncode == 0, said(scaled)
    done, text = submitter.job("stop", "first")
    assert done.returncode == 0, text
    assert "Job 'first' was stopped" in text
    stopped_after = len(read_jsonl(folder / METRICS))
    _, text = submitter.job("logs", "first")
    assert f"stopped after iteration {stopped_after};" in text
    checkpoints = [path.name for path in (folder / "checkpoints").iterdir()]
    assert checkpoints == [f"step_{stopped_after:06d}"], "the stop's own, and nothing unfinished"
    last = stopped_after + 2
    again = ["train", "configs/quickstart.toml", *words, f"run.num_iterations={last}"]
    done, text = submitter.submit("second", *again)
    assert done.returncode == 0, text
    assert "Job 'second' succeeded" in text
    assert f"continuing after iteration {stopped_after}" in text, "its log reaches the submitter"
    assert "Held-out prompts" in text, "and so does its table"
    rows = read_jsonl(folder / METRICS)
    assert [row["iteration"] for row in rows] == list(range(1, last + 1))
    assert [group for row in rows for group in row["group_ids"]] == list(range(4 * last))
    assert [row["incarnation"] for row in rows] == [0] * stopped_after + [1] * 2
    assert read_json(folder / SUMMARY)["counts"]["images"] == 16 * last
