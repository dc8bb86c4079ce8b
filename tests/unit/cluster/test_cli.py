"""A mistake on the command line ends at once with exit code 2 and a message that names key, value and cure."""

import json
import shutil
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from cluster.cli import PACKAGES, check_packages, main
from cluster.config import ConfigError
from tests.tiny_models import build_tiny_sd3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_sd3(tmp_path_factory.mktemp("model"))


def failing(capsys, *argv):
    assert main(list(argv)) == 2
    return capsys.readouterr().err


def test_unknown_key(capsys):
    text = failing(capsys, "train", "configs/quickstart.toml", "learner.lrr=1")
    assert "learner.lrr = 1: unknown key; did you mean 'lr'?" in text


def test_wrong_type(capsys):
    text = failing(capsys, "plan", "configs/quickstart.toml", "sampling.num_steps=ten")
    assert "sampling.num_steps = 'ten': input should be a valid integer" in text


def test_batch_that_does_not_divide(capsys):
    text = failing(capsys, "train", "configs/quickstart.toml", "rollout.slices_per_call=7")
    assert "does not divide into calls of slices_per_call = 7; choose a divisor" in text


def test_missing_model_folder(capsys, tmp_path):
    text = failing(
        capsys,
        "train",
        "configs/quickstart.toml",
        f'model.path="{tmp_path}/none"',
        f'run.dir="{tmp_path}/run"',
    )
    assert f"model.path = '{tmp_path}/none': no such folder" in text
    assert "give a folder in diffusers layout" in text


def test_model_folder_that_is_none(capsys, tmp_path):
    (tmp_path / "model").mkdir()
    text = failing(capsys, "plan", "configs/quickstart.toml", f'model.path="{tmp_path}/model"')
    assert "has no model_index.json: not a model in diffusers layout" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; it needs one JSON object a line"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ('{"prompt": "a"}\n\n{"text": "b"}\n', "line 3"),
    ],
    ids=["empty", "malformed", "no prompt"],
)
@pytest.mark.parametrize("key", ["prompts.path", "evaluation.path"])
def test_bad_prompt_file(capsys, tmp_path, model, content, message, key):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    text = failing(
        capsys,
        "train",
        "configs/quickstart.toml",
        f'model.path="{model}"',
        f'{key}="{file}"',
        f'run.dir="{tmp_path}/run"',
    )
    assert str(file) in text
    assert message in text


def test_missing_prompt_file(capsys, tmp_path, model):
    text = failing(
        capsys,
        "train",
        "configs/quickstart.toml",
        f'model.path="{model}"',
        'prompts.path="none.jsonl"',
        f'run.dir="{tmp_path}/run"',
    )
    assert "prompt file none.jsonl does not exist" in text


def test_unwritable_run_folder(capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    text = failing(capsys, "train", "configs/quickstart.toml", f'run.dir="{tmp_path}/file/run"')
    assert f"run.dir = '{tmp_path}/file/run' can't be written" in text
    assert "choose another run.dir" in text


def test_a_folder_that_already_holds_a_run(capsys, tmp_path):
    (tmp_path / "config.toml").write_text("")
    text = failing(capsys, "train", "configs/quickstart.toml", f'run.dir="{tmp_path}"')
    assert "already holds a run; continue it with `flowcredit resume" in text


def test_a_folder_that_holds_no_run(capsys, tmp_path):
    assert "holds no run: config.toml is missing" in failing(capsys, "resume", str(tmp_path))
    text = failing(capsys, "evaluate", str(tmp_path))
    assert (
        "is neither a run folder (config.toml), nor one of its checkpoints (manifest.json)" in text
    )


def test_an_untrained_run_needs_base(capsys, tmp_path):
    shutil.copy("configs/quickstart.toml", tmp_path / "config.toml")
    assert "has no checkpoint yet; add --base" in failing(capsys, "evaluate", str(tmp_path))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.kernel=sde", "unknown kernel 'sde'"),
        ("sampling.eta=3.0", "eta"),
        ("sampling.min_std=2.0", "no step can be trained"),
        ("sampling.train_steps=[40]", "40 is not within 0 .. 5"),
        ("sampling.scored_states=[3, 99]", "99"),
        ("credit.rule=gian", "unknown credit rule 'gian'"),
        ("credit.normaliser=all", "unknown normaliser 'all'"),
        ("objective.name=ppo", "unknown objective 'ppo'"),
        ("objective.max_ratio=1.001", "objective.max_ratio = 1.001 must be above"),
        ("model.family=sd4", "unknown model family 'sd4'"),
    ],
)
def test_a_plan_refuses_what_the_run_would(capsys, model, override, message):
    text = failing(capsys, "plan", "configs/quickstart.toml", f'model.path="{model}"', override)
    assert message in text


def test_an_unknown_word_is_told_by_the_parser(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "configs/quickstart.toml", "--address", "x", "learner"])
    assert caught.value.code == 2
    assert "unrecognized argument: learner" in capsys.readouterr().err


def test_plan_prints_the_batch_arithmetic(capsys, model):
    assert (
        main(["plan", "configs/quickstart.toml", f'model.path="{model}"', "run.num_iterations=3"])
        == 0
    )
    text = capsys.readouterr().out
    for words in (
        "rollout workers",
        "network calls",
        "reward calls",
        "published versions, 1 in flight",
    ):
        assert words in text


def test_prompt_files_are_json_lines():
    for name in ("train", "eval"):
        for line in Path(f"configs/prompts/shapes_{name}.jsonl").read_text().splitlines():
            assert {"prompt", "tag", "include"} <= json.loads(line).keys()


def test_a_package_from_somewhere_else_is_named():
    found = {name: find_spec(name) for name in PACKAGES}
    check_packages(found)
    stray = ModuleSpec("rewards", None, origin="/elsewhere/rewards/__init__.py")
    with pytest.raises(
        ConfigError, match=r"must lie in one folder.*'/elsewhere/rewards/__init__\.py'"
    ):
        check_packages({**found, "rewards": stray})
    with pytest.raises(ConfigError, match="must lie in one folder"):
        check_packages({**found, "rewards": None})
