"""The whole system on real Ray with a model of milliseconds: ranks, lag, looks in between, failing rewards."""

import json

import pytest
import ray

from cluster.actors_backend import RayBackend
from cluster.actors_cluster import connect
from cluster.backend import PartLost
from cluster.cli import main
from cluster.config import ConfigError, load
from cluster.costs import iteration_costs, step_plan
from cluster.events import Events
from cluster.run_folder import read_metrics
from cluster.train import train
from learner.checkpoint import load as load_checkpoint

pytestmark = pytest.mark.ray


def settings(tmp_path, *more, prompts=("a", "b", "c", "d")):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return [
        'model.family="tests.fake_family:GaussianFamily"',
        f'run.dir="{tmp_path}/run"',
        f'prompts.path="{file}"',
        f'evaluation.path="{file}"',
        "run.num_iterations=3",
        "run.checkpoint_every=2",
        "sampling.num_steps=4",
        "sampling.scored_states=auto",
        "rollout.workers=1",
        "rollout.groups_per_batch=4",
        "rollout.samples_per_group=4",
        "rollout.slices_per_call=2",
        "learner.micro_batch=16",
        "learner.threads_per_rank=1",
        'rewards.components=[{name="tests.fakes:BrightnessReward"}]',
        'evaluation.graded="brightness"',
        'evaluation.strict=""',
        *more,
    ]


def run(tmp_path, *more, **options):
    config = load("configs/quickstart.toml", settings(tmp_path, *more, **options))
    folder, summary = train(config)
    return config, folder, summary


@pytest.fixture(scope="module")
def plain(ray_session, tmp_path_factory):
    """One worker, one rank, no lag."""
    return run(tmp_path_factory.mktemp("plain"))


def test_two_workers_and_two_zero3_ranks_train_the_same_weights(plain, tmp_path):
    ranks = ["learner.num_ranks=2", "learner.zero_stage=3", "rollout.workers=2"]
    _, folder, summary = run(tmp_path, *ranks)
    one = load_checkpoint(plain[1] / "checkpoints" / "step_000003").weights
    two = load_checkpoint(folder / "checkpoints" / "step_000003").weights
    for name, tensor in one.items():
        assert (two[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    assert summary["counts"] == plain[2]["counts"]


def test_guidance_refined_estimates_kl_and_own_noise_are_counted_as_planned(ray_session, tmp_path):
    config, _, summary = run(
        tmp_path,
        "sampling.cfg_mode=train",
        "sampling.guidance_scale=2.0",
        "sampling.num_substeps=3",
        "sampling.shared_initial_noise=false",
        "rollout.samples_per_slice=2",
        "objective.kl_weight=0.1",
        "learner.updates_per_batch=2",
        "evaluation.guidance_scale=2.0",
    )
    plan, _ = step_plan(config)
    costs = iteration_costs(config, plan)
    assert summary["counts"] == {
        "images": 3 * costs.images,
        "transitions": 3 * costs.transitions,
        "network_calls": 3 * costs.network_calls,
        "reward_calls": 3 * costs.reward_calls,
    }
    assert summary["evaluation_counts"]["network_calls"] == 2 * costs.evaluation_network_calls


def test_with_a_lag_of_one_every_batch_has_the_version_before(ray_session, tmp_path):
    _, folder, _ = run(tmp_path, "run.max_policy_lag=1", "run.num_iterations=4")
    rows = read_metrics(folder)
    assert [(row["policy_version"], row["policy_lag"]) for row in rows] == [
        (0, 0),
        (0, 1),
        (1, 1),
        (2, 1),
    ]


def test_looks_in_between_are_kept_and_change_nothing(plain, tmp_path):
    _, folder, summary = run(tmp_path, "evaluation.every=1")
    for iteration in (1, 2):
        assert (folder / "evaluation" / f"iteration_{iteration:06d}.jsonl").is_file()
    assert summary["evaluation"]["after"] == plain[2]["evaluation"]["after"]
    assert summary["seconds"]["evaluation_between"] > 0
    assert summary["evaluation_counts"]["images"] == 4 * 4


@pytest.mark.parametrize(
    "mode", ["nan", *(pytest.param(m, marks=pytest.mark.long) for m in ("wrong_count", "raises"))]
)
def test_a_prompt_whose_scoring_fails_is_replaced_and_counted(ray_session, tmp_path, mode):
    reward = f'rewards.components=[{{name="tests.fakes:FaultyReward", options={{mode="{mode}"}}}}]'
    prompts = ["a", "b", "c", "d", "e", "f", "g", "bad"]
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "a"}\n')
    _, folder, summary = run(
        tmp_path, reward, f'evaluation.path="{good}"', "run.num_iterations=4", prompts=prompts
    )
    counts = [row["counts"] for row in read_metrics(folder)]
    assert sum(count["dropped_groups"] for count in counts) >= 2
    assert sum(sum(count["reward_failures"].values()) for count in counts) >= 4
    assert summary["status"] == "finished"


def test_a_reward_that_never_answers_right_ends_the_run_with_its_reason(
    ray_session, tmp_path, capsys
):
    reward = 'rewards.components=[{name="tests.fakes:FaultyReward", options={mode="raises"}}]'
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "a"}\n')
    words = settings(tmp_path, reward, f'evaluation.path="{good}"', prompts=["bad"])
    assert main(["train", "configs/quickstart.toml", *words]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "groups were dropped because reward 'brightness' failed" in text


def test_a_constant_reward_is_stopped_before_the_first_update(ray_session, tmp_path, capsys):
    reward = 'rewards.components=[{name="tests.fake_rewards:ConstantReward"}]'
    words = settings(tmp_path, reward, 'evaluation.graded="constant"')
    assert main(["train", "configs/quickstart.toml", *words]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "the reward is the same for every image" in text


def test_what_the_rewards_do_not_give_cannot_be_the_graded_score(ray_session, tmp_path, capsys):
    words = settings(tmp_path, 'evaluation.graded="beauty"')
    assert main(["train", "configs/quickstart.toml", *words]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert (
        "evaluation.graded = 'beauty' is no column of the rewards; they give ['brightness'" in text
    )


def test_a_config_too_large_for_the_cluster_is_refused(ray_session, tmp_path):
    config = load("configs/quickstart.toml", settings(tmp_path, "rollout.gpus_per_worker=1"))
    with pytest.raises(ConfigError, match=r"no room for this run"):
        connect(config, None)


def test_one_failing_rank_fails_the_call_although_the_other_waits(ray_session, tmp_path):
    config = load("configs/quickstart.toml", settings(tmp_path, "learner.num_ranks=2"))
    backend = RayBackend(config, "all", str(tmp_path))
    events = Events(backend)
    try:
        events.answer(backend.start_learner())
        assert events.answer(backend.weights("raw")).version == 0
        ray.kill(backend.ranks[1])  # rank 0 will wait for it in a collective
        with pytest.raises(PartLost):
            events.answer(backend.learn([]))
    finally:
        backend.close()
