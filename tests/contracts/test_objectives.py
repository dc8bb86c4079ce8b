from typing import ClassVar

from learner.objective import OBJECTIVES
from tests.contracts import uncovered
from tests.contracts.objective import ObjectiveContract


class TestPpoClip(ObjectiveContract):
    name = "ppo_clip"
    settings: ClassVar = {"clip_range": 0.1}


def test_every_objective_is_under_contract() -> None:
    assert uncovered(ObjectiveContract, OBJECTIVES) == set()
