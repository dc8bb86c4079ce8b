"""Saves without room, and saves by processes that are killed: the checkpoint before is never lost."""

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
TIMEOUT_S = 100
NUM_KILLS = 20
SMALL_DISK = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
"""A mount of its own, that goes away with its processes; no root is needed where users may have
namespaces."""
MOUNT = 'mount -t tmpfs -o size=2m none "$0" && exec "$@"'


def run(directory: Path, *command: str, before: list[str] | None = None) -> Any:
    """What the subprocess printed."""
    program = [sys.executable, "-m", "tests.unit.learner.saves", command[0], str(directory)]
    done = subprocess.run(
        [*(before or []), *program, *command[1:]],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout)


def check_told(told: dict[str, Any], number: int, file: str) -> None:
    """The error names file and folder, nothing is left of the save, and the next one works."""
    assert told["errno"] == number
    assert Path(told["file"]).name == file
    (note,) = told["notes"]
    assert note.startswith("while writing checkpoint /")
    assert "/step_000002; those before it are as they were" in note
    assert told["left"] == ["step_000001"]
    assert (told["latest"], told["latest_with_room"]) == (1, 2)


def test_a_file_that_may_not_grow_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    files = ("weights.safetensors", "optimizer.safetensors", "manifest.json")
    for told, file in zip(run(tmp_path, "limited"), files, strict=True):
        if file == "manifest.json":
            told["file"] = file  # Python names no file when a write fails
        check_told(told, errno.EFBIG, file)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("this system has no unshare to mount a small disk with")
    probe = subprocess.run([*SMALL_DISK, MOUNT, str(tmp_path), "true"], capture_output=True)
    if probe.returncode:
        pytest.skip(f"this system lets no user mount a small disk: {probe.stderr.decode()}")
    files = ("weights.safetensors", "optimizer.safetensors", "version_000001.safetensors")
    answers = run(tmp_path, "full", before=[*SMALL_DISK, MOUNT, str(tmp_path)])
    for told, file in zip(answers, files, strict=True):
        check_told(told, errno.ENOSPC, file)


def test_a_save_killed_at_random_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    seen = run(tmp_path, "at_random", "7", str(NUM_KILLS))
    assert seen["kills"] == NUM_KILLS
    assert seen["partial"] > 0, "no kill fell into a save"


def test_a_save_killed_before_any_of_its_steps_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Also between the renames, when the only checkpoint has no name but a hidden one."""
    seen = run(tmp_path, "everywhere")
    assert seen["kills"] > 20
    assert seen["partial"] > 10
    assert seen["old"] > 0
    assert seen["hidden"] > 0
