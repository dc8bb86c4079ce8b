"""Run folders in an object store: fsspec's memory:// in this process, file:// for what is on a disk after all."""

import json
import re
import shutil
import tempfile
import uuid
from pathlib import Path

import fsspec
import pytest

from cluster.config import ConfigError
from cluster.remote_folder import (
    RunPlace,
    download,
    fetched,
    move,
    run_fetched,
    scratch_name,
    upload,
    written,
)
from cluster.remote_path import RemotePath, place_at
from learner.checkpoint import check, described, latest, load, names, prune, save
from learner.manifest import MANIFEST
from tests.unit.learner.saves import example


@pytest.fixture(params=["memory", "file"])
def where(request, tmp_path):
    """An empty place of an object store."""
    if request.param == "file":
        return RemotePath(f"file://{tmp_path}/store/run")
    return RemotePath(f"memory://bucket-{uuid.uuid4().hex}/run")


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Where staging and scratch folders are made; every test must leave it empty."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def saved(where, version):
    place = where / "checkpoints" / f"step_{version:06d}"
    with written(str(place)) as folder:
        save(Path(folder), example(version, numel=4))
    return place


def content(where):
    return {name: (where / name).read_text() for name in where.files()}


# paths


def test_a_remote_path_answers_like_a_path(where):
    assert not where.exists()
    assert (list(where.glob("*")), where.is_dir(), where.is_file()) == ([], False, False)
    (where / "a" / "b.txt").write_text("one")
    (where / "a" / "c.json").write_text("two")
    assert (where / "a").is_dir()
    assert (where / "a" / "b.txt").is_file()
    assert not (where / "a").is_file()
    assert [path.name for path in (where / "a").glob("*.txt")] == ["b.txt"]
    assert [path.name for path in where.glob("*")] == ["a"]
    assert where.files() == ["a/b.txt", "a/c.json"]
    assert (where / "a" / "b.txt").read_text() == "one"
    assert (where / "a").parent == where
    with (where / "a" / "c.json").open("rb") as file:
        assert file.read() == b"two"
    (where / "a" / "b.txt").unlink()
    (where / "a" / "b.txt").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        (where / "a" / "b.txt").unlink()
    (where / "a").rmtree()
    (where / "a").rmtree()
    assert not (where / "a").exists()


def test_files_that_another_process_wrote_are_seen(where, tmp_path):
    """A store's driver remembers listings."""
    (where / "a").write_text("")
    assert where.files() == ["a"]
    (tmp_path / "b").write_text("b")
    fsspec.core.url_to_fs(str(where))[0].put_file(str(tmp_path / "b"), f"{where}/b")
    assert where.files() == ["a", "b"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/run", "Install s3fs"),
        ("gs://bucket/run", "install gcsfs"),
        ("nowhere://bucket/run", "Protocol not known: nowhere"),
        ("memory://", "names no folder"),
        ("simplecache::memory://x", "a chain of URLs"),
    ],
)
def test_what_cannot_be_opened_is_refused(url, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        place_at(url)


def test_a_password_in_a_url_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="holds a password") as caught:
        place_at("ftp://user:secret@host/run")
    assert "secret" not in str(caught.value)
    assert place_at("runs/mine") == Path("runs/mine").absolute()


# the driver's side


