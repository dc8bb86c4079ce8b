from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.registry import REWARDS
from rewards.shapes.grammar import CATEGORIES, split
from rewards.shapes.renderer import render
from tests.contracts import uncovered
from tests.contracts.reward import RewardContract

Batch = tuple[NDArray[np.uint8], list[str], list[dict[str, Any]]]


class TestShapes(RewardContract):
    name = "shapes"

    def batch(self) -> Batch:
        """A right scene of each category, but the second and fourth show another prompt's."""
        rng = np.random.default_rng(0)
        records = [split(category)[1][3] for category in CATEGORIES]
        images = np.stack([render(record, rng) for record in records])
        images[[1, 3]] = images[[3, 1]]
        return images, [record["prompt"] for record in records], records


class TestJpeg(RewardContract):
    name = "jpeg"

    def batch(self) -> Batch:
        """Noise of growing strength."""
        rng = np.random.default_rng(0)
        images = np.stack([rng.integers(0, high, (32, 32, 3), np.uint8) for high in (2, 40, 255)])
        return images, ["a", "b", "c"], [{}, {}, {}]


class TestPlugIn(TestJpeg):
    name = "tests.fakes:BrightnessReward"


def test_every_reward_is_under_contract() -> None:
    assert uncovered(RewardContract, REWARDS) == set()
