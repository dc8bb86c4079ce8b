import math

import numpy as np
import pytest
import torch

from rollout.flow import kernels
from rollout.flow.kernels import Coefficients, make_kernel, sensitivity, step, step_mean
from rollout.flow.schedule import shifted_times
from tests.reference import ground_truth

TIMES = shifted_times(10, 3.0).tolist()
STEPS = range(10)
NAMES = list(kernels.KERNELS)
SETTINGS = [
    *[(name, eta, "clamp") for name in NAMES for eta in (0.0, 0.4, 0.7, 1.0)],
    *[(name, 0.7, "literal") for name in NAMES if name != "flow_sde"],
]
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(4, 2, 3, dtype=torch.float64, generator=GENERATOR)
V = torch.randn(4, 2, 3, dtype=torch.float64, generator=GENERATOR)


def coefficients(name: str, i: int, eta: float, first_step="clamp") -> Coefficients:
    return make_kernel(name, eta, first_step, TIMES[1]).coefficients(TIMES[i], TIMES[i + 1])


@pytest.mark.parametrize(("name", "eta", "first_step"), SETTINGS)
def test_every_step_equals_the_slow_ground_truth(name: str, eta: float, first_step) -> None:
    for i in STEPS:
        c = coefficients(name, i, eta, first_step)
        mean = step_mean(X, V, TIMES[i], TIMES[i + 1], c.noise)
        slow_mean, slow_std = ground_truth.kernel_step(
            name, X.numpy(), V.numpy(), TIMES, i, eta, first_step
        )
        np.testing.assert_allclose(mean, slow_mean, atol=1e-12, rtol=1e-12)
        assert c.std == pytest.approx(slow_std, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_eta_zero_is_the_euler_step(name: str) -> None:
    for i in STEPS:
        t, t_next = TIMES[i], TIMES[i + 1]
        c = coefficients(name, i, 0.0)
        assert c == Coefficients(noise=t_next, std=0.0)
        euler = ground_truth.euler_step(X.numpy(), V.numpy(), t, t_next)
        np.testing.assert_allclose(step_mean(X, V, t, t_next, c.noise), euler, atol=1e-15)


@pytest.mark.parametrize("eta", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("name", ["ode", "cps", "ddim_sde", "precise"])
def test_total_noise_is_the_schedule_s(name: str, eta: float) -> None:
    for i in STEPS:
        c = coefficients(name, i, eta)
        assert math.hypot(c.noise, c.std) == pytest.approx(TIMES[i + 1], abs=1e-15, rel=1e-14)


def test_flow_sde_adds_the_excess_of_the_table() -> None:
    """docs/papers.md section 0, a = .7."""
    excess = [0.040, 0.058, 0.024, 0.018, 0.018, 0.021, 0.032, 0.063, 0.231, 0.007]
    for i in STEPS:
        c = coefficients("flow_sde", i, 0.7)
        assert math.hypot(c.noise, c.std) - TIMES[i + 1] == pytest.approx(excess[i], abs=6e-4)


@pytest.mark.parametrize(
    ("name", "eta", "first_step", "table"),
    [
        ("flow_sde", 0.7, "clamp",
         [0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.006]),
        ("cps", 0.8, "clamp",
         [0.913, 0.869, 0.816, 0.752, 0.673, 0.573, 0.442, 0.264, 0.0085, 0]),
        ("ddim_sde", 0.7, "literal",
         [0, 0.128, 0.177, 0.209, 0.227, 0.228, 0.205, 0.142, 0.0053, 0]),
        ("ddim_sde", 0.7, "clamp",
         [0.134, 0.128, 0.177, 0.209, 0.227, 0.228, 0.205, 0.142, 0.0053, 0]),
    ],
)  # fmt: skip
def test_std_of_each_step_is_that_of_the_table(name: str, eta: float, first_step, table) -> None:
    """docs/papers.md section 0, first table of numbers."""
    stds = [coefficients(name, i, eta, first_step).std for i in STEPS]
    assert stds == pytest.approx(table, abs=6e-4)
    assert [std == 0 for std in stds] == [value == 0 for value in table]


def test_sensitivities_are_those_of_the_digest() -> None:
    """docs/papers.md section 0, steps 1 .. 8."""

    def at(name: str, eta: float, i: int) -> float:
        c = coefficients(name, i, eta)
        return sensitivity(TIMES[i], TIMES[i + 1], c.noise, c.std)

    ddim = [at("ddim_sde", 0.7, i) for i in range(1, 9)]
    assert ddim == pytest.approx([0.37, 0.32, 0.34, 0.40, 0.52, 0.76, 1.46, 50.9], abs=0.06)
    flow = [at("flow_sde", 0.7, i) for i in (1, 8)]
    assert flow == pytest.approx([0.08, 1.49], abs=6e-3)
    cps = [at("cps", 0.8, i) for i in (1, 7, 8)]
    assert cps == pytest.approx([0.08, 1.1, 32], rel=0.05)


@pytest.mark.parametrize(("name", "eta", "first_step"), SETTINGS)
def test_sensitivity_is_the_autograd_slope_of_the_mean_and_never_positive(
    name: str, eta: float, first_step
) -> None:
    for i in STEPS:
        c = coefficients(name, i, eta, first_step)
        v = V.clone().requires_grad_()
        mean = step_mean(X, v, TIMES[i], TIMES[i + 1], c.noise)
        (slope,) = torch.autograd.grad(mean.sum(), v)
        assert bool((slope <= 1e-15).all())
        if c.std:
            w = sensitivity(TIMES[i], TIMES[i + 1], c.noise, c.std)
            torch.testing.assert_close(slope, torch.full_like(V, -w * c.std), atol=1e-14, rtol=0)


def test_items_of_a_batch_may_sit_at_different_steps() -> None:
    items = [0, 3, 7, 9]
    c = [coefficients("flow_sde", i, 0.7) for i in items]
    t, t_next, k, s = torch.tensor(
        [[TIMES[i], TIMES[i + 1], d.noise, d.std] for i, d in zip(items, c, strict=True)],
        dtype=torch.float64,
    ).T
    for x, v in ((X, V), (X.float(), V.float()), (X.bfloat16(), V.bfloat16())):
        mean = step_mean(x, v, t, t_next, k)
        moved = step(mean, s, torch.ones_like(x))
        weights = sensitivity(t, t_next, k, s)
        for row, (i, d) in enumerate(zip(items, c, strict=True)):
            pick = slice(row, row + 1)
            alone = step_mean(x[pick], v[pick], TIMES[i], TIMES[i + 1], d.noise)
            assert torch.equal(alone, mean[pick])  # to the bit: rollout and update agree
            assert torch.equal(step(alone, d.std, torch.ones_like(x[pick])), moved[pick])
            assert weights[row] == sensitivity(TIMES[i], TIMES[i + 1], d.noise, d.std)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_cast_up_before_any_arithmetic(low: torch.dtype) -> None:
    x, v = X.to(low), V.to(low)
    mean = step_mean(x, v, 0.86, 0.79, 0.7)
    assert mean.dtype == torch.float32
    assert step(mean, 0.1, x).dtype == torch.float32
    assert torch.equal(mean, step_mean(x.float(), v.float(), 0.86, 0.79, 0.7))


def test_step_adds_the_scaled_noise() -> None:
    torch.testing.assert_close(step(X, torch.arange(4.0), V)[3], X[3] + 3 * V[3])
    assert torch.equal(step(X, torch.tensor(2.0), V), X + 2 * V)


def test_first_step_of_each_kernel_at_time_one() -> None:
    assert coefficients("ddim_sde", 0, 0.7, "literal").std == 0
    assert coefficients("precise", 0, 0.7).noise == 0  # rho = 0: all noise is fresh
    assert coefficients("precise", 0, 0.7).std == TIMES[1]
    with pytest.raises(ValueError, match="divides by zero"):
        coefficients("flow_sde", 0, 0.7, "literal")
    assert coefficients("flow_sde", 1, 0.7, "literal") == coefficients("flow_sde", 1, 0.7)
    for name in ("dance_sde", "cps", "precise", "ode"):
        assert coefficients(name, 0, 0.7, "literal") == coefficients(name, 0, 0.7, "clamp")


def test_the_clamp_of_flow_sde_is_at_one_only_and_of_ddim_sde_from_the_second_time_on() -> None:
    """A time off the grid, between times[1] and 1."""
    flow = make_kernel("flow_sde", 0.7, "clamp", 0.9).coefficients(0.95, 0.8)
    assert flow.std == pytest.approx(0.7 * math.sqrt(0.95 / 0.05 * 0.15))
    ddim = make_kernel("ddim_sde", 0.7, "clamp", 0.9).coefficients(0.95, 0.8)
    assert ddim.std == pytest.approx(0.7 * 0.8 * math.sqrt(0.1))


def test_too_much_noise_is_refused_with_its_bound() -> None:
    assert coefficients("cps", 4, 1.0).std == TIMES[5]
    with pytest.raises(ValueError, match=r"eta = 1\.1 exceeds 1"):
        coefficients("cps", 4, 1.1)
    assert coefficients("ddim_sde", 0, 1.3).std < TIMES[1]  # 1 - t is small there
    with pytest.raises(ValueError, match=r"eta = 1\.3 .* at t = 0\.278049; .* = 1\.17"):
        coefficients("ddim_sde", 8, 1.3)
    assert coefficients("ddim_sde", 9, 1.3) == Coefficients(noise=0.0, std=0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flow", 0.7, "clamp", 0.96), "unknown kernel 'flow': choose from .*'flow_sde'"),
        (("ode", -0.1, "clamp", 0.96), r"eta = -0\.1"),
        (("ode", math.nan, "clamp", 0.96), "eta = nan"),
        (("ode", 0.7, "skip", 0.96), "first_step = 'skip'"),
        (("ode", 0.7, "clamp", 1.0), r"second_time = 1\.0"),
    ],
)
def test_bad_settings_are_refused(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_kernel(*arguments)


@pytest.mark.parametrize(("t", "t_next"), [(0.5, 0.5), (0.5, 0.6), (1.1, 0.5), (0.5, -0.1)])
def test_time_must_fall(t: float, t_next: float) -> None:
    with pytest.raises(AssertionError, match="t falls"):
        make_kernel("ode", 0.0, "clamp", 0.96).coefficients(t, t_next)


class HalfNoise(kernels.KernelSettings):
    def _choose(self, t: float, t_next: float) -> Coefficients:
        return Coefficients(noise=t_next / 2, std=self.eta)


def test_a_plug_in_is_found_by_its_path() -> None:
    kernel = make_kernel(f"{__name__}:HalfNoise", 0.2, "clamp", 0.96)
    assert kernel == HalfNoise(0.2, "clamp", 0.96)
    assert kernel.coefficients(0.8, 0.6) == Coefficients(noise=0.3, std=0.2)


def test_values_for_another_batch_size_or_shape_fail() -> None:
    with pytest.raises(AssertionError, match="4 items"):
        step_mean(X, V, torch.ones(3), torch.zeros(3), torch.zeros(3))
    with pytest.raises(AssertionError, match="differ"):
        step_mean(X, V[:, :1], 0.5, 0.4, 0.4)
    with pytest.raises(AssertionError, match="differ"):
        step(X, 0.5, V[:, :1])
