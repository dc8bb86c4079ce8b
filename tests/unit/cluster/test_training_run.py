"""A whole run on the fake backend, in a folder and at a URL: begun, broken off, continued, refused."""

import json
import platform
import shutil
import subprocess
import sys
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.backend import PartLost, ScoreAnswer, WeightsAnswer
from cluster.config import ConfigError, load, user_mistakes
from cluster.events import StopRequested
from cluster.open_run import chosen_folder, open_folder
from cluster.remote_folder import fetched, written
from cluster.remote_path import place_at
from cluster.run_folder import read_metrics
from cluster.tensor_arrays import as_tensors
from cluster.training_run import RunGivenUp, TrainingRun
from learner.checkpoint import CheckpointError, latest, names
from learner.checkpoint import load as load_checkpoint
from learner.checkpoint import save as save_checkpoint
from rewards.base import FailureKind, RewardFailure, RewardValues
from rollout.families.trainable import checksum
from rollout.records import EvaluationImages, WeightReport
from rollout.stats import RolloutStats
from tests.fake_backend import LEARNER, FakeBackend
from tests.unit.cluster.fleets import SETTINGS
from tests.unit.learner.saves import example

GOING_ON = "test: the machine is gone"


class StoringBackend(FakeBackend):
    """A fake whose checkpoints are files, as learner rank 0 writes them, and which can be evaluated with."""

    def __init__(self, run):
        super().__init__(run.plan)
        self.run = run
        self.rows_at_save: list[tuple[int, int]] = []
        """(Iterations behind a checkpoint, metrics rows that its run folder had when it was written.)"""
        self.breaks_at = 0
        """Version after which the learner raises instead of training."""
        self.older: dict[str, list[WeightsAnswer]] = {}
        """The older versions beside each checkpoint; gone with this process."""
        self.is_blind = False
        """Whether drawing held-out images raises."""

    def sample_images(self, worker, prompts, noise_ids, num_steps, guidance_scale, noise_seed):
        assert self.loaded[worker] == -1, "an evaluation's weights have no version"
        count = len(prompts)
        drawn = EvaluationImages(
            images=np.zeros((count, 4, 4, 3), np.uint8),
            initial_latents=np.zeros((count, 2), np.float32),
            stats=RolloutStats(num_images=count),
        )

        def answer() -> EvaluationImages:
            if self.is_blind:
                raise RuntimeError(GOING_ON)
            return drawn

        return self._later(("worker", worker), "evaluate", answer)

    def score(self, reward, replica, previews, request):
        if request is not None:
            return super().score(reward, replica, previews, request)
        values = RewardValues(columns={reward: np.arange(len(previews.prompts), dtype=float)})
        answer = ScoreAnswer(samples=previews.samples, states=previews.states, outcome=values)
        return self._later(("replica", replica), "score", lambda: answer, serial=False)

    def weights(self, kind):
        def answer() -> WeightsAnswer:
            text = f"sum {self.version}"
            return WeightsAnswer(tensors=text, version=self.version, checksum=text, num_bytes=4)

        return self._later(LEARNER, "weights", answer)

    def load_weights(self, worker, version, tensors):
        def answer() -> WeightReport:
            self.loaded[worker] = version
            found = tensors if isinstance(tensors, str) else checksum(as_tensors(tensors))
            return WeightReport(version=version, num_tensors=1, checksum=found)

        return self._later(("worker", worker), "load", answer)

    def _learn(self, groups):
        if self.version == self.breaks_at and self.breaks_at:
            raise RuntimeError(GOING_ON)
        stats = super()._learn(groups)
        lists = {"gain_per_step": [0.1], "abs_advantage_per_step": [0.1], "grad_norm": [1.0]}
        return replace(stats, seconds={}, **lists)

    def save_checkpoint(self, folder, state, older):
        def save() -> None:
            with fetched(self.run.place.where / "metrics.jsonl") as metrics:
                rows = metrics.read_text().splitlines()
            self.rows_at_save.append((state["consumed"], len(rows)))
            content = replace(example(self.version, numel=2), ema=None, state=state)
            with written(folder) as place:
                save_checkpoint(Path(place), content)
            self.older[folder] = list(older)

        return self._later(LEARNER, "save", save)

    def load_checkpoint(self, folder):
        def load_() -> tuple[dict, list]:
            with fetched(place_at(folder)) as place:
                found = load_checkpoint(place)
            self.version = found.policy_version
            return found.state, self.older.get(folder, [])

        return self._later(LEARNER, "load", load_)

    def export(self, folder, kind):
        def export() -> None:
            with written(folder) as place:
                Path(place).mkdir(parents=True, exist_ok=True)
                (Path(place) / "lora.safetensors").write_text(kind)

        return self._later(LEARNER, "export", export)


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Where staging and scratch folders are made."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))


