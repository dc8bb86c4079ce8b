import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from learner.config import CreditConfig
from learner.credit import CREDIT_RULES, NORMALISERS, make_credit, normalise
from rollout.flow.kernels import make_kernel
from rollout.flow.schedule import shifted_times

REWARDS = torch.rand(3, 4, 11, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
REWARDS[..., 0] = 0.2  # x_T is shared
TRAINED = torch.tensor([False, *[True] * 7, False, False])


@pytest.mark.parametrize("scope", NORMALISERS)
@pytest.mark.parametrize("rule", CREDIT_RULES)
def test_the_assigner_is_the_rule_then_the_normaliser(rule: str, scope: str) -> None:
    assigner = make_credit(CreditConfig(rule=rule, normaliser=scope, eps=1e-3, clip=2.0))
    result = assigner.assign(REWARDS.float(), TRAINED)
    expected = normalise(assigner.rule(REWARDS.float().double()), TRAINED, scope, 1e-3, 2.0)
    assert torch.equal(result.values, expected.values)
    assert torch.equal(result.zero_variance, expected.zero_variance)
    assert result.values.dtype == torch.float64


@pytest.mark.parametrize("scope", NORMALISERS)
@pytest.mark.parametrize("rule", CREDIT_RULES)
def test_permuting_the_prompts_of_a_batch_permutes_the_advantages(rule: str, scope: str) -> None:
    assigner = make_credit(CreditConfig(rule=rule, normaliser=scope))
    order = torch.tensor([2, 0, 1])
    direct = assigner.assign(REWARDS, TRAINED).values
    permuted = assigner.assign(REWARDS[order], TRAINED).values
    torch.testing.assert_close(permuted, direct[order], atol=1e-13, rtol=0)


@pytest.mark.parametrize("scope", NORMALISERS)
@pytest.mark.parametrize("rule", CREDIT_RULES)
def test_equal_rewards_give_zero_advantages(rule: str, scope: str) -> None:
    rewards = REWARDS.clone()
    rewards[1] = rewards[1, :1]
    result = make_credit(CreditConfig(rule=rule, normaliser=scope)).assign(rewards, TRAINED)
    assert result.zero_variance.tolist() == [False, True, False]
    assert not result.values[1].any()
    assert result.values.isfinite().all()


def test_deterministic_steps_stay_out_of_the_normalisation() -> None:
    """The literal DDIM-SDE does not act at its first and last step, and hardly at the one before:
    whatever happens to their gains, the trained advantages don't move (docs/papers.md section 1)."""
    times = shifted_times(10, 3.0).tolist()
    kernel = make_kernel("ddim_sde", 0.7, "literal", times[1])
    stds = [kernel.coefficients(t, s).std for t, s in pairwise(times)]
    trained = torch.tensor(stds) >= 0.02
    assert trained.tolist() == TRAINED.tolist()
    assigner = make_credit(CreditConfig(rule="gain", normaliser="joint"))
    before = assigner.assign(REWARDS, trained)
    shifted = REWARDS.clone()
    shifted[..., 0] -= 100.0  # the first gain only
    shifted[..., 9:] *= -3.0  # the last two gains only
    after = assigner.assign(shifted, trained)
    torch.testing.assert_close(after.values, before.values, atol=1e-12, rtol=0)
    assert not after.values[..., ~trained].any()


@pytest.mark.parametrize("scope", NORMALISERS)
@pytest.mark.parametrize("rule", ["gain", "gae"])
def test_states_before_the_first_trained_step_need_no_score(rule: str, scope: str) -> None:
    """TRAINED begins with step 1: state 0 may be unscored, state 1 may not."""
    assigner = make_credit(CreditConfig(rule=rule, normaliser=scope))
    unscored = REWARDS.clone()
    unscored[..., 0] = math.nan
    expected = assigner.assign(REWARDS, TRAINED)
    found = assigner.assign(unscored, TRAINED)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.zero_variance, expected.zero_variance)
    unscored[..., 1:3] = math.nan
    message = (
        r"credit nan at trained \(group, sample, step\) \(0, 0, 1\): the scored states say nothing "
        r"about the trained steps \[1, 2\]\. Score state 1 or an earlier one, and state 3 or a later "
        r"one \(sampling\.scored_states; 0 = pure noise, 10 = image\), or leave those steps out of "
        r"sampling\.train_steps"
    )
    with pytest.raises(ValueError, match=message):
        assigner.assign(unscored, TRAINED)


@dataclass(frozen=True)
class LastGain:
    """A plug-in: the last gain for all transitions."""

    factor: float

    @property
    def scored_states(self) -> str:
        return "all"

    @classmethod
    def from_config(cls, config: CreditConfig) -> "LastGain":
        return cls(config.gae_lambda)

    def __call__(self, rewards: Tensor) -> Tensor:
        last = self.factor * (rewards[..., -1:] - rewards[..., -2:-1])
        return last.expand(-1, -1, rewards.shape[-1] - 1)


def test_a_plug_in_rule_is_found_by_its_path() -> None:
    config = CreditConfig(
        rule=f"{__name__}:LastGain", gae_lambda=0.5, normaliser="group", clip=math.inf
    )
    assigner = make_credit(config)
    assert assigner.rule == LastGain(0.5)
    assert assigner.assign(REWARDS, TRAINED).values.shape == (3, 4, 10)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CreditConfig(rule="gains"), "unknown credit rule 'gains': choose from .*'gain'"),
        (CreditConfig(normaliser="both"), "unknown normaliser 'both'"),
    ],
)
def test_unknown_names_are_refused_when_the_assigner_is_made(config, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_credit(config)