def test_a_local_folder_is_its_own_place(tmp_path):
    place = RunPlace.at(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    for step in (place.push, place.pull, place.push, place.close):
        step()
    assert place.folder == place.where == tmp_path
    assert (tmp_path / "metrics.jsonl").exists()


def test_what_changed_is_pushed_and_what_went_away_is_removed(where):
    place = RunPlace.at(where)
    (place.folder / "evaluation").mkdir()
    (place.folder / "evaluation" / "before.jsonl").write_text("{}\n")
    (place.folder / "metrics.jsonl").write_text("1\n")
    (place.folder / ".best.json.123").write_text("being written")
    place.push()
    assert content(where) == {"evaluation/before.jsonl": "{}\n", "metrics.jsonl": "1\n"}
    (where / "evaluation" / "before.jsonl").write_text("untouched")
    with (place.folder / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    place.push()
    assert content(where) == {"evaluation/before.jsonl": "untouched", "metrics.jsonl": "1\n2\n"}
    (place.folder / "metrics.jsonl").unlink()
    (place.folder / "summary.json").write_text("{}")
    place.close()
    assert content(where) == {"evaluation/before.jsonl": "untouched", "summary.json": "{}"}
    assert not place.folder.exists()


def test_trajectories_are_moved_and_the_summary_comes_last(where, monkeypatch):
    place = RunPlace.at(where)
    (place.folder / "trajectories").mkdir()
    for name in ("trajectories/batch_000001.arrow", "summary.json", "zz.png", "config.toml"):
        (place.folder / name).write_text(name)
    order, plain = [], RemotePath.upload
    monkeypatch.setattr(
        RemotePath, "upload", lambda self, local: (order.append(self.name), plain(self, local))
    )
    place.push()
    assert order == ["config.toml", "batch_000001.arrow", "zz.png", "summary.json"]
    assert not list((place.folder / "trajectories").iterdir())
    place.push()
    assert len(order) == 4
    assert (where / "trajectories" / "batch_000001.arrow").is_file()
    place.close()
    assert (where / "trajectories" / "batch_000001.arrow").is_file()


def test_another_machine_gets_what_a_driver_needs_and_nothing_large(where):
    place = RunPlace.at(where)
    small = {"config.toml", "metrics.jsonl", "best.json", "evaluation/before/0000.png"}
    large = {
        "checkpoints/step_000001/weights.safetensors",
        "trajectories/batch_000001.arrow",
        "weights/pytorch_lora_weights.safetensors",
        "nonfinite_version_000003/groups.arrow",
    }
    for name in small | large:
        (where / name).write_text(name)
    place.pull()
    found = {p.relative_to(place.folder).as_posix() for p in place.folder.rglob("*") if p.is_file()}
    assert found == small
    (where / "best.json").write_text("not pushed again")
    (place.folder / "metrics.jsonl").unlink()
    place.close()
    assert set(where.files()) == (small | large) - {"metrics.jsonl"}
    assert (where / "best.json").read_text() == "not pushed again"


def test_what_cannot_be_pushed_stays_and_is_said(where, monkeypatch, caplog, scratch):
    place = RunPlace.at(where)
    (place.folder / "metrics.jsonl").write_text("1\n")

    def refused(self, local):
        raise PermissionError("access denied")

    monkeypatch.setattr(RemotePath, "upload", refused)
    with pytest.raises(PermissionError):
        place.push()
    place.close()
    assert (place.folder / "metrics.jsonl").is_file()
    assert f"{where} lacks what lies in {place.folder}, which stays: access denied" in caplog.text
    shutil.rmtree(place.folder)


# checkpoints


def test_a_checkpoint_is_written_found_checked_and_loaded(where):
    saved(where, 1)
    newest = saved(where, 2)
    assert latest(where / "checkpoints") == newest
    assert check(newest)["policy_version"] == 2
    assert described(newest) == str(newest)
    with fetched(newest) as folder:
        assert folder.name == "step_000002"
        assert load(folder).weights["w"].tolist() == [2.0] * 4
    assert (where / "checkpoints" / "step_000003").exists() is False


def test_the_manifest_comes_last_and_goes_first(where, monkeypatch):
    events = []
    upload_, unlink_, rmtree_ = RemotePath.upload, RemotePath.unlink, RemotePath.rmtree

    def note(kind, act):
        return lambda self, *args, **more: (
            events.append((kind, self.name)),
            act(self, *args, **more),
        )[1]

    saved(where, 1)
    monkeypatch.setattr(RemotePath, "upload", note("upload", upload_))
    monkeypatch.setattr(RemotePath, "unlink", note("unlink", unlink_))
    monkeypatch.setattr(RemotePath, "rmtree", note("rmtree", rmtree_))
    saved(where, 1)
    assert events[0] == ("unlink", MANIFEST)
    assert events[-1] == ("upload", MANIFEST)
    assert {kind for kind, _ in events[1:]} == {"upload"}
    saved(where, 2)
    events.clear()
    assert [place.name for place in prune(where / "checkpoints", 1)] == ["step_000001"]
    assert events == [("unlink", MANIFEST), ("rmtree", "step_000001")]
    assert names(where / "checkpoints") == ["step_000002"]


@pytest.mark.parametrize("number", range(4))
def test_an_upload_that_breaks_off_is_no_checkpoint(where, monkeypatch, number):
    """After any number of its files. The one before is used, and a later save of that name is whole."""
    before = saved(where, 1)
    plain, count = RemotePath.upload, iter(range(100))

    def breaking(self, local):
        if next(count) == number:
            raise ConnectionResetError("gone")
        plain(self, local)

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "upload", breaking)
        with pytest.raises(ConnectionResetError):
            saved(where, 2)
    assert names(where / "checkpoints") == ["step_000001"]
    if number:
        with pytest.warns(UserWarning, match=r"passing over .*step_000002 is no checkpoint"):
            assert latest(where / "checkpoints") == before
    else:
        assert latest(where / "checkpoints") == before
    again = saved(where, 2)
    assert latest(where / "checkpoints") == again


def test_a_damaged_file_in_the_store_is_noticed(where):
    before, newest = saved(where, 1), saved(where, 2)
    manifest = json.loads((newest / MANIFEST).read_text())
    (newest / MANIFEST).write_text(json.dumps(manifest | {"policy_version": 3}))
    with pytest.warns(UserWarning, match="its checksum is not its own"):
        assert latest(where / "checkpoints") == before
    (before / "weights.safetensors").write_text("other")
    with (
        pytest.warns(UserWarning, match=r"the checksum of weights\.safetensors"),
        pytest.warns(UserWarning, match="its checksum is not its own"),
    ):
        assert latest(where / "checkpoints") is None
    assert names(where / "checkpoints") == ["step_000001", "step_000002"]


def test_nothing_is_uploaded_of_what_was_not_written(where):
    """Ranks other than 0."""
    with written(str(where / "checkpoints" / "step_000001")):
        pass
    move(Path(scratch_name()), str(where))
    assert not where.exists()


def test_a_batch_that_went_wrong_is_moved(where):
    local = Path(scratch_name())
    (local / "nonfinite_version_000003").mkdir(parents=True)
    (local / "nonfinite_version_000003" / "report.json").write_text("{}")
    move(local, str(where))
    assert where.files() == ["nonfinite_version_000003/report.json"]
    assert not local.exists()


def test_local_places_are_given_as_they_are(tmp_path):
    with written(str(tmp_path / "a")) as folder:
        assert folder == str(tmp_path / "a")
    (tmp_path / "a").write_text("")
    with fetched(tmp_path / "a") as path:
        assert path == tmp_path / "a"


# commands


def test_evaluate_and_sample_get_a_run_or_one_of_its_checkpoints(where):
    (where / "config.toml").write_text("[run]\n")
    older, newest = saved(where, 1), saved(where, 2)
    with run_fetched(where) as folder:
        assert (folder / "config.toml").read_text() == "[run]\n"
        found = latest(folder / "checkpoints")
        assert found is not None
        assert found.name == newest.name
    with run_fetched(older) as folder:
        assert (folder / MANIFEST).is_file()
        assert folder.name == older.name
        assert (folder.parent.parent / "config.toml").is_file()
    with run_fetched(where / "nothing") as folder:
        assert list(folder.iterdir()) == []


def test_folders_inside_are_uploaded_and_downloaded(where, tmp_path):
    (tmp_path / "pipeline" / "vae").mkdir(parents=True)
    (tmp_path / "pipeline" / "vae" / "config.json").write_text("{}")
    upload(tmp_path / "pipeline", where / "weights")
    assert where.files() == ["weights/vae/config.json"]
    download(where / "weights", tmp_path / "back")
    assert (tmp_path / "back" / "vae" / "config.json").read_text() == "{}"