@pytest.fixture
def config(tmp_path):
    """A loader of configs of one run in tmp_path/run, four iterations, a checkpoint after every second."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in "abc"))

    def load_(*overrides):
        return load(
            "configs/quickstart.toml",
            [
                *SETTINGS,
                'model.family="tests.fake_family:GaussianFamily"',
                f'prompts.path="{prompts}"',
                f'evaluation.path="{prompts}"',
                'evaluation.strict=""',
                f'run.dir="{tmp_path}/run"',
                "run.resume=auto",
                "run.checkpoint_every=2",
                "rollout.workers=2",
                *overrides,
            ],
        )

    return load_


def opened(config):
    """A run as `cluster.train` makes it, on a StoringBackend."""
    place, continued = open_folder(chosen_folder(config), config)
    run = TrainingRun(config, place, continued)
    if not continued:
        run.begin()
    backend = StoringBackend(run)
    run.open(backend)
    return run, backend


def started(config):
    run, backend = opened(config)
    with user_mistakes():
        run.start()
    return run, backend


def broken_off(config, after):
    """A run whose process ended after so many iterations; nothing was tidied up."""
    run, backend = started(config)
    backend.breaks_at = after
    with pytest.raises(RuntimeError, match=GOING_ON):
        run.go()
    return run, backend


def dies_once(backend, version, meanwhile=lambda: None):
    """Have the learner die, once, of training from a version; the list that is returned holds it then."""
    killed = []

    def dying(part, kind):
        if kind != "learn" or backend.version != version or killed:
            return False
        meanwhile()
        killed.append(part)
        return True

    backend.dying = dying
    return killed


def breaks_in_a_look(config, iteration):
    """A run whose process ended within its look after an iteration; nothing was tidied up."""
    run, backend = started(config)
    begin = run.looks.begin

    def blinded(name, kind):
        begin(name, kind)
        backend.is_blind = name.endswith(f"{iteration:06d}")

    run.looks.begin = blinded
    with pytest.raises(RuntimeError, match=GOING_ON):
        run.go()


def damage(checkpoint):
    (checkpoint / "weights.safetensors").write_bytes(b"other")


def test_a_run_at_a_url_is_continued_by_another_machine(config):
    """What the first machine had in its staging folder is lost with it."""
    url = f"memory://{uuid.uuid4().hex}/run"
    wanted = config(f'run.dir="{url}"', "run.keep_checkpoints=1")
    first, before = broken_off(wanted, after=3)
    where = place_at(url)
    assert names(where / "checkpoints") == ["step_000002"]
    with fetched(where / "metrics.jsonl") as path:
        rows = [json.loads(line)["iteration"] for line in path.read_text().splitlines()]
    assert rows == [1, 2], "the third was not pushed; the checkpoint does not claim it"
    second, after = started(wanted)
    assert second.folder != first.folder
    assert second.consumed == 2
    summary = second.go()
    second.place.close()
    assert not second.folder.exists()
    assert [group for batch in [*before.trained[:2], *after.trained] for group, _ in batch] == list(
        range(16)
    )
    assert before.rows_at_save + after.rows_at_save == [(2, 2), (4, 4)]
    found = set(where.files())
    assert {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "curves.png",
        "evaluation/before.jsonl",
        "evaluation/after.jsonl",
        "weights/lora.safetensors",
        "checkpoints/step_000004/manifest.json",
    } <= found
    assert not any("step_000002" in name or "/." in name for name in found)
    with fetched(where / "config.toml") as path:
        assert load(path).run.dir == url
    with fetched(where / "summary.json") as path:
        assert json.loads(path.read_text())["counts"] == summary["counts"]
    assert summary["counts"]["images"] == 4 * 16


@pytest.mark.parametrize("kept_at", ["folder", "url"])
def test_a_run_without_any_whole_checkpoint_is_not_begun_anew(config, kept_at):
    more = [f'run.dir="memory://{uuid.uuid4().hex}/run"'] if kept_at == "url" else []
    first, _ = broken_off(config(*more), after=3)
    where = first.place.where
    (where / "summary.json").write_text("{}")
    (where / "checkpoints" / "step_000002" / "weights.safetensors").write_text("other")
    with (
        pytest.warns(UserWarning, match=r"the checksum of weights\.safetensors"),
        pytest.raises(ConfigError, match="holds step_000002, but none of them is whole"),
    ):
        started(config(*more))
    with fetched(where / "metrics.jsonl") as path:
        assert len(path.read_text().splitlines()) >= 2
    assert (where / "summary.json").is_file()


def test_a_roll_back_to_no_whole_checkpoint_ends_the_run_and_deletes_nothing(config, tmp_path):
    run, backend = started(config())
    newest = tmp_path / "run" / "checkpoints" / "step_000002"
    dies_once(backend, version=3, meanwhile=lambda: damage(newest))
    with (
        pytest.warns(UserWarning, match="passing over a checkpoint"),
        pytest.raises(CheckpointError, match="none of them is whole"),
    ):
        run.go()
    assert [row["iteration"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_before_its_first_checkpoint_a_run_is_begun_anew(config, tmp_path):
    broken_off(config(), after=1)
    assert len(read_metrics(tmp_path / "run")) == 1
    run, _ = started(config())
    assert run.consumed == 0
    assert read_metrics(tmp_path / "run") == []
    assert run.go()["evaluation_counts"]["images"] == 2 * 3, "the one before counts as well"


def test_a_learner_lost_before_the_first_checkpoint_keeps_the_evaluation_before(config):
    run, backend = started(config())
    dies_once(backend, version=1)
    summary = run.go()
    assert summary["rollbacks"] == 1
    assert "evaluation_before" in summary["seconds"]
    assert summary["evaluation_counts"]["images"] == 2 * 3


LOOK = ["evaluation.every=2", "evaluation.both_kinds=true", "run.num_iterations=6"]


def looks_of(folder):
    return sorted(path.name for path in (folder / "evaluation").glob("*iteration_*.jsonl"))


WANTED = [f"{kind}iteration_{n:06d}.jsonl" for kind in ("", "raw_") for n in (2, 4)]


def test_a_look_that_the_process_did_not_outlive_is_taken_again(config, tmp_path):
    more = [*LOOK, "run.keep_checkpoints=1"]
    breaks_in_a_look(config(*more), iteration=4)
    assert looks_of(tmp_path / "run") == [name for name in WANTED if "000002" in name]
    assert json.loads((tmp_path / "run" / "best.json").read_text())["iteration"] == 2
    again, _ = started(config(*more))
    summary = again.go()
    assert looks_of(tmp_path / "run") == WANTED
    assert summary["evaluation_counts"]["images"] == (2 + 2 * 2) * 3
    assert again.looks.unfinished() == []


def test_a_slow_look_is_taken_again_after_a_roll_back(config, tmp_path):
    """The learner dies while it trains on beside a look; the checkpoint of the look's iteration is still there."""
    run, backend = started(
        config(*LOOK, "run.max_policy_lag=1", "run.checkpoint_every=1", "run.keep_checkpoints=1")
    )
    usual = backend.seconds
    run._evaluate("before", "raw")
    backend.seconds = lambda kind: 1000.0 if kind == "evaluate" else usual(kind)
    killed = dies_once(backend, version=3, meanwhile=lambda: setattr(backend, "seconds", usual))
    summary = run.go()
    assert killed
    assert summary["rollbacks"] == 1
    assert looks_of(tmp_path / "run") == WANTED
    assert summary["evaluation_counts"]["images"] == (2 + 2 * 2) * 3


