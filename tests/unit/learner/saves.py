"""What the subprocesses of test_interrupted_saves.py do: python -m tests.unit.learner.saves COMMAND DIRECTORY ...

Each prints one line of JSON. Processes that are to be killed are forks, so that torch is imported
once.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import torch

from learner.checkpoint import (
    Checkpoint,
    OptimizerState,
    latest,
    load,
    load_kept,
    prune,
    save,
)

FILE_EVENTS = {
    "open",
    "os.listdir",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.scandir",
    "shutil.rmtree",
}
"""Python's audit events before each change of the disk."""


def example(version: int, numel: int = 16_384, text: str = "") -> Checkpoint:
    """float32 tensors of `numel` elements: weights and average take one, the optimizer two."""
    tensor = torch.full((numel,), float(version))
    return Checkpoint(
        weights={"w": tensor},
        optimizer=OptimizerState(version, {"w": tensor + 1}, {"w": tensor + 2}),
        ema={"w": tensor + 3},
        policy_version=version,
        identity={"adapter": "full"},
        config_digest="abc",
        state={"text": text},
    )


def kept_with(checkpoint: Checkpoint) -> dict[int, dict[str, torch.Tensor]]:
    return {checkpoint.policy_version - 1: {"w": checkpoint.weights["w"] - 1}}


def save_example(directory: Path, version: int, **size: Any) -> None:
    content = example(version, **size)
    save(directory / f"step_{version:06d}", content, kept_with(content))


def check_whole(folder: Path) -> int:
    """Load everything, compare it with what was saved, and return the version."""
    found, kept = load(folder), load_kept(folder)
    expected = example(found.policy_version)
    wanted = kept_with(expected)
    assert found.ema is not None
    assert expected.ema is not None
    assert kept.keys() == wanted.keys()
    pairs = [
        (found.weights, expected.weights),
        (found.optimizer.exp_avg, expected.optimizer.exp_avg),
        (found.optimizer.exp_avg_sq, expected.optimizer.exp_avg_sq),
        (found.ema, expected.ema),
        *((kept[version], wanted[version]) for version in kept),
    ]
    assert all(torch.equal(ours["w"], saved["w"]) for ours, saved in pairs)
    return found.policy_version


# no room


def in_need(
    directory: Path, tighten: Callable[[], Any], relax: Callable[[], Any], **size: Any
) -> dict[str, Any]:
    """Save version 1, then, where there is no room for it, version 2; then again with room."""
    save_example(directory, 1)
    tighten()
    told: dict[str, Any] = {"errno": None}
    try:
        save_example(directory, 2, **size)
    except OSError as error:
        told = {"errno": error.errno, "notes": error.__notes__, "file": str(error.filename)}
    finally:
        relax()
    told["left"] = sorted(path.name for path in directory.iterdir())
    told["latest"] = check_whole(latest(directory) or directory)
    save_example(directory, 2)
    told["latest_with_room"] = check_whole(latest(directory) or directory)
    shutil.rmtree(directory)
    return told


def limited(directory: Path) -> list[dict[str, Any]]:
    """No file may grow beyond some size: that of the weights, of the optimizer, of the manifest."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))

    cases = [(10_000, {}), (100_000, {}), (4_000, {"numel": 8, "text": "x" * 8_000})]
    return [
        in_need(
            directory / "run", lambda size=size: limit(size), lambda: limit(most), **example_size
        )
        for size, example_size in cases
    ]


def full(directory: Path) -> list[dict[str, Any]]:
    """`directory` is a small disk of its own; fill it up but for some bytes."""
    filler = directory / "filler"

    def fill(free: int) -> None:
        disk = os.statvfs(directory)
        with filler.open("wb") as file:
            file.write(bytes(disk.f_bavail * disk.f_frsize - free))

    rooms = (0, 100_000, 300_000)  # for nothing, for the weights, for all but a kept version
    return [
        in_need(directory / "run", lambda room=room: fill(room), filler.unlink) for room in rooms
    ]


# SIGKILL


def fork(work: Callable[[], Any]) -> int:
    """Start `work` in a fork that never comes back here."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(1 if sys.exc_info()[0] else 0)


def look_after(directory: Path, at_least: int, seen: Counter[str]) -> int:
    """After a kill: the newest checkpoint is whole and no older than the last one seen; pruning
    leaves it alone there. Counts what the kill had left."""
    names = [path.name for path in directory.iterdir()]
    seen["partial"] += any(name.endswith(".partial") for name in names)
    seen["old"] += any(name.endswith(".old") for name in names)
    found = latest(directory)
    assert found is not None, names
    seen["hidden"] += found.name.startswith(".")
    version = check_whole(found)
    assert version >= at_least, (version, at_least, names)
    prune(directory, 1)
    assert [path.name for path in directory.iterdir()] == [f"step_{version:06d}"], names
    found = latest(directory)
    assert found is not None
    assert check_whole(found) == version
    return version


def save_forever(directory: Path, version: int) -> NoReturn:
    """Each version twice, so that saves that replace are hit, too."""
    for number in count(version):
        for _ in range(2):
            save_example(directory, number)
            prune(directory, 2)
    raise AssertionError


def at_random(directory: Path, seed: int, num_kills: int) -> Counter[str]:
    """Kill a process that saves without end, after a random time."""
    delays, seen = random.Random(seed), Counter[str]()
    save_example(directory, 1)
    version = 1
    for _ in range(num_kills):
        child = fork(lambda first=version: save_forever(directory, first))
        time.sleep(delays.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        seen["kills"] += 1
        version = look_after(directory, version, seen)
    return seen


def die_at(number: int) -> None:
    """Have this process killed before its `number`-th change of the disk from now."""
    changes = count()

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def everywhere(directory: Path) -> Counter[str]:
    """Kill a save that replaces the only checkpoint before its first step, its second, ..., until one
    lives to the end."""
    seen = Counter[str]()
    save_example(directory, 1)

    def replace(number: int) -> None:
        die_at(number)
        save_example(directory, 1)

    for number in count():
        status = os.waitpid(fork(lambda number=number: replace(number)), 0)[1]
        look_after(directory, 1, seen)
        if status == 0:
            return seen
        assert status == signal.SIGKILL, status
        seen["kills"] += 1
    raise AssertionError


COMMANDS: dict[str, Callable[..., Any]] = {
    "limited": limited,
    "full": full,
    "at_random": lambda directory, seed, kills: at_random(directory, int(seed), int(kills)),
    "everywhere": everywhere,
}

if __name__ == "__main__":
    warnings.simplefilter("error")  # latest warns of a damaged checkpoint
    print(json.dumps(COMMANDS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])))
