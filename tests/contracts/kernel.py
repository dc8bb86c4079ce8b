"""What every kernel must keep; see `rollout.flow.kernels.Kernel`."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from rollout.flow.kernels import Coefficients, FirstStep, make_kernel, step_mean
from rollout.flow.schedule import shifted_times

GRIDS = [shifted_times(num_steps, 3.0).tolist() for num_steps in (4, 10, 40)]


class KernelContract:
    """Parameters: `name`; the others where the defaults don't hold."""

    name: str
    """Registry name or "my.module:Class"."""
    first_step: FirstStep = "clamp"
    etas: tuple[float, ...] = (0.3, 0.7, 1.0)
    """Noise levels > 0 that the kernel must take on every grid."""
    may_overshoot = False
    """k may be negative: a first-order SDE step may remove more noise than there is, where t' is
    close to 0 or the grid is coarse."""

    def is_deterministic(self, t: float, t_next: float) -> bool:
        """Whether the kernel states that this transition has std 0 although eta > 0."""
        return False

    def transitions(self, eta: float) -> Iterator[tuple[float, float, Coefficients]]:
        """(t, t', coefficients) of every step of every grid."""
        for times in GRIDS:
            kernel = make_kernel(self.name, eta, self.first_step, times[1])
            for t, t_next in pairwise(times):
                yield t, t_next, kernel.coefficients(t, t_next)

    def test_coefficients_are_finite_floats_of_the_right_sign(self) -> None:
        for eta in self.etas:
            for t, t_next, c in self.transitions(eta):
                assert isinstance(c.noise, float)
                assert isinstance(c.std, float)
                assert torch.tensor([c.noise, c.std]).isfinite().all(), (eta, t, t_next)
                assert c.noise >= 0 or self.may_overshoot, (eta, t, t_next, c.noise)
                assert c.std >= 0, (eta, t, t_next)

    def test_std_is_zero_only_where_stated(self) -> None:
        for eta in self.etas:
            for t, t_next, c in self.transitions(eta):
                assert (c.std == 0) == self.is_deterministic(t, t_next), (eta, t, t_next, c.std)

    def test_eta_zero_is_the_euler_step_in_float64(self) -> None:
        x, v = torch.randn(2, 3, 5, dtype=torch.float64)
        for t, t_next, c in self.transitions(0.0):
            assert c.std == 0
            mean = step_mean(x, v, t, t_next, c.noise)
            torch.testing.assert_close(mean, x + (t_next - t) * v, atol=1e-12, rtol=0)

    def test_the_mean_is_linear_in_the_velocity_and_falls_with_it(self) -> None:
        """The sign says that more velocity is a step further from the noise; credit relies on it."""
        x, v = torch.randn(2, 3, 5, dtype=torch.float64)
        for eta in self.etas:
            for t, t_next, c in self.transitions(eta):
                at_0, at_1, at_3 = (
                    step_mean(x, f * v, t, t_next, c.noise) for f in (0.0, 1.0, 3.0)
                )
                torch.testing.assert_close(at_3 - at_0, 3 * (at_1 - at_0), atol=1e-12, rtol=0)
                assert bool(((at_1 - at_0) * v <= 1e-12).all()), (eta, t, t_next)

    def test_a_transition_does_not_depend_on_what_was_asked_before(self) -> None:
        for times in GRIDS:
            kernel = make_kernel(self.name, self.etas[0], self.first_step, times[1])
            steps = list(pairwise(times))
            forward = [kernel.coefficients(*step) for step in steps]
            assert [kernel.coefficients(*step) for step in reversed(steps)] == forward[::-1]

    @pytest.mark.parametrize("eta", [-0.1, float("nan"), float("inf")])
    def test_an_impossible_noise_level_is_refused(self, eta: float) -> None:
        with pytest.raises(ValueError, match="eta"):
            make_kernel(self.name, eta, self.first_step, 0.9)
