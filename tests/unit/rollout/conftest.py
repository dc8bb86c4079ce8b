from pathlib import Path

import pytest

from tests.tiny_models import build_tiny_sd3


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random SD3 pipeline folder; don't change it."""
    return build_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny_sd3")