def test_a_look_that_is_taken_again_does_not_wake_the_controller_before_the_roll_back(config):
    """Without a lag the controller waits for the look; the look's weights go away with their node meanwhile."""
    run, backend = started(config(*LOOK, "rollout.workers=1"))
    usual, lost = backend.load_weights, []

    def load_weights(worker, version, tensors):
        if version != -1 or backend.version != 2 or lost:
            return usual(worker, version, tensors)
        lost.append(worker)

        def answer() -> WeightReport:
            raise PartLost("the node is gone", is_data=True)

        return backend._later(("worker", worker), "slow", answer)

    quick = backend.seconds
    backend.seconds = lambda kind: 100.0 if kind == "slow" else quick(kind)
    backend.load_weights = load_weights
    summary = run.go()
    assert lost
    assert summary["rollbacks"] == 1
    assert [group for batch in backend.trained for group, _ in batch] == list(range(6 * 4))
    assert [row["incarnation"] for row in read_metrics(run.folder)] == [0, 0, 1, 1, 1, 1]
    assert summary["evaluation_counts"]["images"] == (2 + 2 * 2) * 3


def test_a_look_that_ends_while_the_run_stops_does_not_start_it_again(config):
    """Without a lag the controller waits for the look; SIGTERM comes meanwhile, and a checkpoint takes longer."""
    run, backend = started(config(*LOOK))
    quick = backend.seconds
    slow = {"evaluate": 30.0, "save": 200.0}
    run._evaluate("before", "raw")
    backend.seconds = lambda kind: slow.get(kind) or quick(kind)
    begin = run.looks.begin

    def stopped(name, kind):
        begin(name, kind)
        run.fleet.events.stop_requested = True

    run.looks.begin = stopped
    with pytest.raises(StopRequested):
        run.go()
    run.stop()
    assert len(backend.trained) == 2
    assert run.looks.done, "it ended while the checkpoint was written"
    assert run.consumed == 2


