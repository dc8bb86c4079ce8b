"""What every objective must keep; see `learner.objective.base.Objective`."""

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from learner.config import ObjectiveConfig
from learner.objective import Objective, ObjectiveOutput, make_objective

OLD = torch.tensor([-2.0, 0.5, 0.0, 1.0, -0.3, 2.0], dtype=torch.float64)
SHIFT = torch.tensor([0.0, 0.3, -0.3, 1e-4, -1e-4, 0.0], dtype=torch.float64)
ADVANTAGE = torch.tensor([1.5, 2.0, -1.0, -0.5, 0.0, -2.0], dtype=torch.float64)


class ObjectiveContract:
    """Parameters: `name`, and `settings` of ObjectiveConfig that it reads."""

    name: str
    """Registry name or "my.module:Class"."""
    settings: ClassVar[dict[str, Any]] = {}

    def objective(self) -> Objective:
        """The objective under test."""
        return make_objective(ObjectiveConfig(name=self.name, **self.settings))

    def evaluate(
        self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor
    ) -> tuple[ObjectiveOutput, Tensor]:
        """The output, and the gradient of the summed loss by log_prob."""
        leaf = log_prob.clone().requires_grad_()
        output = self.objective()(leaf, old_log_prob, advantage)
        (gradient,) = torch.autograd.grad(output.loss.sum(), leaf)
        return output, gradient

    def test_output_is_per_transition_and_only_the_loss_has_a_gradient(self) -> None:
        log_prob = (OLD + SHIFT).requires_grad_()
        output = self.objective()(log_prob, OLD, ADVANTAGE)
        assert output.loss.shape == output.ratio.shape == output.clipped.shape == OLD.shape
        assert output.clipped.dtype == torch.bool
        if output.truncated is not None:
            assert output.truncated.shape == OLD.shape
            assert output.truncated.dtype == torch.bool
        assert output.loss.requires_grad
        assert not output.ratio.requires_grad
        assert not output.clipped.requires_grad
        torch.testing.assert_close(output.ratio, SHIFT.exp())

    def test_at_ratio_one_the_gradient_is_minus_the_advantage_times_that_of_log_prob(self) -> None:
        """Through a policy with parameters: d loss / d theta = -sum_i A_i d log_prob_i / d theta."""
        slopes = torch.randn(len(OLD), 3, dtype=torch.float64)
        theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        output = self.objective()(OLD + slopes @ theta, OLD, ADVANTAGE)
        (gradient,) = torch.autograd.grad(output.loss.sum(), theta)
        torch.testing.assert_close(gradient, -(ADVANTAGE @ slopes), atol=1e-12, rtol=0)
        assert not output.clipped.any()

    def test_a_transition_s_loss_does_not_depend_on_the_others(self) -> None:
        together, gradient = self.evaluate(OLD + SHIFT, OLD, ADVANTAGE)
        for i in range(len(OLD)):
            row = slice(i, i + 1)
            alone, slope = self.evaluate((OLD + SHIFT)[row], OLD[row], ADVANTAGE[row])
            assert torch.equal(alone.loss, together.loss[row])
            assert torch.equal(slope, gradient[row])

    def test_zero_advantage_and_clipped_transitions_have_no_gradient(self) -> None:
        _, gradient = self.evaluate(OLD + SHIFT, OLD, torch.zeros_like(OLD))
        assert not gradient.any()
        for sign in (-1, 1):
            output, gradient = self.evaluate(OLD + SHIFT, OLD, sign * ADVANTAGE)
            assert not gradient[output.clipped].any()

    @pytest.mark.parametrize("log_ratio", [-1e3, -10.0, 10.0, 1e3])
    def test_finite_inputs_give_a_finite_loss_and_gradient(self, log_ratio: float) -> None:
        output, gradient = self.evaluate((OLD + log_ratio).float(), OLD.float(), ADVANTAGE.float())
        assert output.loss.isfinite().all()
        assert gradient.isfinite().all()

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("argument", [0, 1, 2])
    def test_what_is_not_finite_shows_in_its_own_loss_and_in_no_other(
        self, argument: int, value: float
    ) -> None:
        inputs = [OLD + SHIFT, OLD.clone(), ADVANTAGE.clone()]
        for row in range(len(OLD)):
            spoiled = [tensor.clone() for tensor in inputs]
            spoiled[argument][row] = value
            loss = self.objective()(*spoiled).loss
            assert loss.isfinite().logical_not().nonzero().flatten().tolist() == [row]
