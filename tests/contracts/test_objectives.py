from typing import ClassVar

from learner.objective import OBJECTIVES
from tests.contracts import uncovered
from tests.contracts.objective import ObjectiveContract


class TestPpoClip(ObjectiveContract):
    name = "ppo_clip"
    settings: ClassVar = {"clip_range": 0.1}


class TestTruncatedPpoClip(ObjectiveContract):
    """exp(0.3) = 1.35 lies beyond."""

    name = "ppo_clip"
    settings: ClassVar = {"clip_range": 0.1, "max_ratio": 1.2}


def test_every_objective_is_under_contract() -> None:
    assert uncovered(ObjectiveContract, OBJECTIVES) == set()
