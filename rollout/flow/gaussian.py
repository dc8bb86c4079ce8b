"""Log-probability and KL of Gaussian transitions.

Every function reduces the latent dimensions by their MEAN, as all reference codes do (docs/papers.md
section 0, "conventions that bite"): clip ranges and KL weights depend on that, so it's named here,
in one place, and recorded in the trajectory's metadata.

Shapes: latents [B, ...]; std a float or [B]; results [B]. Arithmetic is in the promoted dtype of
the latents, float32 or better. A std that isn't positive, or shapes that differ, fail an assertion:
transitions without noise have no density and must have been left out by the caller.
"""

import math

import torch
from torch import Tensor

from rollout.flow.tensors import expand, working_dtype

LOG_PROB_REDUCTION = "mean"
"""How log_prob and the KLs reduce the latent dimensions."""


def log_prob(x: Tensor, mean: Tensor, std: float | Tensor) -> Tensor:
    """Log density of N(mean, std^2 I) at x, per dimension, [B].

        mean_d[ -(x_d - mean_d)^2 / (2 std^2) ] - log std - log(2 pi) / 2

    Source: docs/papers.md section 1 and section 2, Flow-GRPO's code.
    """
    difference = _difference(x, mean)
    std = _positive(std, difference)
    squares = _mean((difference / expand(std, difference)).square())
    constant = (std.log() + 0.5 * math.log(2 * math.pi)).to(difference.dtype)
    return -0.5 * squares - constant


def kl_exact(mean: Tensor, mean_ref: Tensor, std: float | Tensor) -> Tensor:
    """KL of two transitions with the same std, per dimension, [B]: mean_d[dmu_d^2] / (2 std^2).

    Source: docs/papers.md section 1; section 2, "KL paper", where std^2 = sigma_t^2 Dt.
    """
    difference = _difference(mean, mean_ref)
    std = _positive(std, difference)
    return 0.5 * _mean((difference / expand(std, difference)).square())


def kl_without_dt(
    mean: Tensor, mean_ref: Tensor, std: float | Tensor, dt: float | Tensor
) -> Tensor:
    """Flow-GRPO's code: mean_d[dmu_d^2] / (2 std^2 / Dt), [B].

    std is that of the step (sigma_t sqrt(Dt)), dt = Dt = t - t' > 0 a float or [B]: the denominator
    holds the variance per unit of time, so the result is Dt times `kl_exact`, and its weight is
    another beta. Source: docs/papers.md section 2, "KL code".
    """
    exact = kl_exact(mean, mean_ref, std)
    return exact * _positive(dt, exact).to(exact.dtype)


def kl_velocity(v: Tensor, v_ref: Tensor) -> Tensor:
    """Half the mean squared difference of two velocities, [B]: mean_d[dv_d^2] / 2.

    No kernel enters, so it's also defined where std = 0. Source: docs/papers.md section 2.
    """
    return 0.5 * _mean(_difference(v, v_ref).square())


def _difference(a: Tensor, b: Tensor) -> Tensor:
    assert a.shape == b.shape, f"{tuple(a.shape)} and {tuple(b.shape)} differ"
    dtype = working_dtype(a, b)
    return a.to(dtype) - b.to(dtype)


def _positive(value: float | Tensor, like: Tensor) -> Tensor:
    """`value` as a float64 tensor, without dimensions or [B], on the device of `like`."""
    value = torch.as_tensor(value, dtype=torch.float64, device=like.device)
    assert bool((value > 0).all()), f"{value} must be positive"
    return value


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(dim=1)
