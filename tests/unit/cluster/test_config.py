"""Every mistake in a config is named with its key, its value and the cure."""

from pathlib import Path

import pytest

from cluster.cli import main
from cluster.config import ConfigError, dump, load

CONFIGS = sorted(Path("configs").glob("*.toml"))
QUICKSTART = "configs/quickstart.toml"


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_shipped_config_parses_and_survives_being_written(path, tmp_path):
    config = load(path)
    written = tmp_path / "config.toml"
    written.write_text(dump(config))
    assert load(written) == config


@pytest.mark.parametrize("path", CONFIGS, ids=str)
def test_every_shipped_config_plans(path, capsys):
    assert main(["plan", str(path)]) == 0
    assert "network calls" in capsys.readouterr().out


def test_an_override_wins_over_the_file():
    config = load(QUICKSTART, ["learner.lr=1e-4", "run.name=other", "sampling.train_steps=[1, 2]"])
    assert (config.learner.lr, config.run.name, config.sampling.train_steps) == (
        1e-4,
        "other",
        [1, 2],
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lrr=1", "learner.lrr = 1: unknown key; did you mean 'lr'?"),
        ("sampling.zzz=1", "sampling.zzz = 1: unknown key; known: num_steps, kernel"),
        ("learner.lr=-1", "learner.lr = -1: input should be greater than 0"),
        ("sampling.num_steps='ten'", "sampling.num_steps = 'ten': input should be a valid integer"),
        ("learner.zero_stage=5", "learner.zero_stage = 5: input should be 0, 1, 2 or 3"),
        (
            "rollout.slices_per_call=3",
            "does not divide into calls of slices_per_call = 3; choose a divisor of 16",
        ),
        (
            "rollout.samples_per_slice=5",
            "does not divide into slices of samples_per_slice = 5; choose a divisor",
        ),
        ("learner.updates_per_batch=7", "does not divide into learner.updates_per_batch = 7"),
        (
            "sampling.guidance_scale=3.0",
            "has no effect with cfg_mode = 'off'; set cfg_mode = 'train'",
        ),
        ("learner.ema_decay=0", "set evaluation.weights = 'raw' or learner.ema_decay > 0"),
        ("rewards.components=[]", "rewards.components = []: list should have at least 1 item"),
        ("learner.betas=[0.9, 1.0]", "betas = [0.9, 1.0] must both lie in [0, 1)"),
        ("nonsense", "override 'nonsense' is not of the form section.key=value"),
        ("run.name.x=1", "override 'run.name.x=1': 'name' is not a table"),
    ],
)
def test_a_mistake_is_named_with_key_value_and_cure(override, message):
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, [override])
    assert message in str(caught.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load(QUICKSTART, ["learner.lr=-1", "run.seed=-2"])
    assert "learner.lr" in str(caught.value)
    assert "run.seed" in str(caught.value)


def test_a_missing_file_and_a_missing_table_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; see configs/"):
        load(tmp_path / "none.toml")
    empty = tmp_path / "empty.toml"
    empty.write_text("[run]\nname = 'x'\n")
    with pytest.raises(ConfigError) as caught:
        load(empty)
    assert "run.num_iterations: required, but not set" in str(caught.value)
    assert "model: required, but not set" in str(caught.value)
    empty.write_text("[run\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load(empty)


def test_the_two_quickstarts_differ_in_credit_and_kernel_alone():
    stepwise, outcome = (
        load(f"configs/{name}.toml").model_dump() for name in ("quickstart", "quickstart_outcome")
    )
    for table, key in (
        ("run", "name"),
        ("credit", "rule"),
        ("sampling", "kernel"),
    ):
        stepwise[table].pop(key)
        outcome[table].pop(key)
    assert stepwise == outcome


@pytest.mark.parametrize(
    "override", ["rollout.samples_per_slice=0", "rollout.samples_per_slice=-4", "learner.lr=inf"]
)
def test_numbers_that_make_no_sense_are_refused(override):
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        load(QUICKSTART, [override])
