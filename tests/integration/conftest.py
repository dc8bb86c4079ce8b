"""A real local Ray for the tests that need one."""

import shutil
import tempfile
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for the whole session; it ends what it started.

    Eight logical CPUs, so that small actors fit on any machine. Code in its workers counts for
    coverage, see tests/coverage_plugin.py. A test ends the actors that it made.
    """
    # A Unix socket's path is at most 107 bytes long, and pytest's tmp_path is too long for that.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=256 * 2**20,
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