@pytest.mark.parametrize("lag", [0, 1])
def test_a_look_that_is_due_while_the_run_stops_is_taken_when_it_goes_on(config, tmp_path, lag):
    wanted = config(*LOOK, f"run.max_policy_lag={lag}")
    run, backend = started(wanted)
    learn = backend.learn

    def stopped(groups):
        run.fleet.events.stop_requested = backend.version == 1
        return learn(groups)

    backend.learn = stopped
    with pytest.raises(StopRequested):
        run.go()
    run.stop()
    assert len(backend.trained) == 2
    assert looks_of(tmp_path / "run") == []
    again, its_backend = opened(wanted)
    its_backend.older = backend.older
    again.start()
    assert again.consumed == 2
    again.go()
    assert looks_of(tmp_path / "run") == WANTED


def test_a_look_whose_scoring_fails_for_good_is_noted_and_the_run_goes_on(config, tmp_path):
    run, backend = started(config(*LOOK))
    score = backend.score

    def failing(reward, replica, previews, request):
        future = score(reward, replica, previews, request)
        if request is None and backend.version == 2:
            failure = RewardFailure(
                kind=FailureKind.EXCEPTION, reward=reward, message="boom", num_images=3
            )
            backend._answers[future] = (
                ("replica", replica),
                lambda: ScoreAnswer.failed(failure),
            )
        return future

    backend.score = failing
    assert run.go()["status"] == "finished"
    assert len(backend.trained) == 6
    assert looks_of(tmp_path / "run") == [name for name in WANTED if "000004" in name]
    book = json.loads((tmp_path / "run" / "evaluation" / "looks.json").read_text())["looks"]
    assert "boom" in book["iteration_000002"]["failed"]
    assert run.looks.unfinished() == [], "a run that goes on does not try again"


def test_a_look_whose_checkpoint_is_gone_is_left_out_and_said(config, tmp_path, capsys):
    breaks_in_a_look(config(*LOOK), iteration=2)
    again, _ = started(config(*LOOK))
    assert again.consumed == 2
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000002")
    again.go()
    assert "evaluation iteration_000002 can't be done again" in " ".join(
        capsys.readouterr().out.split()
    )
    assert looks_of(tmp_path / "run") == [name for name in WANTED if "000004" in name]


def test_an_upload_that_did_not_end_is_no_reason_to_refuse(config):
    url = f"memory://{uuid.uuid4().hex}/run"
    broken_off(config(f'run.dir="{url}"'), after=1)
    (place_at(url) / "checkpoints" / "step_000002" / "weights.safetensors").write_text("half")
    with pytest.warns(UserWarning, match="is no checkpoint"):
        run, _ = started(config(f'run.dir="{url}"'))
    assert run.consumed == 0


