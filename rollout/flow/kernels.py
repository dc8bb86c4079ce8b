"""Kernels: the Gaussian of one transition x_t -> x_t'.

All are members of one family (docs/papers.md section 0):

    x_t' = (1 - t') x0_hat + k x1_hat + s eps,   x0_hat = x_t - t v,   x1_hat = x_t + (1 - t) v

and a kernel only chooses k (`Coefficients.noise`) and s (`Coefficients.std`).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, Protocol, overload

from torch import Tensor

from rollout.flow.tensors import double, expand, working_dtype
from rollout.registry import load_object

FirstStep = Literal["clamp", "literal"]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What a kernel says about one transition; the coefficient of x0_hat is always 1 - t'."""

    noise: float
    """k, the coefficient of the predicted noise x1_hat."""
    std: float
    """s, the std of the transition; 0 makes it deterministic."""


class Kernel(Protocol):
    """Chooses the coefficients of a transition from t to t_next, 0 <= t_next < t <= 1."""

    def coefficients(self, t: float, t_next: float) -> Coefficients:
        """Coefficients in float64 arithmetic. Raises ValueError where the kernel has none."""
        ...


@dataclass(frozen=True)
class KernelSettings(ABC):
    """The fields of every kernel. Raises ValueError when eta is negative, first_step is neither
    "clamp" nor "literal", or second_time isn't in [0, 1)."""

    eta: float
    """Noise level; 0 gives the Euler step of the ODE."""
    first_step: FirstStep
    """At t = 1 a kernel's noise level is taken at second_time ("clamp") or at 1 itself
    ("literal")."""
    second_time: float
    """The schedule's second time, times[1]."""

    def __post_init__(self) -> None:
        if not (self.eta >= 0 and math.isfinite(self.eta)):
            raise ValueError(f"eta = {self.eta} must be a number >= 0")
        if self.first_step not in ("clamp", "literal"):
            raise ValueError(f"first_step = {self.first_step!r} must be 'clamp' or 'literal'")
        if not 0 <= self.second_time < 1:
            raise ValueError(f"second_time = {self.second_time} must be in [0, 1)")

    def coefficients(self, t: float, t_next: float) -> Coefficients:
        """Coefficients of the transition from t to t_next, 0 <= t_next < t <= 1."""
        assert 0 <= t_next < t <= 1, f"no transition from t = {t} to t_next = {t_next}: t falls"
        return self._choose(float(t), float(t_next))

    @abstractmethod
    def _choose(self, t: float, t_next: float) -> Coefficients:
        """The kernel's formula, for times that `coefficients` has checked."""


class Ode(KernelSettings):
    """k = t', s = 0: the Euler step, whatever eta is."""

    def _choose(self, t: float, t_next: float) -> Coefficients:
        return Coefficients(noise=t_next, std=0.0)


class FlowSde(KernelSettings):
    """Flow-GRPO's SDE (docs/papers.md section 2): sigma = eta sqrt(t / (1 - t)), s = sigma sqrt(Dt),
    k = t' - sigma^2 Dt / (2 t).

    In 1 - t, and nowhere else, t = 1 is replaced by second_time, as Flow-GRPO's code does. Taken
    literally it would divide by zero: with first_step = "literal" that transition raises
    ValueError.
    """

    def _choose(self, t: float, t_next: float) -> Coefficients:
        if t == 1 and self.first_step == "literal":
            raise ValueError(
                "flow_sde with first_step = 'literal': sigma = eta sqrt(t / (1 - t)) divides by "
                "zero at t = 1; use first_step = 'clamp'"
            )
        variance_rate = self.eta**2 * t / (1 - (self.second_time if t == 1 else t))
        return _first_order(variance_rate, t, t_next)


class DanceSde(KernelSettings):
    """DanceGRPO's SDE (docs/papers.md section 0): sigma = eta, s = eta sqrt(Dt), k = t' - eta^2 Dt / (2
    t).

    Needs no special case at t = 1: first_step isn't read.
    """

    def _choose(self, t: float, t_next: float) -> Coefficients:
        return _first_order(self.eta**2, t, t_next)


class Cps(KernelSettings):
    """Coefficients-preserving sampling (docs/papers.md section 4): s = t' sin(eta pi / 2),
    k = t' cos(eta pi / 2), so k^2 + s^2 = t'^2. first_step isn't read.

    Raises ValueError when eta > 1, where no s <= t' exists.
    """

    def _choose(self, t: float, t_next: float) -> Coefficients:
        if self.eta > 1:
            raise ValueError(f"cps: eta = {self.eta} exceeds 1, at which std = t' already")
        angle = self.eta * math.pi / 2
        return Coefficients(noise=t_next * math.cos(angle), std=t_next * math.sin(angle))


