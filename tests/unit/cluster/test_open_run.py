"""Which folder a run may use, and what may differ when it is continued."""

import json
import uuid

import pytest

from cluster.config import ConfigError, load
from cluster.open_run import (
    chosen_folder,
    control_name,
    open_folder,
    settings_that_count,
    write_start,
)
from cluster.remote_path import RemotePath
from cluster.run_folder import CONFIG, ENVIRONMENT


@pytest.fixture
def place(tmp_path):
    """A model folder, a prompt file, a run folder, and a config loader that names them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("0123")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')

    def config(*overrides):
        return load(
            "configs/quickstart.toml",
            [
                f'model.path="{tmp_path}/model"',
                f'prompts.path="{tmp_path}/prompts.jsonl"',
                f'run.dir="{tmp_path}/run"',
                "run.resume=auto",
                *overrides,
            ],
        )

    return tmp_path, config


def opened(config):
    return open_folder(chosen_folder(config), config)


def begun(place):
    folder, config = place
    run_place, continued = opened(config())
    assert not continued
    write_start(run_place.folder, config())
    return folder, config


def test_a_fresh_folder_is_made_and_one_that_holds_the_run_is_continued(place):
    folder, config = begun(place)
    found, continued = opened(config())
    assert continued
    assert found.where == found.folder == folder / "run"
    assert control_name(found.where) == f"run {folder}/run"
    assert load(folder / "run" / CONFIG) == config()


def test_without_a_folder_the_run_gets_one_by_name_and_time(place, tmp_path, monkeypatch):
    config = place[1]()
    monkeypatch.chdir(tmp_path)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": None})})
    found, continued = opened(config)
    assert not continued
    assert found.folder.parent == tmp_path / "runs" / "quickstart"


@pytest.mark.parametrize(
    "override",
    [
        "run.num_iterations=99",
        "run.checkpoint_every=3",
        "rollout.workers=1",
        "learner.num_ranks=2",
        "learner.zero_stage=3",
        "evaluation.every=5",
        "rollout.preview_samples=0",
    ],
)
def test_what_does_not_decide_the_numbers_may_change(place, override):
    _, config = begun(place)
    assert opened(config(override))[1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lr=1e-5", "learner.lr: the run has 0.0"),
        ("run.seed=1", "run.seed: the run has 0, asked for 1"),
        ("sampling.kernel=cps", "sampling.kernel: the run has 'ddim_sde', asked for 'cps'"),
        ("rollout.slices_per_call=2", "rollout.slices_per_call: the run has"),
    ],
)
def test_what_decides_the_numbers_may_not_and_is_named(place, override, message):
    _, config = begun(place)
    with pytest.raises(ConfigError, match="other settings") as caught:
        opened(config(override))
    assert message in str(caught.value)


def test_files_count_by_content_not_by_path(place):
    folder, config = begun(place)
    (folder / "elsewhere.jsonl").write_text('{"prompt": "a"}\n')
    assert opened(config(f'prompts.path="{folder}/elsewhere.jsonl"'))[1]
    (folder / "prompts.jsonl").write_text('{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=r"prompts\.content: the run has"):
        opened(config())
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "model" / "weights").write_text("01234")
    with pytest.raises(ConfigError, match=r"model\.content: the run has"):
        opened(config())


def test_a_folder_with_a_stray_config_is_not_taken_for_a_run(place):
    folder, config = place
    (folder / "run").mkdir()
    (folder / "run" / CONFIG).write_text("")
    with pytest.raises(ConfigError, match=f"no {ENVIRONMENT}: not a run of ours"):
        opened(config())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/run", "Install s3fs"),
        ("nowhere://bucket/run", "Protocol not known: nowhere"),
        ("ftp://user:secret@host/run", "holds a password"),
        ("memory://", "names no folder"),
    ],
)
def test_a_url_that_cannot_be_opened_is_refused(place, url, message):
    with pytest.raises(ConfigError, match=message):
        opened(place[1](f'run.dir="{url}"'))


def test_a_url_that_cannot_be_written_is_refused(place, monkeypatch):
    """Drivers raise errors of their own libraries, such as botocore's NoCredentialsError."""

    class NoCredentials(Exception):
        pass

    def refused(self, text):
        raise NoCredentials("unable to locate credentials")

    monkeypatch.setattr(RemotePath, "write_text", refused)
    with pytest.raises(ConfigError, match="can't be written: unable to locate credentials"):
        opened(place[1]('run.dir="memory://bucket/run"'))


def test_a_run_at_a_url_is_continued_from_there_by_any_machine(place):
    _, config = place
    url = f"memory://{uuid.uuid4().hex}/runs/mine"
    wanted = config(f'run.dir="{url}/"')
    first, continued = opened(wanted)
    assert not continued
    write_start(first.folder, wanted)
    (first.folder / "metrics.jsonl").write_text("{}\n")
    first.close()
    second, continued = opened(wanted)
    assert continued
    assert str(second.where) == url
    assert second.folder not in (first.folder, second.where)
    names = {path.name for path in second.folder.iterdir()}
    assert names == {CONFIG, ENVIRONMENT, "metrics.jsonl"}
    assert control_name(second.where) == f"run {url}"
    second.close()
    assert not second.folder.exists()
    with pytest.raises(ConfigError, match=r"learner\.lr: the run has"):
        opened(config(f'run.dir="{url}"', "learner.lr=1e-5"))
    with pytest.raises(ConfigError, match=f"already holds a run; continue it with .*{url}"):
        opened(config(f'run.dir="{url}"', "run.resume=never"))


def test_the_settings_are_plain_json(place):
    settings = settings_that_count(place[1]())
    assert json.loads(json.dumps(settings)) == settings
    assert "run.num_iterations" not in settings
    assert settings["learner.lora_rank"] == 8