def test_the_summary_of_a_finished_run_goes_only_when_there_is_more_to_train(config, tmp_path):
    """And config.toml says what was run until then."""
    broken_off(config(), after=3)
    summary, kept = tmp_path / "run" / "summary.json", tmp_path / "run" / "config.toml"
    summary.write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.num_iterations = 1, but .* is 2 iterations in"):
        started(config("run.num_iterations=1"))
    assert summary.is_file()
    assert load(kept).run.num_iterations == 4
    started(config("run.num_iterations=2"))
    assert summary.is_file(), "nothing is left to train: the run has still ended"
    started(config("run.num_iterations=6"))
    assert not summary.exists()
    assert load(kept).run.num_iterations == 6


def test_a_checkpoint_that_a_killed_save_moved_aside_is_shown_by_its_name(config, tmp_path, capsys):
    broken_off(config(), after=3)
    checkpoints = tmp_path / "run" / "checkpoints"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    hidden = f".step_000002.{gone.pid}@{platform.node()}.old"
    (checkpoints / "step_000002").rename(checkpoints / hidden)
    run, _ = started(config())
    assert run.consumed == 2
    text = " ".join(capsys.readouterr().out.split())
    assert f"iteration 2 from {checkpoints}/step_000002 (found as {hidden}, where" in text
    run.checkpoints.prune()
    assert latest(checkpoints) == checkpoints / "step_000002"


def test_the_checkpoint_that_a_run_went_back_to_is_kept_until_there_is_a_newer_whole_one(
    config, tmp_path
):
    """One that is damaged counts among the newest, and must not push it out."""
    checkpoints = tmp_path / "run" / "checkpoints"
    broken_off(config("run.num_iterations=6"), after=5)
    assert names(checkpoints) == ["step_000002", "step_000004"]
    damage(checkpoints / "step_000004")
    with pytest.warns(UserWarning, match="step_000004 is damaged"):
        run, _ = started(config("run.num_iterations=6", "run.keep_checkpoints=1"))
    assert run.consumed == 2
    run.checkpoints.prune()
    assert (checkpoints / "step_000002").is_dir()


def test_a_lost_learner_goes_back_to_a_checkpoint_at_a_url(config):
    url = f"memory://{uuid.uuid4().hex}/run"
    run, backend = started(config(f'run.dir="{url}"'))
    killed = dies_once(backend, version=3)
    run.go()
    run.place.close()
    assert run.state.rollbacks == 1
    assert backend.rows_at_save == [(2, 2), (4, 5)], "the third iteration was written twice"
    assert killed == [LEARNER]


def dies_at_start(backend, kind, times):
    """Have the learner die in its first `times` calls of that kind."""
    asked = []

    def dying(part, asked_kind):
        if part == LEARNER and asked_kind == kind:
            asked.append(kind)
        return part == LEARNER and asked_kind == kind and len(asked) <= times

    backend.dying = dying


def test_a_learner_that_dies_while_it_starts_is_started_again(config):
    run, backend = opened(config())
    dies_at_start(backend, "start", 2)
    run.start()
    assert run.go()["counts"]["images"] == 4 * 16
    assert [len(batch) for batch in backend.trained] == [4] * 4


def test_a_learner_that_never_starts_ends_the_run(config):
    run, backend = opened(config())
    dies_at_start(backend, "start", 99)
    with pytest.raises(RunGivenUp, match="10 times while it started"):
        run.start()


def test_a_learner_that_dies_over_its_checkpoint_at_a_resume_is_started_again(config):
    broken_off(config(), after=3)
    run, backend = opened(config())
    dies_at_start(backend, "load", 1)
    run.start()
    assert run.consumed == 2
    assert run.go()["rollbacks"] == 1
    assert len(read_metrics(run.folder)) == 4


def test_starts_that_fail_on_a_dying_node_are_no_roll_backs(config):
    """A kill, another before the next checkpoint, and a start that fails: two roll-backs, and the run goes on."""
    run, backend = opened(config())
    run.start()
    learned, starts = [], []

    def dying(part, kind):
        if kind == "learn":
            learned.append(kind)
            return len(learned) in (3, 4)
        if kind == "start" and part == LEARNER:
            starts.append(kind)
            return len(starts) in (2, 3, 4)
        return False

    backend.dying = dying
    assert run.go()["rollbacks"] == 2
    assert len(starts) == 5
    assert len(read_metrics(run.folder)) == 4
