"""Checkpoint folders: whole, damaged, replaced, pruned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learner.checkpoint import (
    EMA,
    MANIFEST,
    OPTIMIZER,
    WEIGHTS,
    Checkpoint,
    CheckpointError,
    OptimizerState,
    _digest,
    check,
    latest,
    load,
    prune,
    save,
)
from tests.unit.learner.helpers import same_bits


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


def saved(directory: Path, version: int) -> Path:
    folder = directory / f"step_{version:06d}"
    save(folder, example(version))
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


def test_a_save_that_dies_halfway_is_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = saved(tmp_path, 1)

    def full_disk(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("learner.checkpoint._flush", full_disk)
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path, 2)
    assert latest(tmp_path) == first
    monkeypatch.undo()
    assert latest(tmp_path) == first
    assert latest(tmp_path) != saved(tmp_path, 2)
    assert latest(tmp_path) == tmp_path / "step_000002"


def truncate(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / OPTIMIZER).read_bytes())
    content[-1] ^= 1
    (folder / OPTIMIZER).write_bytes(content)


def lose_a_file(folder: Path) -> None:
    (folder / EMA).unlink()


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
    manifest["files"][WEIGHTS] = _digest(folder / WEIGHTS)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    check(folder)
    with pytest.raises(CheckpointError, match="step_000001"):
        load(folder)


def test_order_is_by_number_and_only_checkpoints_count(tmp_path: Path) -> None:
    for version in (999_999, 1_000_000, 2):
        saved(tmp_path, version)
    (tmp_path / ".step_2000000.1.partial").mkdir()
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


def test_prune_sweeps_what_killed_processes_left(tmp_path: Path) -> None:
    """Of a process that is gone, of one that lives, and folders that look a little like it."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead = [f".step_000002.{gone.pid}.partial", f".step_000001.{gone.pid}.old"]
    kept = [
        f".step_000002.{os.getpid()}.partial",
        ".step_000001.1.old",  # process 1 lives, whoever it belongs to
        f".step_best.{gone.pid}.old",
        f".step_000001.{gone.pid}.partial.txt",
    ]
    for name in [*dead, *kept]:
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS).write_bytes(b"half")
    newest = saved(tmp_path, 3)
    assert prune(tmp_path, 1) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, newest.name])


def test_a_process_of_somebody_else_lives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(process: int, signal: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", denied)
    (tmp_path / ".step_000001.12345.partial").mkdir()
    prune(tmp_path, 1)
    assert (tmp_path / ".step_000001.12345.partial").is_dir()
