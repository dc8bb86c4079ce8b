"""One loop that makes trajectories, for any kernel and any family, and the clean estimates along
them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.flow.estimates import VelocityFn, clean_estimate, refined_estimate
from rollout.flow.gaussian import log_prob
from rollout.flow.kernels import step, step_mean
from rollout.plan import StepPlan

NoiseFn = Callable[[int], Tensor]
"""step -> standard normal noise [B, *latent_shape], float32; asked only where the step's std is
above 0."""


@dataclass(frozen=True, slots=True)
class Path:
    """B trajectories of one sampling."""

    states: Tensor
    """float32 [T + 1, B, *latent_shape]; states[0] is x_T, states[T] the clean latent."""
    velocities: Tensor
    """float32 [T, B, *latent_shape], of the policy (guided where it is)."""
    log_probs: Tensor
    """float32 [T, B], of states[i + 1] given states[i]; NaN where std is 0."""


@torch.no_grad()
def sample(
    velocity_fn: VelocityFn,
    x_T: Tensor,
    plan: StepPlan,
    noise_fn: NoiseFn,
    first_velocity: Tensor | None = None,
) -> Path:
    """Walk from x_T [B, *latent_shape] (float32) to the clean latents: velocity -> kernel -> next
    state.

    velocity_fn(x [B, ...], t [B] float32) -> v [B, ...]. first_velocity [B, ...], that at x_T, if
    the caller has it already.
    """
    num_steps, batch = plan.num_steps, len(x_T)
    states = x_T.new_empty((num_steps + 1, *x_T.shape))
    velocities = x_T.new_empty((num_steps, *x_T.shape))
    log_probs = x_T.new_full((num_steps, batch), torch.nan)
    states[0] = x_T
    for i in range(num_steps):
        x_t, t, t_next, std = states[i], plan.times[i], plan.times[i + 1], plan.std[i]
        if i == 0 and first_velocity is not None:
            velocities[i] = first_velocity
        else:
            velocities[i] = velocity_fn(x_t, x_t.new_full((batch,), t))
        mean = step_mean(x_t, velocities[i], t, t_next, plan.noise_coefficient[i])
        if std > 0:
            states[i + 1] = step(mean, std, noise_fn(i).to(mean.device))
            log_probs[i] = log_prob(states[i + 1], mean, std)
        else:
            states[i + 1] = mean
    return Path(states, velocities, log_probs)


@torch.no_grad()
def clean_estimates(
    velocity_of: Callable[[Tensor], VelocityFn],
    path: Path,
    plan: StepPlan,
    state_index: Tensor,
    row_index: Tensor,
    max_batch: int,
) -> Tensor:
    """Estimate the clean latents at P (state, row) pairs of `path`: float32 [P, *latent_shape].

    state_index and row_index are int64 [P]. The stored velocity is the first of the T' substeps, so
    T' = 1 calls no network; otherwise pairs of all states with t > 0 share batches of at most
    max_batch, and velocity_of(rows [b]) gives the velocity function of those rows' prompts. At t =
    0 the state is the estimate.
    """
    estimates = path.states[state_index, row_index]
    noisy = torch.nonzero(state_index < plan.num_steps).flatten()
    times = torch.tensor(plan.times, dtype=torch.float32, device=estimates.device)
    for chosen in noisy.split(max_batch):
        states, rows = state_index[chosen], row_index[chosen]
        x_t, v_t, t = estimates[chosen], path.velocities[states, rows], times[states]
        if plan.num_substeps == 1:
            estimates[chosen] = clean_estimate(x_t, v_t, t)
        else:
            estimates[chosen] = refined_estimate(velocity_of(rows), x_t, v_t, t, plan.num_substeps)
    return estimates
