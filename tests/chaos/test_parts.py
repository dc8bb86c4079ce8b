"""The lingering parts are real ones that take longer: they keep the contracts, mark each phase, change no number."""

import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rollout.config import ModelConfig
from tests.chaos.marks import OFF, linger, read_marks, sweep
from tests.chaos.parts import LingeringReward, before, folder_of
from tests.contracts.family import FamilyContract
from tests.contracts.reward import RewardContract

FAMILY = "tests.chaos.parts:LingeringFamily"
ONE_ITERATION = """
import sys, json
from pathlib import Path
import torch
from rollout.config import ModelConfig
from tests.unit.learner.helpers import make_learner, make_rollout, sample_groups

model = ModelConfig(family="tests.chaos.parts:LingeringFamily", path="linger:" + sys.argv[1])
learner = make_learner(None, model_config=model)
worker = make_rollout(None, model_config=model)
learner.step(sample_groups(worker, learner.weights("raw")))
learner.save_checkpoint(sys.argv[2] + "/step_000001", {})
print(learner.weights("raw")[2])
"""


class TestLingeringFamily(FamilyContract):
    name = FAMILY
    refusal = AssertionError

    @classmethod
    def model_config(cls, folder: Path) -> ModelConfig:
        return ModelConfig(family=FAMILY, path="linger:")


class TestLingeringReward(RewardContract):
    name = "tests.chaos.parts:LingeringReward"
    options: ClassVar[dict[str, Any]] = {}

    def batch(self) -> Any:
        rng = np.random.default_rng(0)
        images = np.stack([rng.integers(0, high, (6, 6, 3), np.uint8) for high in (2, 90, 255)])
        return images, ["a", "b", "c"], [{}, {}, {}]


@pytest.mark.slow
def test_worker_and_learner_mark_their_phases_and_end_with_the_same_weights(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    seen: set[str] = set()
    checksums = []
    for folder in ("", str(marks)):
        program = [sys.executable, "-c", ONE_ITERATION, folder, str(tmp_path)]
        process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        while process.poll() is None:
            seen |= {mark.phase for mark in read_marks(marks)}
            time.sleep(0.005)
        assert process.returncode == 0
        assert process.stdout is not None
        checksums.append(process.stdout.read())
        process.stdout.close()
    assert seen == {"sample", "train", "publish", "checkpoint"}
    assert len(checksums[0]) > 30
    assert checksums[0] == checksums[1]
    assert read_marks(marks) == []


def test_a_reward_marks_what_it_scores_but_not_its_canaries(tmp_path: Path) -> None:
    reward, seen = LingeringReward(str(tmp_path)), list[str]()
    images = np.zeros((2, 4, 4, 3), np.uint8)
    images.flags.writeable = False
    for prompts in (reward.canaries().prompts, ["a", "b"]):
        thread = threading.Thread(target=reward, args=(images, prompts, [{}, {}]))
        thread.start()
        found = list[str]()
        while thread.is_alive():
            found += [mark.phase for mark in read_marks(tmp_path)]
        seen.append(",".join(sorted(set(found))))
    assert seen == ["", "score"]


def test_a_function_is_wrapped_once_and_gives_what_it_gave(tmp_path: Path) -> None:
    module = types.ModuleType("tests.chaos.made_up")
    module.double = lambda number: 2 * number  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[module.__name__] = module
    try:
        before(module.__name__, "double", tmp_path, "seal")
        wrapped = module.double
        before(module.__name__, "double", tmp_path, "seal")
        assert module.double is wrapped
        assert wrapped(21) == 42
    finally:
        del sys.modules[module.__name__]


def test_a_path_without_the_prefix_is_refused() -> None:
    assert folder_of("linger:") is None
    assert folder_of("linger:/a") == Path("/a")
    with pytest.raises(ValueError, match="'/a' must begin with 'linger:'"):
        folder_of("/a")


def test_marks_go_away_at_the_end_and_nobody_lingers_once_it_is_off(tmp_path: Path) -> None:
    thread = threading.Thread(target=linger, args=(tmp_path, "train", 0.2))
    thread.start()
    while not (found := read_marks(tmp_path)):
        pass
    assert [(mark.phase, mark.length_ms) for mark in found] == [("train", 200)]
    assert read_marks(tmp_path, "seal") == []
    sweep(tmp_path)
    assert read_marks(tmp_path) == found, "its process lives"
    thread.join()
    assert read_marks(tmp_path) == []
    (tmp_path / OFF).touch()
    linger(tmp_path, "train", 3600.0)


def test_a_killed_process_leaves_its_mark_until_it_is_swept(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.chaos.marks import linger; "
        f"linger(Path({str(tmp_path)!r}), 'score', 600.0)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    while not (found := read_marks(tmp_path)):
        assert process.poll() is None
    process.kill()
    process.wait()
    assert [mark.pid for mark in found] == [process.pid]
    assert read_marks(tmp_path) == found
    sweep(tmp_path)
    assert read_marks(tmp_path) == []
