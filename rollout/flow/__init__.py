"""Pure maths of flow-matching trajectories: schedule, clean estimates, kernels, Gaussians, noise.

Needs torch and numpy only (of ours, `rollout.registry` finds plug-in kernels by their path); noise is
always an argument. `t` falls from 1 (noise) to 0 (image).

Example, one transition of B trajectories:
    kernel = make_kernel("ddim_sde", eta=0.7, first_step="clamp", second_time=float(times[1]))
    k, s = (c := kernel.coefficients(t, t_next)).noise, c.std
    x_next = step(mean := step_mean(x_t, v_t, t, t_next, k), s, noise)
    log_prob(x_next, mean, s)                                        # [B]
"""

from rollout.flow.estimates import clean_estimate, noise_estimate, refined_estimate
from rollout.flow.gaussian import (
    LOG_PROB_REDUCTION,
    kl_exact,
    kl_velocity,
    kl_without_dt,
    log_prob,
)
from rollout.flow.kernels import (
    KERNELS,
    Coefficients,
    Kernel,
    make_kernel,
    sensitivity,
    step,
    step_mean,
)
from rollout.flow.noise import draw, initial_noise, step_noise, stream_seed
from rollout.flow.schedule import shifted_times
from rollout.flow.tensors import expand

__all__ = [
    "KERNELS",
    "LOG_PROB_REDUCTION",
    "Coefficients",
    "Kernel",
    "clean_estimate",
    "draw",
    "expand",
    "initial_noise",
    "kl_exact",
    "kl_velocity",
    "kl_without_dt",
    "log_prob",
    "make_kernel",
    "noise_estimate",
    "refined_estimate",
    "sensitivity",
    "shifted_times",
    "step",
    "step_mean",
    "step_noise",
    "stream_seed",
]
