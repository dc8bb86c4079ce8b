"""A tiny SD3 and sealed groups sampled from it, made once."""

from pathlib import Path

import pytest

from rollout.trajectory import RecordBatch
from tests.tiny_models import build_tiny_sd3
from tests.unit.learner.helpers import make_learner, make_rollout, sample_groups


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_sd3(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def groups(model: Path) -> list[RecordBatch]:
    """Three groups of version 0."""
    return sample_groups(make_rollout(model), make_learner(model).weights(), num_groups=3)