class DdimSde(KernelSettings):
    """Stepwise-Flow-GRPO's SDE (docs/papers.md section 1): s = eta t' sqrt(1 - t), k = sqrt(t'^2 - s^2).

    first_step = "clamp" replaces t by second_time where t is larger; "literal" keeps the paper's
    formula, whose first transition has std 0.

    Raises ValueError when s would exceed t', i.e. eta > 1 / sqrt(1 - t).
    """

    def _choose(self, t: float, t_next: float) -> Coefficients:
        clamped = min(t, self.second_time) if self.first_step == "clamp" else t
        share = self.eta * math.sqrt(1 - clamped)
        if t_next > 0 and share > 1:
            bound = 1 / math.sqrt(1 - clamped)
            raise ValueError(
                f"ddim_sde: eta = {self.eta} gives std = {share * t_next:.6g} > t' = {t_next:.6g} "
                f"at t = {t:.6g}; eta may be at most 1 / sqrt(1 - t) = {bound:.6g}"
            )
        rest = math.sqrt(max(1 - share**2, 0.0))
        return Coefficients(noise=t_next * rest, std=t_next * share)


class Precise(KernelSettings):
    """PRECISE (docs/papers.md section 4, related): the exact transition of the linear SDE with x0_hat
    frozen, rho = [t' (1 - t) / (t (1 - t'))]^(eta^2 / 2), k = t' rho, s = t' sqrt(1 - rho^2).

    At t = 1 rho is 0 (all noise is fresh) unless eta = 0; first_step isn't read.
    """

    def _choose(self, t: float, t_next: float) -> Coefficients:
        rho = min(1.0, t_next * (1 - t) / (t * (1 - t_next))) ** (self.eta**2 / 2)
        return Coefficients(noise=t_next * rho, std=t_next * math.sqrt(1 - rho**2))


KERNELS: dict[str, type] = {
    "ode": Ode,
    "flow_sde": FlowSde,
    "dance_sde": DanceSde,
    "cps": Cps,
    "ddim_sde": DdimSde,
    "precise": Precise,
}


def make_kernel(name: str, eta: float, first_step: FirstStep, second_time: float) -> Kernel:
    """The kernel that `name` stands for: one of KERNELS, or "my.module:Class" taking these fields.

    second_time is the schedule's times[1]. Raises ValueError on an unknown name, and what the
    kernel's own checks raise.
    """
    if ":" not in name and name not in KERNELS:
        raise ValueError(
            f"unknown kernel {name!r}: choose from {sorted(KERNELS)} or 'my.module:Class'"
        )
    kernel_class = KERNELS[name] if name in KERNELS else load_object(name)
    return kernel_class(eta=eta, first_step=first_step, second_time=second_time)


def step_mean(
    x_t: Tensor,
    v_t: Tensor,
    t: float | Tensor,
    t_next: float | Tensor,
    noise_coefficient: float | Tensor,
) -> Tensor:
    """Mean of a transition, (1 - t') x0_hat + k x1_hat, [B, ...].

    x_t, v_t [B, ...] of any float dtype; t, t_next and k floats or [B]. Computed as
    [(1 - t') + k] x_t + [(1 - t) k - (1 - t') t] v_t, the same expression (docs/papers.md section 0),
    with the brackets in float64 and the rest in the promoted dtype, float32 or better.
    """
    assert x_t.shape == v_t.shape, f"{tuple(x_t.shape)} and {tuple(v_t.shape)} differ"
    dtype = working_dtype(x_t, v_t)
    x_t, v_t = x_t.to(dtype), v_t.to(dtype)
    t, t_next, k = double(t), double(t_next), double(noise_coefficient)
    return expand((1 - t_next) + k, x_t) * x_t + expand((1 - t) * k - (1 - t_next) * t, v_t) * v_t


def step(mean: Tensor, std: float | Tensor, noise: Tensor) -> Tensor:
    """The next state, mean + std noise, [B, ...]: mean and noise [B, ...], std a float or [B]."""
    assert mean.shape == noise.shape, f"{tuple(mean.shape)} and {tuple(noise.shape)} differ"
    dtype = working_dtype(mean, noise)
    return mean.to(dtype) + expand(std, mean.to(dtype)) * noise.to(dtype)


@overload
def sensitivity(t: float, t_next: float, noise_coefficient: float, std: float) -> float: ...
@overload
def sensitivity(t: Tensor, t_next: Tensor, noise_coefficient: Tensor, std: Tensor) -> Tensor: ...
def sensitivity(
    t: float | Tensor,
    t_next: float | Tensor,
    noise_coefficient: float | Tensor,
    std: float | Tensor,
) -> float | Tensor:
    """w = |d mean / d v| / s = |(1 - t) k - (1 - t') t| / s, of the shape of its arguments.

    How strongly the log-ratio answers to the velocity: log-ratio = -(w dv . eps) - (w dv)^2 / 2
    (docs/papers.md section 0). std must be positive.
    """
    return abs((1 - t) * noise_coefficient - (1 - t_next) * t) / std


def _first_order(variance_rate: float, t: float, t_next: float) -> Coefficients:
    """Coefficients of an Euler-Maruyama step with diffusion sigma^2 = variance_rate."""
    variance = variance_rate * (t - t_next)
    return Coefficients(noise=t_next - variance / (2 * t), std=math.sqrt(variance))
