"""What a user may say about rewards. Imports no torch."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A table of the run's TOML: unknown keys fail, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RewardConfig(Section):
    """One reward of the weighted sum, and the server that computes it."""

    name: str
    """Registry name (shapes | jpeg), or "my.module:Class"."""
    weight: float = 1.0
    """Its factor in the total that is trained on; 0 measures without training."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward's constructor."""
    max_batch: int = Field(default=256, ge=1)
    """Most images of one reward call."""
    max_wait_s: float = Field(default=0.02, ge=0)
    """How long the server waits for more images before it calls with fewer."""
    timeout_s: float = Field(default=60.0, gt=0)
    """A call that takes longer is a typed failure."""
    threads: int = Field(default=1, ge=1)
    gpus: float = Field(default=0.0, ge=0)
    replicas: int = Field(default=1, ge=1)
    """Servers of this reward at the start; `flowcredit scale` changes it while the run goes on."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that one server takes, such as {reward = 1}: they name the nodes of its pool."""


class RewardsConfig(Section):
    """The rewards of a run; the total is their weighted sum, parts are kept."""

    components: list[RewardConfig] = Field(min_length=1)
    max_rescores: int = Field(default=1, ge=0)
    """How often a failed scoring is tried again before its group is dropped."""

    @model_validator(mode="after")
    def names_are_unique_and_one_counts(self) -> "RewardsConfig":
        names = [component.name for component in self.components]
        if len(set(names)) != len(names):
            raise ValueError(f"rewards.components names repeat: {names}; give each reward once")
        if all(component.weight == 0 for component in self.components):
            raise ValueError(
                "every reward has weight 0, so there is nothing to train on; give one a weight"
            )
        return self
