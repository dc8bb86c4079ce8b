"""What every credit rule must keep; see `learner.credit.base.CreditRule`."""

import math
import re
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from learner.config import CreditConfig
from learner.credit import CreditRule, make_credit, normalise

NUM_GROUPS, NUM_SAMPLES, NUM_STEPS = 3, 4, 6
TRAINED = torch.ones(NUM_STEPS, dtype=torch.bool)
SCOPES_OF_ONE_GROUP = ("group", "joint", "per_step")


class CreditRuleContract:
    """Parameters: `name`, `settings` of CreditConfig that it reads; `needed_states`."""

    name: str
    """Registry name or "my.module:Class"."""
    settings: ClassVar[dict[str, Any]] = {}

    def needed_states(self, num_steps: int) -> set[int]:
        """States without which it gives no credit at all: 0 = pure noise, num_steps = image."""
        return {num_steps}

    def rule(self) -> CreditRule:
        """The rule under test."""
        return make_credit(CreditConfig(rule=self.name, **self.settings)).rule

    def reward_values(self) -> Tensor:
        """Rewards [G, N, T+1] that differ everywhere but at the shared initial noise."""
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_GROUPS, NUM_SAMPLES, NUM_STEPS + 1)
        values = torch.rand(shape, dtype=torch.float64, generator=generator)
        values[..., 0] = values[:, :1, 0]
        return values

    def test_credit_is_a_finite_float64_per_transition(self) -> None:
        given = self.reward_values()
        credit = self.rule()(given)
        assert credit.shape == (NUM_GROUPS, NUM_SAMPLES, NUM_STEPS)
        assert credit.dtype == torch.float64
        assert credit.isfinite().all()
        assert torch.equal(given, self.reward_values()), "the rewards were modified"

    def test_permuted_groups_and_samples_give_permuted_credit(self) -> None:
        rewards, credit = self.reward_values(), self.rule()(self.reward_values())
        for dim, order in ((0, [2, 0, 1]), (1, [3, 1, 0, 2])):
            index = torch.tensor(order)
            found = self.rule()(rewards.index_select(dim, index))
            torch.testing.assert_close(found, credit.index_select(dim, index), atol=1e-12, rtol=0)

    def test_members_with_equal_rewards_get_equal_credit(self) -> None:
        equal = self.reward_values()[:, :1].repeat(1, NUM_SAMPLES, 1)
        for rewards in (equal, torch.full_like(equal, 0.7)):
            credit = self.rule()(rewards)
            torch.testing.assert_close(credit, credit[:, :1].expand_as(credit), atol=1e-15, rtol=0)
            assert normalise(credit, TRAINED, "joint", 1e-4, math.inf).zero_variance.all()

    @pytest.mark.parametrize("scope", SCOPES_OF_ONE_GROUP)
    def test_a_constant_added_to_a_group_s_rewards_changes_no_advantage(self, scope: str) -> None:
        """A scope that reaches over the batch sees it where the credit holds the constant, as
        Flow-GRPO's global std does."""
        rewards = self.reward_values()
        constants = torch.tensor([5.0, 0.0, -2.0], dtype=torch.float64)[:, None, None]
        before, after = (
            normalise(self.rule()(r), TRAINED, scope, 1e-4, math.inf).values
            for r in (rewards, rewards + constants)
        )
        torch.testing.assert_close(after, before, atol=1e-9, rtol=0)

    def test_the_states_that_it_asks_for_are_enough(self) -> None:
        asked = self.rule().scored_states
        assert asked in ("all", "trained", "final")
        rewards = self.reward_values()
        if asked == "final":
            rewards[..., :-1] = math.nan
        assert self.rule()(rewards).isfinite().all()

    def test_a_transition_has_credit_for_all_or_is_refused_when_trained(self) -> None:
        """Whichever state is not scored: a gap is NaN for every trajectory, never a number."""
        for state in set(range(NUM_STEPS + 1)) - self.needed_states(NUM_STEPS):
            rewards = self.reward_values()
            rewards[..., state] = math.nan
            credit = self.rule()(rewards)
            assert credit.shape[-1] == NUM_STEPS
            gaps = credit.isnan().any(dim=0).any(dim=0)
            assert credit[..., gaps].isnan().all()
            assert credit[..., ~gaps].isfinite().all()
            if gaps.any():
                with pytest.raises(ValueError, match=r"sampling\.scored_states"):
                    normalise(credit, TRAINED, "joint", 1e-4, math.inf)

    def test_a_needed_state_that_is_not_scored_is_named(self) -> None:
        for state in self.needed_states(NUM_STEPS):
            rewards = self.reward_values()
            rewards[..., state] = math.nan
            with pytest.raises(ValueError, match=re.escape(f"[{state}]")):
                self.rule()(rewards)

    def test_a_state_scored_for_some_trajectories_only_is_named(self) -> None:
        for state in self.needed_states(NUM_STEPS):
            rewards = self.reward_values()
            rewards[1, 2, state] = math.nan
            with pytest.raises(ValueError, match=re.escape(f"[{state}]")):
                self.rule()(rewards)
