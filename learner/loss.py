"""The loss of a micro-batch of transitions: velocity -> kernel -> log-prob -> objective + KL."""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.config import ObjectiveConfig
from learner.objective import Objective
from rollout.families.base import Conditioning, PolicyVelocity
from rollout.flow.gaussian import kl_exact, kl_velocity, kl_without_dt, log_prob
from rollout.flow.kernels import step_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """B transitions x_t -> x_next of one micro-batch, on the learner's device."""

    x_t: Tensor
    """float32 [B, *latent_shape]."""
    x_next: Tensor
    """float32 [B, *latent_shape]."""
    t: Tensor
    """float64 [B], like t_next, noise_coefficient and std: the numbers that the rollout's kernel
    used."""
    t_next: Tensor
    noise_coefficient: Tensor
    std: Tensor
    """Above 0 in every row."""
    old_log_prob: Tensor
    """float32 [B], of the policy that sampled."""
    advantage: Tensor
    """float32 [B]."""
    weight: Tensor
    """float32 [B]: 1 / global denominator, 0 for a row that only fills up."""
    conditioning: Conditioning
    """One row a transition."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Detached by-products."""

    loss: Tensor
    """Scalar: this micro-batch's share of the update's mean loss."""
    kl: Tensor
    """Scalar: its share of the mean KL, before kl_weight."""
    log_ratio: Tensor
    """[B]."""
    ratio: Tensor
    """[B]."""
    clipped: Tensor
    """bool [B]."""
    truncated: Tensor
    """bool [B]."""


def transition_loss(
    policy: PolicyVelocity,
    batch: Transitions,
    objective: Objective,
    config: ObjectiveConfig,
    v_ref: Tensor | None = None,
) -> tuple[Tensor, LossTerms]:
    """Return sum_i weight_i (objective_i + kl_weight KL_i), a differentiable scalar, and its parts.

    Velocity, kernel and log-prob are the rollout's own functions, so that on-policy the ratio is 1.
    v_ref [B, ...] are the reference's velocities at the same states, needed when kl_weight > 0.
    """
    v = policy(batch.x_t, batch.t.float(), batch.conditioning)
    mean = step_mean(batch.x_t, v, batch.t, batch.t_next, batch.noise_coefficient)
    new_log_prob = log_prob(batch.x_next, mean, batch.std)
    out = objective(new_log_prob, batch.old_log_prob, batch.advantage)
    loss = (out.loss * batch.weight).sum()
    kl = loss.new_zeros(())
    if config.kl_weight > 0:
        assert v_ref is not None, "kl_weight > 0 needs the reference's velocities"
        kl = (_kl(config, batch, v, mean, v_ref) * batch.weight).sum()
        loss = loss + config.kl_weight * kl
    log_ratio = (new_log_prob - batch.old_log_prob).detach()
    truncated = torch.zeros_like(out.clipped) if out.truncated is None else out.truncated
    return loss, LossTerms(loss.detach(), kl.detach(), log_ratio, out.ratio, out.clipped, truncated)


def _kl(
    config: ObjectiveConfig, batch: Transitions, v: Tensor, mean: Tensor, v_ref: Tensor
) -> Tensor:
    """[B], in the form that the config names."""
    if config.kl_form == "velocity":
        return kl_velocity(v, v_ref)
    mean_ref = step_mean(batch.x_t, v_ref, batch.t, batch.t_next, batch.noise_coefficient)
    if config.kl_form == "exact":
        return kl_exact(mean, mean_ref, batch.std)
    return kl_without_dt(mean, mean_ref, batch.std, batch.t - batch.t_next)
