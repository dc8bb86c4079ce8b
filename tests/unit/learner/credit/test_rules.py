import math

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.config import CreditConfig
from learner.credit import CREDIT_RULES, Gae, Gain, Outcome, make_credit
from tests.reference import ground_truth

NAN = math.nan
# Two groups of two trajectories, T = 4, chosen to hold a rise, a fall, a repaired step, a tie.
REWARDS = torch.tensor(
    [
        [[0.1, 0.4, 0.2, 0.7, 0.9], [0.1, 0.0, 0.0, 0.5, 0.3]],
        [[2.0, 2.0, 2.0, 2.0, 2.0], [2.0, -1.0, 3.0, 2.5, 2.0]],
    ],
    dtype=torch.float64,
)


def hide(rewards: Tensor, *states: int) -> Tensor:
    hidden = rewards.clone()
    hidden[..., list(states)] = NAN
    return hidden


def each_trajectory(slow, rewards: Tensor) -> np.ndarray:
    return np.array([[slow(states) for states in group] for group in rewards.tolist()])


def test_outcome_gives_every_transition_the_image_s_reward() -> None:
    for scored in (REWARDS, hide(REWARDS, 0, 1, 2, 3)):
        credit = Outcome()(scored)
        assert credit.shape == (2, 2, 4)
        for j in range(4):
            assert torch.equal(credit[..., j], REWARDS[..., -1])


def test_gain_is_the_difference_of_successive_states() -> None:
    expected = [0.3, -0.2, 0.5, 0.2]
    assert Gain()(REWARDS)[0, 0].tolist() == pytest.approx(expected, abs=1e-15)
    np.testing.assert_allclose(Gain()(REWARDS), each_trajectory(ground_truth.gains, REWARDS))


@pytest.mark.parametrize("hidden", [(1,), (3,), (1, 2), (2,), (1, 3), (1, 2, 3)])
def test_a_segment_s_transitions_all_carry_its_gain(hidden) -> None:
    rewards = hide(REWARDS, *hidden)
    np.testing.assert_allclose(Gain()(rewards), each_trajectory(ground_truth.gains, rewards))


def test_gains_telescope() -> None:
    total = Gain()(REWARDS).sum(dim=-1)
    torch.testing.assert_close(total, REWARDS[..., -1] - REWARDS[..., 0], atol=1e-15, rtol=0)


def test_with_shared_noise_centred_gains_sum_to_the_centred_outcome() -> None:
    """x_T is shared, so state 0 has one reward per group."""
    total = Gain()(REWARDS).sum(dim=-1)
    outcome = REWARDS[..., -1]
    centred = [x - x.mean(dim=1, keepdim=True) for x in (total, outcome)]
    torch.testing.assert_close(*centred, atol=1e-15, rtol=0)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.3, 0.95, 1.0])
def test_gae_is_the_written_out_sum(gae_lambda: float) -> None:
    slow = each_trajectory(lambda states: ground_truth.gae(states, gae_lambda), REWARDS)
    np.testing.assert_allclose(Gae(gae_lambda)(REWARDS), slow, atol=1e-15)


def test_gae_limits_are_the_gains_and_the_return_minus_the_state() -> None:
    assert torch.equal(Gae(0.0)(REWARDS), Gain()(REWARDS))
    expected = REWARDS[..., -1:] - REWARDS[..., :-1]
    torch.testing.assert_close(Gae(1.0)(REWARDS), expected, atol=1e-15, rtol=0)


def test_gae_over_segments_counts_each_once() -> None:
    """States 0, 2, 4 scored: two segments of two transitions."""
    credit = Gae(0.5)(hide(REWARDS, 1, 3))[0, 0].tolist()
    first, second = 0.2 - 0.1, 0.9 - 0.2
    assert credit == pytest.approx([first + 0.5 * second] * 2 + [second] * 2)


@pytest.mark.parametrize("hidden", [(4,), (0, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("rule", [Gain(), Gae(0.5)])
def test_gains_need_the_image(rule, hidden) -> None:
    with pytest.raises(ValueError, match=r"states \[4\] must be scored .*4 = image"):
        rule(hide(REWARDS, *hidden))


@pytest.mark.parametrize("hidden", [(0,), (0, 1), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("rule", [Gain(), Gae(0.5)])
def test_transitions_before_the_first_scored_state_have_no_credit(rule, hidden) -> None:
    """The later ones have what they would have, were the trajectory to begin at that state."""
    first = min(set(range(5)) - set(hidden))
    hidden_rewards = hide(REWARDS, *hidden)
    credit = rule(hidden_rewards)
    assert credit.shape == (2, 2, 4)
    assert credit[..., :first].isnan().all()
    if first < 4:
        torch.testing.assert_close(credit[..., first:], rule(hidden_rewards[..., first:]))


def test_outcome_needs_the_image() -> None:
    with pytest.raises(
        ValueError, match=r"states \[4\] must be scored .*states are \[0, 1, 2, 3\]"
    ):
        Outcome()(hide(REWARDS, 4))


@pytest.mark.parametrize("rule", [Outcome(), Gain(), Gae(0.5)])
def test_a_state_scored_for_some_only_or_infinite_is_refused(rule) -> None:
    partly = REWARDS.clone()
    partly[1, 0, 2] = NAN
    with pytest.raises(ValueError, match=r"states \[2\] .* \(group, sample, state\) \(1, 0, 2\)"):
        rule(partly)
    infinite = REWARDS.clone()
    infinite[0, 1, 3] = -math.inf
    with pytest.raises(ValueError, match=r"infinite reward at .* \(0, 1, 3\)"):
        rule(infinite)


def test_rewards_have_three_dimensions() -> None:
    with pytest.raises(AssertionError, match=r"not \[G, N, T\+1\]"):
        Gain()(REWARDS[0])


@pytest.mark.parametrize("gae_lambda", [-0.1, 1.1, NAN])
def test_lambda_is_a_fraction(gae_lambda: float) -> None:
    with pytest.raises(ValueError, match="gae_lambda"):
        Gae(gae_lambda)


def test_the_registry_makes_each_rule_from_a_config() -> None:
    made = {name: make_credit(CreditConfig(rule=name, gae_lambda=0.3)) for name in CREDIT_RULES}
    assert {name: assigner.rule for name, assigner in made.items()} == {
        "outcome": Outcome(),
        "gain": Gain(),
        "gae": Gae(0.3),
    }
    assert {name: assigner.scored_states for name, assigner in made.items()} == {
        "outcome": "final",
        "gain": "trained",
        "gae": "all",
    }
