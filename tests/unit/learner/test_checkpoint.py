"""Checkpoint folders: whole, damaged, replaced, pruned."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.checkpoint import (
    EMA,
    MANIFEST,
    OPTIMIZER,
    STALE_S,
    WEIGHTS,
    Checkpoint,
    CheckpointError,
    OptimizerState,
    check,
    described,
    latest,
    load,
    load_kept,
    names,
    prune,
    save,
)
from learner.manifest import digest, manifest_digest
from rollout.families.trainable import checksum
from tests.unit.learner.helpers import same_bits

HOST = platform.node()


def example(version: int = 7, *, ema: bool = True, state: object = None) -> Checkpoint:
    """Names that contain dots and the word that the optimizer's file uses as a prefix."""
    names = ("a.exp_avg.weight", "b")
    tensors = {name: torch.full((2, 3), float(version + i)) for i, name in enumerate(names)}
    return Checkpoint(
        weights=tensors,
        optimizer=OptimizerState(
            version,
            {name: tensor * 2 for name, tensor in tensors.items()},
            {name: tensor * 3 for name, tensor in tensors.items()},
        ),
        ema={name: tensor * 4 for name, tensor in tensors.items()} if ema else None,
        policy_version=version,
        identity={"adapter": "full"},
        config_digest="abc",
        state=state if isinstance(state, dict) else {"cursor": [1, 2], "seed": 2**62},
    )


def saved(directory: Path, version: int, *, keeping: bool = False) -> Path:
    folder, content = directory / f"step_{version:06d}", example(version)
    save(folder, content, {version - 1: content.weights} if keeping else None)
    return folder


@pytest.mark.parametrize("ema", [True, False])
def test_what_is_saved_is_loaded(tmp_path: Path, ema: bool) -> None:
    content = example(ema=ema)
    save(tmp_path / "step_000007", content)
    found = load(tmp_path / "step_000007")
    assert same_bits(found.weights, content.weights)
    assert found.optimizer.step == 7
    assert same_bits(found.optimizer.exp_avg, content.optimizer.exp_avg)
    assert same_bits(found.optimizer.exp_avg_sq, content.optimizer.exp_avg_sq)
    assert (found.ema is None) == (content.ema is None)
    if content.ema is not None:
        assert found.ema is not None
        assert same_bits(found.ema, content.ema)
    assert found.state == content.state
    assert (found.policy_version, found.identity, found.config_digest) == (
        7,
        {"adapter": "full"},
        "abc",
    )


def test_a_folder_holds_safetensors_and_json_and_nothing_else(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    assert {path.name for path in folder.iterdir()} == {WEIGHTS, OPTIMIZER, EMA, MANIFEST}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"], (
        "nothing is left beside it"
    )
    assert json.loads((folder / MANIFEST).read_text())["format_version"] == 1


def test_saving_again_replaces(tmp_path: Path) -> None:
    folder = saved(tmp_path, 3)
    save(folder, example(3, state={"again": True}))
    assert load(folder).state == {"again": True}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_a_state_that_is_no_json_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path / "step_000001", example(state={"bad": {1, 2}}))
    assert list(tmp_path.iterdir()) == []


def test_kept_versions_are_loaded_as_they_were_published(tmp_path: Path) -> None:
    """In any order, in dtypes of their own, and apart from the checkpoint itself."""
    content = example(12)
    kept = {
        version: {name: tensor.bfloat16() - version for name, tensor in content.weights.items()}
        for version in (11, 9, 10)
    }
    save(tmp_path / "step_000012", content, kept)
    found = load_kept(tmp_path / "step_000012")
    assert list(found) == [9, 10, 11]
    assert {tensor.dtype for tensors in found.values() for tensor in tensors.values()} == {
        torch.bfloat16
    }
    assert all(checksum(found[version]) == checksum(kept[version]) for version in kept)
    manifest = json.loads((tmp_path / "step_000012" / MANIFEST).read_text())
    assert manifest["kept_versions"] == [9, 10, 11]
    assert {f"version_{version:06d}.safetensors" for version in kept} < manifest["files"].keys()
    assert same_bits(load(tmp_path / "step_000012").weights, content.weights)


def test_a_checkpoint_without_kept_versions_has_none(tmp_path: Path) -> None:
    assert load_kept(saved(tmp_path, 1)) == {}


@pytest.mark.parametrize("version", [-1, 7, 8])
def test_only_older_versions_are_kept(tmp_path: Path, version: int) -> None:
    content = example(7)
    with pytest.raises(ValueError, match=f"kept version {version} is not older than .* \\(7\\)"):
        save(tmp_path / "step_000007", content, {version: content.weights})
    assert list(tmp_path.iterdir()) == []


