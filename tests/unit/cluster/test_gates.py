"""Each gate passes what is right, and stops what is wrong with a message that says what to do."""

import numpy as np
import pytest

from cluster.buffer import TrajectoryBuffer
from cluster.gates import GateError, check_drops, check_noise, check_rewards_vary
from rewards.base import FailureKind, RewardFailure
from rollout.config import SamplingConfig
from rollout.flow.schedule import shifted_times
from rollout.plan import make_plan
from rollout.records import GroupRequest, SliceRequest
from rollout.trajectory import Header, seal_group, slice_batch

PLAN = make_plan(SamplingConfig(num_steps=3), shifted_times(3, 3.0), "all")


def group(group_id, states, totals=None):
    """A sealed group of trajectories with these states [N, 4, 2]."""
    count = len(states)
    request = SliceRequest(
        group=GroupRequest(
            group_id=group_id,
            prompt="p",
            metadata={},
            num_samples=count,
            run_seed=0,
            policy_version=0,
        ),
        first=0,
        count=count,
        score_initial=True,
    )
    header = Header(
        plan=PLAN,
        run_seed=0,
        latent_shape=(2,),
        log_prob_reduction="mean",
        embedding_dtype="float32",
        embedding_shapes={"conditioning.x": (1,)},
    )
    log_probs = np.zeros((count, 3), np.float32)
    embedding = {"conditioning.x": np.zeros(1, np.float32)}
    batch = slice_batch(header, request, states, log_probs, embedding, [None] * count)
    totals = np.arange(count * 4.0).reshape(count, 4) if totals is None else totals
    return seal_group([batch], totals, {"r": totals})


def states(seed, shared):
    drawn = np.random.default_rng(seed).standard_normal((3, 4, 2)).astype(np.float32)
    if shared:
        drawn[:, 0] = drawn[0, 0]
    return drawn


@pytest.mark.parametrize("shared", [True, False])
def test_noise_as_planned_passes(shared):
    check_noise([group(0, states(0, shared)), group(1, states(1, shared))], shared)


@pytest.mark.parametrize("shared", [True, False])
def test_a_group_that_shares_or_splits_its_initial_noise_against_the_plan_is_named(shared):
    with pytest.raises(
        GateError, match=r"group 4: [13] different initial noises for 3 trajectories"
    ):
        check_noise([group(4, states(0, not shared))], shared)


def test_two_groups_with_the_same_initial_noise_are_noticed():
    other = states(1, True)
    other[:, 0] = states(0, True)[0, 0]
    with pytest.raises(GateError, match="two groups began from the same initial noise"):
        check_noise([group(0, states(0, True)), group(1, other)], True)


def test_two_trajectories_with_the_same_image_are_noticed():
    drawn = states(0, True)
    drawn[2, -1] = drawn[0, -1]
    with pytest.raises(GateError, match="1 of 3 trajectories ended in the same latents as another"):
        check_noise([group(0, drawn)], True)


def test_a_constant_reward_stops_the_run_and_one_varying_group_is_enough():
    constant = np.full((3, 4), 0.25)
    flat = [group(0, states(0, True), constant), group(1, states(1, True), constant + 1)]
    with pytest.raises(
        GateError, match=r"same for every image of each of the first 2 groups.*0\.25"
    ):
        check_rewards_vary(flat)
    check_rewards_vary([*flat, group(2, states(2, True))])


def test_a_few_drops_pass_and_many_stop_the_run_with_the_last_failure():
    buffer = TrajectoryBuffer(groups_per_batch=16, max_policy_lag=1, num_batches=10)
    while buffer.admit() is not None:
        pass
    failure = RewardFailure(
        kind=FailureKind.NON_FINITE, reward="r", message="nan at 3", num_images=4
    )
    check_drops(8, buffer, failure)  # a quarter of the 32 groups admitted
    with pytest.raises(
        GateError, match=r"9 groups were dropped because reward 'r' failed.*non_finite.*nan at 3"
    ):
        check_drops(9, buffer, failure)
