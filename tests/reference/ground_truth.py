"""Slow, obvious float64 versions of the pure maths, written from the papers' formulas.

Deliberately in another form than the source: drift and diffusion instead of coefficients, loops
over items instead of broadcasting, statistics on Python lists. Array arguments are numpy; times are
floats.
"""

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from scipy import integrate
from scipy.stats import norm

Array = np.ndarray


def shifted_times(num_steps: int, shift: float) -> list[float]:
    """docs/papers.md section 0: u = linspace(1, t_min, T), t = shift u / (1 + (shift - 1) u), then 0."""
    t_min = shift * 0.001 / (1 + (shift - 1) * 0.001)
    grid = [1 + (t_min - 1) * i / (num_steps - 1) for i in range(num_steps)]
    return [shift * u / (1 + (shift - 1) * u) for u in grid] + [0.0]


def clean_estimate(x: Array, v: Array, t: float) -> Array:
    """Solve x = (1 - t) x0 + t x1 and v = x1 - x0 for x0."""
    return np.linalg.solve([[1 - t, t], [-1, 1]], np.stack([x.ravel(), v.ravel()]))[0].reshape(
        x.shape
    )


def noise_estimate(x: Array, v: Array, t: float) -> Array:
    """The same system, solved for x1."""
    return np.linalg.solve([[1 - t, t], [-1, 1]], np.stack([x.ravel(), v.ravel()]))[1].reshape(
        x.shape
    )


def euler_step(x: Array, v: Array, t: float, t_next: float) -> Array:
    """dx = v dt."""
    return x + v * (t_next - t)


def sde_step(x: Array, v: Array, t: float, t_next: float, sigma: float) -> tuple[Array, float]:
    """Euler-Maruyama on dx = [v + sigma^2 / (2 t) (x + (1 - t) v)] dt + sigma dw (section 2)."""
    drift = v + sigma**2 / (2 * t) * (x + (1 - t) * v)
    return x + drift * (t_next - t), sigma * math.sqrt(t - t_next)


def preserving_step(x: Array, v: Array, t: float, t_next: float, std: float) -> tuple[Array, float]:
    """(1 - t') x0_hat + sqrt(t'^2 - std^2) x1_hat (sections 1 and 4)."""
    x0, x1 = clean_estimate(x, v, t), noise_estimate(x, v, t)
    return (1 - t_next) * x0 + math.sqrt(t_next**2 - std**2) * x1, std


def precise_step(x: Array, v: Array, t: float, t_next: float, eta: float) -> tuple[Array, float]:
    """rho = exp(-int_{t'}^{t} eta^2 / (2 s (1 - s)) ds), the decay of the noise part (section
    4)."""
    if eta == 0:
        rho = 1.0
    elif t == 1 or t_next == 0:  # the integral diverges
        rho = 0.0
    else:
        rho = math.exp(-integrate.quad(lambda s: eta**2 / (2 * s * (1 - s)), t_next, t)[0])
    x0, x1 = clean_estimate(x, v, t), noise_estimate(x, v, t)
    return (1 - t_next) * x0 + t_next * rho * x1, t_next * math.sqrt(1 - rho**2)


def kernel_step(
    name: str, x: Array, v: Array, times: Sequence[float], i: int, eta: float, first_step: str
) -> tuple[Array, float]:
    """Mean and std of transition i of `times` under the kernel `name`."""
    t, t_next = times[i], times[i + 1]
    noisy_end = times[1] if t == 1 and first_step == "clamp" else t
    if name == "ode":
        return euler_step(x, v, t, t_next), 0.0
    if name == "flow_sde":
        return sde_step(x, v, t, t_next, eta * math.sqrt(t / (1 - noisy_end)))
    if name == "dance_sde":
        return sde_step(x, v, t, t_next, eta)
    if name == "cps":
        return preserving_step(x, v, t, t_next, t_next * math.sin(eta * math.pi / 2))
    if name == "ddim_sde":
        return preserving_step(x, v, t, t_next, eta * t_next * math.sqrt(1 - noisy_end))
    if name == "precise":
        return precise_step(x, v, t, t_next, eta)
    raise ValueError(name)


def log_prob(x: Array, mean: Array, std: float) -> float:
    """Mean over the dimensions of one item's log density."""
    return float(np.mean([norm.logpdf(a, m, std) for a, m in zip(x.flat, mean.flat, strict=True)]))


def kl(mean: Array, mean_ref: Array, std: float) -> float:
    """E_{x ~ N(mean, std^2)}[log p - log p_ref], per dimension, by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    total = 0.0
    for m, r in zip(mean.flat, mean_ref.flat, strict=True):
        x = m + std * nodes
        gap = norm.logpdf(x, m, std) - norm.logpdf(x, r, std)
        total += float(np.sum(weights * gap) / np.sum(weights))
    return total / mean.size


def gaussian_velocity(x: Array, t: float, data_std: float) -> Array:
    """E[x_1 - x_0 | x_t] for data N(0, data_std^2): the regression of x_1 - x_0 on x_t."""
    covariance = t - (1 - t) * data_std**2
    variance = (1 - t) ** 2 * data_std**2 + t**2
    return covariance / variance * x


def gaussian_flow_map(x: Array, t: float, data_std: float) -> Array:
    """Exact flow map from t to 0 for that data: it keeps x over its std."""
    return x * data_std / math.sqrt((1 - t) ** 2 * data_std**2 + t**2)


def gains(states: Sequence[float]) -> list[float]:
    """Gain of each transition of one trajectory; NaN states are bridged by the segment's gain."""
    result = []
    for j in range(len(states) - 1):
        before = next(states[i] for i in range(j, -1, -1) if not math.isnan(states[i]))
        after = next(states[i] for i in range(j + 1, len(states)) if not math.isnan(states[i]))
        result.append(after - before)
    return result


def gae(states: Sequence[float], gae_lambda: float) -> list[float]:
    """sum_l lambda^l g_{j+l}, each sum written out; every state scored."""
    g = gains(states)
    return [sum(gae_lambda**k * g[j + k] for k in range(len(g) - j)) for j in range(len(g))]


def standardise(values: Sequence[float], eps: float) -> list[float]:
    """(value - mean) / (population std + eps)."""
    mean, std = statistics.fmean(values), statistics.pstdev(values)
    return [(value - mean) / (std + eps) for value in values]


def ppo(log_ratio: float, advantage: float, clip_range: float) -> float:
    """-min(r A, clip(r) A), by cases."""
    r = math.exp(log_ratio)
    clipped = min(max(r, 1 - clip_range), 1 + clip_range)
    return -min(r * advantage, clipped * advantage)


def numeric_gradient(f: Callable[[float], float], x: float, width: float = 1e-6) -> float:
    """Central difference."""
    return (f(x + width) - f(x - width)) / (2 * width)
