"""A run's name on a real Ray, and what is made of ranks that fail together, one of them by its end."""

import os
import signal
import time

import pytest
import ray

from cluster import actors_control
from cluster.actors_backend import _joint_answer
from cluster.actors_control import ask_run, claimed
from cluster.backend import PartLost, ScaleCommand
from cluster.cli import main
from cluster.config import ConfigError
from tests.integration.test_system import settings


def test_a_second_driver_is_refused_before_it_touches_the_folder(
    ray_session, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(actors_control, "NAME_TAKEN_S", 2.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".token-of-the-first").write_text("1")
    with claimed(f"run {tmp_path / 'run'}"):
        words = settings(tmp_path, f'run.dir="{tmp_path / "run"}"')
        assert main(["train", "configs/quickstart.toml", *words]) == 2
    assert "another driver on this cluster has the same run folder" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".driver",
        ".token-of-the-first",
    ]


def test_a_name_is_free_again_when_its_driver_has_ended(ray_session, monkeypatch):
    monkeypatch.setattr(actors_control, "NAME_TAKEN_S", 30.0)
    for number in range(2):
        with claimed("run of a test") as control:
            ray.get(control.report.remote({"iteration": number}))
            command = ScaleCommand(rollout_workers=3)
            assert ask_run("run of a test", command, None) == {"iteration": number}
            assert ray.get(control.next.remote()) == command
    with pytest.raises(ConfigError, match="no run of a test is going on"):
        ask_run("run of a test", ScaleCommand(rollout_workers=3), None)


@ray.remote(num_cpus=0)
class Rank:
    """A rank of a joint call that ends in one way or another."""

    def fail(self, seconds):
        time.sleep(seconds)
        raise RuntimeError("Connection closed by peer")

    def die(self, seconds):
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def answer(self, seconds):
        time.sleep(seconds)
        return "well"


@pytest.mark.parametrize(
    ("ends", "expected", "match"),
    [
        (["fail", "die"], PartLost, "ActorDiedError"),
        (["die", "fail"], PartLost, "ActorDiedError"),
        (["answer", "die"], PartLost, "ActorDiedError"),
        (["fail", "fail"], RuntimeError, "Connection closed by peer"),
        (["answer", "fail"], RuntimeError, "Connection closed by peer"),
    ],
)
def test_the_end_of_a_rank_is_the_reason_of_the_others_errors(ray_session, ends, expected, match):
    """The second rank ends a second after the first, as Ray notices a death after the survivors' errors."""
    ranks = [Rank.remote() for _ in ends]
    ray.get([rank.answer.remote(0) for rank in ranks])
    first, *others = [
        getattr(rank, end).remote(delay)
        for rank, end, delay in zip(ranks, ends, (0.0, 1.0), strict=True)
    ]
    with pytest.raises(expected, match=match):
        _joint_answer(first, others)
    for rank in ranks:
        ray.kill(rank)


def test_ranks_that_answer_give_the_first_one_s_answer(ray_session):
    ranks = [Rank.remote() for _ in range(2)]
    first, second = ranks[0].answer.remote(0.0), ranks[1].answer.remote(0.5)
    assert _joint_answer(first, [second]) == "well"
    for rank in ranks:
        ray.kill(rank)
