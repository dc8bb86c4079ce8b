"""What a user may say about credit, objective and training. Imports no torch."""

from typing import Literal

from pydantic import Field, model_validator

from rollout.config import Section


class CreditConfig(Section):
    """From rewards to advantages."""

    rule: str = "gain"
    """outcome | gain | gae, or "my.module:Class"."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Only read by rule = "gae"."""
    normaliser: str = "joint"
    """Scope of mean and std: group | group_mean_batch_std | joint | per_step, or "my.module:Class"."""
    eps: float = Field(default=1e-4, ge=0)
    """Added to the std."""
    clip: float = Field(default=5.0, gt=0, allow_inf_nan=True)
    """Advantages are clipped to [-clip, clip]; inf leaves them."""


class ObjectiveConfig(Section):
    """From advantages and log-probs to a loss."""

    name: str = "ppo_clip"
    """ppo_clip, or "my.module:Class"."""
    clip_range: float = Field(default=1e-3, gt=0)
    """Belongs to the mean-over-dimensions log-prob: 1e-4 at 65,536 dimensions is about 1e-3 at 512."""
    max_ratio: float | None = Field(default=None, gt=1)
    """Larger importance ratios are truncated to it and have no gradient; above 1 + clip_range. It bounds a negative
    advantage's loss, which the clip leaves open, and matters with run.max_policy_lag > 0; none truncates nothing."""
    kl_weight: float = Field(default=0.0, ge=0)
    """beta; 0 makes no reference pass."""
    kl_form: Literal["exact", "without_dt", "velocity"] = "exact"
    """exact: ||dmu||^2 / (2 std^2); without_dt: Flow-GRPO's code, std^2 / Dt in its place; velocity: ||dv||^2 / 2."""


class LearnerConfig(Section):
    """How the weights are trained."""

    num_ranks: int = Field(default=1, ge=1)
    threads_per_rank: int = Field(default=1, ge=1)
    gpus_per_rank: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that one rank takes, such as {learner = 1}: they name the nodes of its pool."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    adapter: Literal["lora", "full"] = "lora"
    lora_rank: int = Field(default=8, ge=1)
    lora_alpha: float = Field(default=16.0, gt=0)
    lora_targets: list[str] | None = None
    """Module name endings; none takes the family's published list."""
    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=1e-4, ge=0)
    adam_eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer steps that one batch of trajectories is split into."""
    micro_batch: int = Field(default=64, ge=1)
    """Transitions of one forward and backward pass on one rank."""
    ratio_tolerance: float = Field(default=5e-5, gt=0)
    """Gate: before the first optimizer step on an on-policy batch, |log ratio| above this stops the run."""
    ema_decay: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the averaged weights, per optimizer step; 0 keeps none."""

    @model_validator(mode="after")
    def betas_are_fractions(self) -> "LearnerConfig":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)} must both lie in [0, 1)")
        return self
