import math

import numpy as np
import pytest
import torch

from rollout.flow.gaussian import (
    LOG_PROB_REDUCTION,
    kl_exact,
    kl_velocity,
    kl_without_dt,
    log_prob,
)
from rollout.flow.kernels import make_kernel, sensitivity, step, step_mean
from rollout.flow.schedule import shifted_times
from tests.reference import ground_truth

TIMES = shifted_times(10, 3.0).tolist()
GENERATOR = torch.Generator().manual_seed(2)
X, V, W, EPS = torch.randn(4, 3, 2, 2, dtype=torch.float64, generator=GENERATOR).unbind()
STD = torch.tensor([0.01, 0.3, 2.0], dtype=torch.float64)
STOCHASTIC = [
    ("flow_sde", 0.7, range(10)),
    ("dance_sde", 0.3, range(10)),
    ("cps", 0.8, range(9)),
    ("ddim_sde", 0.7, range(9)),
    ("precise", 0.7, range(9)),
]


def test_log_prob_is_the_mean_log_density_of_the_dimensions() -> None:
    assert LOG_PROB_REDUCTION == "mean"
    result = log_prob(X, V, STD)
    for i, std in enumerate(STD.tolist()):
        slow = ground_truth.log_prob(X[i].numpy(), V[i].numpy(), std)
        assert float(result[i]) == pytest.approx(slow, rel=1e-12)


def test_log_prob_at_the_mean_is_the_normalising_constant() -> None:
    expected = -STD.log() - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(log_prob(X, X, STD), expected, atol=1e-15, rtol=1e-15)


def test_kl_exact_is_the_divergence_of_two_gaussians() -> None:
    result = kl_exact(X, V, STD)
    for i, std in enumerate(STD.tolist()):
        slow = ground_truth.kl(X[i].numpy(), V[i].numpy(), std)
        assert float(result[i]) == pytest.approx(slow, rel=1e-9)
    assert torch.equal(kl_exact(X, X, STD), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("i", range(10))
def test_kl_of_flow_sde_in_closed_form(i: int) -> None:
    """docs/papers.md section 2: (Dt/2) (sigma (1-t)/(2t) + 1/sigma)^2 ||dv||^2; the first step's sigma
    is that of the clamped time."""
    t, t_next = TIMES[i], TIMES[i + 1]
    c = make_kernel("flow_sde", 0.7, "clamp", TIMES[1]).coefficients(t, t_next)
    mean, mean_ref = step_mean(X, V, t, t_next, c.noise), step_mean(X, W, t, t_next, c.noise)
    dt = t - t_next
    sigma = c.std / math.sqrt(dt)
    dv2 = (V - W).square().mean(dim=(1, 2))
    closed = dt / 2 * (sigma * (1 - t) / (2 * t) + 1 / sigma) ** 2 * dv2
    torch.testing.assert_close(kl_exact(mean, mean_ref, c.std), closed, rtol=1e-10, atol=0)
    code = (mean - mean_ref).square().mean(dim=(1, 2)) / (2 * sigma**2)  # section 2, "KL code"
    result = kl_without_dt(mean, mean_ref, c.std, dt)
    torch.testing.assert_close(result, code, rtol=1e-12, atol=0)


def test_kl_without_dt_takes_one_dt_per_item() -> None:
    dt = torch.tensor([0.1, 0.2, 0.3])
    result = kl_without_dt(X, V, STD, dt)
    torch.testing.assert_close(result, kl_exact(X, V, STD) * dt.double(), rtol=1e-14, atol=0)


def test_kl_velocity_is_half_the_mean_square() -> None:
    slow = [0.5 * float(np.mean((V[i].numpy() - W[i].numpy()) ** 2)) for i in range(3)]
    assert kl_velocity(V, W).tolist() == pytest.approx(slow, rel=1e-14)


@pytest.mark.parametrize(("name", "eta", "steps"), STOCHASTIC)
def test_log_ratio_identity_of_every_kernel_and_step(name: str, eta: float, steps: range) -> None:
    """docs/papers.md section 0: log-ratio = -(w dv . eps) - (w dv)^2 / 2 per dimension."""
    kernel = make_kernel(name, eta, "clamp", TIMES[1])
    for i in steps:
        t, t_next = TIMES[i], TIMES[i + 1]
        c = kernel.coefficients(t, t_next)
        w = sensitivity(t, t_next, c.noise, c.std)
        old, new = step_mean(X, W, t, t_next, c.noise), step_mean(X, V, t, t_next, c.noise)
        x_next = step(old, c.std, EPS)
        log_ratio = log_prob(x_next, new, c.std) - log_prob(x_next, old, c.std)
        dv = V - W
        identity = (-(w * dv * EPS) - (w * dv).square() / 2).mean(dim=(1, 2))
        torch.testing.assert_close(log_ratio, identity, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "eta", "steps"), STOCHASTIC)
def test_ratio_is_one_to_the_bit_before_an_update(
    name: str, eta: float, steps: range, dtype: torch.dtype
) -> None:
    """The rollout passes floats, step by step; the learner one batch of transitions at mixed
    steps."""
    kernel = make_kernel(name, eta, "clamp", TIMES[1])
    rows = []
    for i in steps:
        t, t_next = TIMES[i], TIMES[i + 1]
        c = kernel.coefficients(t, t_next)
        mean = step_mean(X.to(dtype), V.to(dtype), t, t_next, c.noise)
        x_next = step(mean, c.std, EPS.to(dtype))
        rows.append((t, t_next, c, x_next, log_prob(x_next, mean, c.std)))
    times, next_times, k, std = torch.tensor(
        [(t, t_next, c.noise, c.std) for t, t_next, c, *_ in rows for _ in range(3)],
        dtype=torch.float64,
    ).T
    x, v = (z.to(dtype).repeat(len(rows), 1, 1) for z in (X, V))
    states = torch.cat([row[3] for row in rows])
    again = log_prob(states, step_mean(x, v, times, next_times, k), std)
    ratio = (again - torch.cat([row[4] for row in rows])).exp()
    assert torch.equal(ratio, torch.ones_like(ratio))


def test_half_precision_is_cast_up() -> None:
    assert log_prob(X.bfloat16(), V.bfloat16(), STD).dtype == torch.float32
    assert kl_exact(X.half(), V.half(), 0.5).dtype == torch.float32
    assert kl_velocity(X.half(), V.half()).dtype == torch.float32
    assert log_prob(X, V.float(), 0.5).dtype == torch.float64


def test_the_gradient_of_log_prob_pulls_the_mean_to_the_sample() -> None:
    mean = V.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(log_prob(X, mean, STD).sum(), mean)
    expected = (X - V) / STD[:, None, None].square() / 4
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("std", [0.0, -1.0, torch.tensor([1.0, 0.0, 1.0]), math.nan])
def test_a_transition_without_noise_has_no_density(std) -> None:
    for function in (log_prob, kl_exact):
        with pytest.raises(AssertionError, match="must be positive"):
            function(X, V, std)
    with pytest.raises(AssertionError, match="must be positive"):
        kl_without_dt(X, V, 0.5, std)


def test_differing_shapes_fail() -> None:
    with pytest.raises(AssertionError, match="differ"):
        log_prob(X, V[:, :1], 0.5)
