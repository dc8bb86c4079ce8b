"""What one learner step did, in numbers. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStats:
    """One batch of groups, over all ranks. Means over transitions are taken over trained ones."""

    policy_version: int
    """That the batch was sampled with (the oldest, if several)."""
    on_policy: bool
    """Whether all groups were sampled with the weights that the step began from; then the ratio
    gate was applied. Never for recorded groups."""
    loss: float
    """Objective and weighted KL, mean over transitions, mean over updates."""
    kl: float
    """Before its weight; 0 when kl_weight is 0."""
    ratio_mean: float
    ratio_max_deviation: float
    """Largest |ratio - 1| of all updates."""
    max_abs_log_ratio: float
    """Largest |log ratio| of the first update, before any step. If on_policy, that is the mismatch
    of rollout and learner; else it also holds how far the weights have moved."""
    clipped_frac: float
    """Transitions whose loss has no gradient, truncated ones among them."""
    truncated_frac: float
    """Ratios above objective.max_ratio; 0 without it."""
    grad_norm: list[float]
    """Of each update, before clipping."""
    reward_mean: float
    """Of the images."""
    reward_std: float
    gain_per_step: list[float | None]
    """[T], mean reward difference of the two states of each transition; None where one of them
    wasn't scored."""
    abs_advantage_per_step: list[float]
    """[T], mean |advantage|; 0 where untrained."""
    zero_variance_frac: float
    """Groups without signal."""
    num_groups: int
    num_transitions: int
    """Trained transitions."""
    num_network_calls: int
    """Latents that went through the network for them, reference pass included; a guided velocity
    counts two."""
    num_padding_calls: int
    """Further ones, in rows that only fill up a micro-batch."""
    seconds: dict[str, float]
    """Of rank 0, by phase: credit, load, reference, accumulate, optimizer, ema."""
