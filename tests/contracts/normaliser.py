"""What every normaliser scope must keep, alone and inside `learner.credit.normalise`."""

import math

import torch
from torch import Tensor

from learner.credit import find_scope, normalise

NUM_GROUPS, NUM_SAMPLES, NUM_STEPS = 3, 4, 5
TRAINED = torch.tensor([False, True, True, False, True])


class NormaliserContract:
    """Parameters: `name`, and `over_batch` for a scope that reaches beyond a group."""

    name: str
    """Registry name or "my.module:Class"."""
    over_batch = False
    """Whether the credit of one group may change the advantages of another."""

    def raw(self) -> Tensor:
        """Raw credit [G, N, T]."""
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_GROUPS, NUM_SAMPLES, NUM_STEPS)
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def advantages(self, raw: Tensor, trained: Tensor = TRAINED) -> Tensor:
        """Advantages with eps = 0, not clipped."""
        return normalise(raw, trained, self.name, 0.0, math.inf).values

    def assert_close(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)

    def test_mean_and_std_are_finite_and_broadcast(self) -> None:
        raw = self.raw()
        mean, std = find_scope(self.name)(raw, TRAINED.expand_as(raw))
        for statistic in (mean, std):
            assert torch.broadcast_to(statistic, raw.shape).isfinite().all()
            assert statistic.dtype == torch.float64
        assert bool((std >= 0).all())

    def test_there_is_signal_at_every_trained_transition_and_only_there(self) -> None:
        values = self.advantages(self.raw())
        assert values.isfinite().all()
        assert values[..., TRAINED].all()
        assert not values[..., ~TRAINED].any()

    def test_permuted_groups_and_samples_give_permuted_advantages(self) -> None:
        raw, values = self.raw(), self.advantages(self.raw())
        for dim, order in ((0, [2, 0, 1]), (1, [3, 1, 0, 2])):
            index = torch.tensor(order)
            found = self.advantages(raw.index_select(dim, index))
            self.assert_close(found, values.index_select(dim, index))

    def test_shift_and_scale_of_all_credit_cancel(self) -> None:
        self.assert_close(self.advantages(100.0 + 7.0 * self.raw()), self.advantages(self.raw()))

    def test_a_better_member_has_the_larger_advantage(self) -> None:
        raw, values = self.raw(), self.advantages(self.raw())
        order = raw[..., TRAINED].argsort(dim=1)
        assert bool((values[..., TRAINED].gather(1, order).diff(dim=1) > 0).all())

    def test_untrained_credit_counts_nowhere(self) -> None:
        trained = TRAINED.repeat(NUM_GROUPS, NUM_SAMPLES, 1)
        trained[0, 1] = False
        raw = self.raw()
        spoiled = torch.where(trained, raw, 1e3)
        self.assert_close(self.advantages(spoiled, trained), self.advantages(raw, trained))

    def test_another_group_matters_only_over_the_batch(self) -> None:
        raw = self.raw()
        changed = raw.clone()
        changed[2] = 50.0 * changed[2] + 3.0
        before, after = self.advantages(raw)[:2], self.advantages(changed)[:2]
        if self.over_batch:
            assert not torch.allclose(after, before)
        else:
            self.assert_close(after, before)

    def test_a_group_without_spread_gets_zero_and_the_others_stay_finite(self) -> None:
        raw = self.raw()
        raw[1] = raw[1, :1]
        values = self.advantages(raw)
        assert not values[1].any()
        assert values.isfinite().all()
        assert values[0].any()
