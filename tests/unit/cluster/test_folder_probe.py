"""A token that the driver leaves in the run folder, and what those who look for it find instead."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cluster.config import load
from cluster.folder_probe import TOKEN, complaint, node_name, refusal, token_in
from cluster.placement import needs
from cluster.remote_path import RemotePath


@pytest.fixture(params=["path", "url"])
def where(request, tmp_path):
    if request.param == "path":
        return tmp_path
    return RemotePath(f"memory://{uuid.uuid4().hex}/run")


def test_who_shares_the_folder_has_nothing_to_complain_of(where):
    with token_in(where) as token:
        assert complaint(str(where), token, True) is None
        names = [path.name for path in where.glob("*")]
        assert names == [f".token-{token}"], "nothing is left of the try to write"
    assert list(where.glob("*")) == []


def test_a_token_of_a_driver_that_was_killed_is_removed_and_is_not_taken_for_ours(where):
    (where / ".token-old").write_text("old")
    with token_in(where) as token:
        assert [path.name for path in where.glob("*")] == [f".token-{token}"]
        text = complaint(str(where), "old", False)
    assert text is not None
    assert "another one than the driver's: its token is missing" in text


def test_a_folder_that_is_not_there_is_said(where):
    assert complaint(str(where / "nothing"), "token", False) == "there is no such folder"


def test_a_token_with_other_content_is_said(where):
    (where / ".token-a").write_text("b")
    assert complaint(str(where), "a", False) == "the driver's token reads 'b' there"


@pytest.fixture
def nobody() -> Iterator[None]:
    """Root may write everywhere: become somebody else for a while."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    yield
    os.seteuid(was)


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder with a token in it, that everybody may read and nobody write; not below pytest's, which is private."""
    with TemporaryDirectory() as name, token_in(Path(name)):
        Path(name).chmod(0o555)
        yield Path(name)
        Path(name).chmod(0o700)


def test_a_folder_that_cannot_be_written_is_said_to_those_who_must_write(locked, nobody):
    (token,) = [path.name.removeprefix(TOKEN) for path in locked.iterdir()]
    assert complaint(str(locked), token, False) is None
    assert "PermissionError" in str(complaint(str(locked), token, True))


def test_an_error_of_a_stores_driver_is_said(where, monkeypatch):
    with token_in(where) as token:

        def refused(self, text):
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(type(where), "write_text", refused)
        assert complaint(str(where), token, False) is None
        text = complaint(str(where), token, True)
    assert text is not None
    assert text.startswith("OSError: ")
    assert "Read-only file system" in text


def test_a_driver_that_a_node_lacks_is_said():
    assert "Install s3fs" in str(complaint("s3://bucket/run", "token", True))


def test_the_refusal_names_every_node_what_it_saw_and_the_fix():
    text = refusal("/runs/mine", {node_name("abc", "10.0.0.1"): "there is no such folder"})
    assert "run.dir = '/runs/mine'" in text
    assert "node abc (10.0.0.1): there is no such folder" in text
    assert "NFS" in text
    assert "s3://bucket/run" in text
    assert "learner.resources" in text


def test_the_first_need_is_the_learner_ranks():
    """Which check_nodes takes for the part that uses the folder."""
    config = load("configs/quickstart.toml", ["learner.resources={learner=1}"])
    first = needs(config)[0]
    assert (first.part, first.resources["learner"]) == ("learner ranks", 1)
