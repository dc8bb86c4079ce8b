from pathlib import Path

from rollout.config import ModelConfig
from rollout.families.registry import FAMILIES
from tests.contracts import uncovered
from tests.contracts.family import FamilyContract
from tests.tiny_models import build_tiny_sd3


class TestSd3(FamilyContract):
    name = "sd3"

    @classmethod
    def model_config(cls, folder: Path) -> ModelConfig:
        return ModelConfig(family=cls.name, path=str(build_tiny_sd3(folder)))


class TestPlugIn(FamilyContract):
    name = "tests.fake_family:GaussianFamily"
    refusal = AssertionError  # it stands in for a family and asserts what a real one refuses

    @classmethod
    def model_config(cls, folder: Path) -> ModelConfig:
        return ModelConfig(family=cls.name, path="")


def test_every_family_is_under_contract() -> None:
    assert uncovered(FamilyContract, FAMILIES) == set()
