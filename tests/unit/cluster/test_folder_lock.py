"""One driver a run folder, whichever Ray cluster it has; a driver that is killed keeps nobody out."""

import os
import signal
import subprocess
import sys

import pytest

from cluster.config import ConfigError
from cluster.folder_lock import locked
from cluster.remote_path import place_at

DRIVER = """
import sys, time
from pathlib import Path
from cluster.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("has it", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def driver(tmp_path):
    """Another process that has the lock of tmp_path."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_in_use_is_refused_with_who_has_it(tmp_path, driver):
    message = rf"is in use by process {driver.pid} on .*; stop it first, or choose another run.dir"
    with pytest.raises(ConfigError, match=message), locked(tmp_path, wait_s=0):
        pass


def test_a_killed_driver_gives_its_folder_back(tmp_path, driver):
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    with locked(tmp_path, wait_s=0):
        assert (tmp_path / ".driver").read_text().startswith(f"process {os.getpid()} on ")


def test_a_driver_that_ends_lets_the_next_one_in(tmp_path):
    for _ in range(2):
        with locked(tmp_path, wait_s=0):
            pass


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def unsupported(descriptor, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with locked(tmp_path):
        pass
    assert "has no locks ([Errno 95] Operation not supported)" in caplog.text


def test_an_object_store_has_no_lock():
    where = place_at("memory://bucket/run")
    with locked(where), locked(where):
        assert not where.files()