def test_a_kept_version_of_other_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kept version 6 has other tensors: \['b'\]"):
        save(tmp_path / "step_000007", example(7), {6: {"a.exp_avg.weight": torch.zeros(2, 3)}})
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_from_before_kept_versions_is_read(tmp_path: Path) -> None:
    """Same format version: its manifest only lacks the two newer fields."""
    folder = saved(tmp_path, 1)
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["kept_versions"], manifest["digest"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert latest(tmp_path) == folder
    assert load(folder).policy_version == 1
    assert load_kept(folder) == {}


def test_tensors_that_safetensors_refuses_leave_nothing_behind(tmp_path: Path) -> None:
    """Two names for one memory."""
    content = example(7)
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError, match="share memory"):
        save(tmp_path / "step_000007", replace(content, weights={"a": shared, "b": shared}))
    assert list(tmp_path.iterdir()) == []


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(folder: Path, name: str = OPTIMIZER) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)


def lose_a_file(folder: Path) -> None:
    (folder / EMA).unlink()


KEPT = "version_000009.safetensors"


def lose_a_kept_version(folder: Path) -> None:
    (folder / KEPT).unlink()


def flip_a_bit_of_a_kept_version(folder: Path) -> None:
    flip_a_bit(folder, KEPT)


def unlist_a_kept_version(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"][KEPT]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def keep_what_is_no_version(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"kept_versions": ["nine"]}))


def change_a_digit_of_the_manifest(folder: Path) -> None:
    """JSON as before, another prompt next."""
    text = (folder / MANIFEST).read_text()
    assert text.count('"seed": 4611686018427387904') == 1
    (folder / MANIFEST).write_text(text.replace("4611686018427387904", "4611686018427387905"))


def lose_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def cut_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"format_version": 1, "files"')


def empty_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{}")


def raise_the_format(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format_version": 2}))


def unlist_the_weights(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["files"][WEIGHTS]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def lose_the_optimizer_step(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["optimizer_step"], manifest["state"]
    (folder / MANIFEST).write_text(json.dumps(manifest))


DAMAGES = [
    (lose_the_optimizer_step, "manifest.json is damaged: it has no optimizer_step, state"),
    (truncate, "is damaged: the checksum of weights.safetensors is not the manifest's"),
    (flip_a_bit, "is damaged: the checksum of optimizer.safetensors is not the manifest's"),
    (lose_a_file, "is damaged: ema.safetensors is missing"),
    (lose_the_manifest, "is no checkpoint: it has no manifest.json"),
    (cut_the_manifest, "manifest.json is damaged: JSONDecodeError"),
    (empty_the_manifest, "manifest.json is damaged: KeyError('format_version')"),
    (raise_the_format, "has checkpoint format 2, this code reads format 1"),
    (unlist_the_weights, "is damaged: weights.safetensors is missing"),
    (change_a_digit_of_the_manifest, "manifest.json is damaged: its checksum is not its own"),
]
KEPT_DAMAGES = [
    (lose_a_kept_version, f"is damaged: {KEPT} is missing"),
    (unlist_a_kept_version, f"is damaged: {KEPT} is missing"),
    (flip_a_bit_of_a_kept_version, f"is damaged: the checksum of {KEPT} is not the manifest's"),
    (keep_what_is_no_version, "manifest.json is damaged: ValueError"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[d.__name__ for d, _ in DAMAGES])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, damage, message: str
) -> None:
    before, newest = saved(tmp_path, 9), saved(tmp_path, 10)
    assert latest(tmp_path) == newest
    damage(newest)
    with pytest.raises(CheckpointError) as caught:
        load(newest)
    assert message in str(caught.value)
    with pytest.warns(UserWarning, match="passing over a checkpoint: .*step_000010"):
        assert latest(tmp_path) == before


@pytest.mark.parametrize(
    ("damage", "message"), KEPT_DAMAGES, ids=[d.__name__ for d, _ in KEPT_DAMAGES]
)
def test_a_damaged_kept_version_damages_the_checkpoint(
    tmp_path: Path, damage, message: str
) -> None:
    before, newest = saved(tmp_path, 9), saved(tmp_path, 10, keeping=True)
    assert latest(tmp_path) == newest
    damage(newest)
    for read in (load, load_kept):
        with pytest.raises(CheckpointError) as caught:
            read(newest)
        assert message in str(caught.value)
    with pytest.warns(UserWarning, match="passing over a checkpoint: .*step_000010"):
        assert latest(tmp_path) == before


def test_without_a_whole_checkpoint_there_is_no_latest(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None
    lose_the_manifest(saved(tmp_path, 1))
    with pytest.warns(UserWarning, match="passing over"):
        assert latest(tmp_path) is None


def test_a_file_that_is_listed_but_no_safetensors_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    (folder / WEIGHTS).write_bytes(b"not tensors")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][WEIGHTS] = digest(folder / WEIGHTS)
    manifest["digest"] = manifest_digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    check(folder)
    with pytest.raises(CheckpointError, match="step_000001"):
        load(folder)


def test_order_is_by_number_and_only_checkpoints_count(tmp_path: Path) -> None:
    for version in (999_999, 1_000_000, 2):
        saved(tmp_path, version)
    (tmp_path / f".step_2000000.1@{HOST}.partial").mkdir()
    (tmp_path / "step_best").mkdir()
    assert latest(tmp_path) == tmp_path / "step_1000000"


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    folders = [saved(tmp_path, version) for version in (1, 2, 3, 10)]
    (tmp_path / "notes").mkdir()
    assert prune(tmp_path, 2) == [folders[1], folders[0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step_000003", "step_000010"]
    assert prune(tmp_path, 5) == []
    with pytest.raises(ValueError, match="keep = 0 must be >= 1"):
        prune(tmp_path, 0)


def test_names_are_of_what_was_whole_once(tmp_path: Path) -> None:
    assert names(tmp_path / "missing") == []
    lose_the_manifest(saved(tmp_path, 10))
    flip_a_bit(saved(tmp_path, 9))
    (tmp_path / f".step_000011.1@{HOST}.partial").mkdir()
    assert names(tmp_path) == ["step_000009", "step_000010"]


def test_a_removal_begins_with_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a removal that is interrupted could leave what looks whole until all of it is read."""
    oldest, newest = saved(tmp_path, 1), saved(tmp_path, 2)
    seen: list[set[str]] = []
    remove = shutil.rmtree

    def watched(folder: Path) -> None:
        seen.append({path.name for path in folder.iterdir()})
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", watched)
    assert prune(tmp_path, 1) == [oldest]
    assert seen == [{WEIGHTS, OPTIMIZER, EMA}]
    assert latest(tmp_path) == newest


def test_prune_spares_what_it_is_told_to(tmp_path: Path) -> None:
    """Whether a spared one is among the newest, is older, or isn't there."""
    folders = [saved(tmp_path, version) for version in (1, 2, 3, 10)]
    spare = {"step_000002", "step_000010", "step_000077"}
    assert prune(tmp_path, 1, spare) == [folders[2], folders[0]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000002", "step_000010"]
    assert latest(tmp_path) == folders[3]
    assert prune(tmp_path, 1) == [folders[1]]


@pytest.mark.parametrize("spare", ["step_000002", ["best"], ["/runs/a/checkpoints/step_000002"]])
def test_what_prune_spares_are_names(tmp_path: Path, spare) -> None:
    folders = [saved(tmp_path, version) for version in (2, 3)]
    with pytest.raises(ValueError, match="is no name such as 'step_000040'"):
        prune(tmp_path, 1, spare)
    assert all(folder.is_dir() for folder in folders)


@pytest.fixture
def dead() -> int:
    """Number of a process that is gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return gone.pid


def test_prune_sweeps_what_killed_processes_left(tmp_path: Path, dead: int) -> None:
    """Of a process that is gone, of one that lives, and folders that look a little like it."""
    newest = saved(tmp_path, 3)
    swept = [f".step_000002.{dead}@{HOST}.partial", f".step_000003.{dead}@{HOST}.old"]
    kept = [
        f".step_000002.{os.getpid()}@{HOST}.partial",
        f".step_000001.1@{HOST}.old",  # process 1 lives, whoever it belongs to
        f".step_best.{dead}@{HOST}.old",
        f".step_000001.{dead}@{HOST}.partial.txt",
    ]
    for name in [*swept, *kept]:
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS).write_bytes(b"half")
    assert prune(tmp_path, 1) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, newest.name])


def test_prune_leaves_a_save_of_another_machine_alone_until_it_is_stale(
    tmp_path: Path, dead: int
) -> None:
    """Its process has a number that nobody has here. The youngest file counts."""
    saved(tmp_path, 1)
    for name, folder_age_s, file_age_s in [
        ("under_way", 0, 0),
        ("writing", 2 * STALE_S, 60),
        ("stale", 2 * STALE_S, 1.1 * STALE_S),
    ]:
        folder = tmp_path / f".step_000002.{dead}@{name}.partial"
        folder.mkdir()
        (folder / WEIGHTS).write_bytes(b"half")
        for path, age_s in ((folder / WEIGHTS, file_age_s), (folder, folder_age_s)):
            os.utime(path, (time.time() - age_s,) * 2)
    prune(tmp_path, 1)
    left = {path.name.split("@")[-1] for path in tmp_path.glob(".step_*")}
    assert left == {"under_way.partial", "writing.partial"}


def test_a_checkpoint_that_was_being_replaced_is_found_and_gets_its_name_back(
    tmp_path: Path, dead: int
) -> None:
    """The save was killed between its two renames, and the only other checkpoint is older."""
    older, newest = saved(tmp_path, 9), saved(tmp_path, 10)
    hidden = tmp_path / f".step_000010.{dead}@{HOST}.old"
    newest.rename(hidden)
    assert latest(tmp_path) == hidden
    assert load(hidden).policy_version == 10
    assert names(tmp_path) == ["step_000009", "step_000010"]
    assert described(hidden).startswith(f"{newest} (found as {hidden.name}, where a save")
    assert described(older) == str(older)
    assert prune(tmp_path, 1) == [older]
    assert latest(tmp_path) == newest
    assert [path.name for path in tmp_path.iterdir()] == ["step_000010"]


def test_a_process_of_somebody_else_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(process: int, signal: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", denied)
    (tmp_path / f".step_000001.12345@{HOST}.partial").mkdir()
    prune(tmp_path, 1)
    assert (tmp_path / f".step_000001.12345@{HOST}.partial").is_dir()
