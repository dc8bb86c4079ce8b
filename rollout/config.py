"""What a user may say about the model, the prompts and the sampling. Imports no torch."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A table of the run's TOML: unknown keys fail, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Which flow model is trained, and how its network is held in memory."""

    family: str = "sd3"
    """Registry name of the model family, or "my.module:Class"."""
    path: str
    """Folder in diffusers layout, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Storage and compute type of the network; kernel arithmetic is float32 or better whatever this says."""
    max_sequence_length: int = Field(default=16, ge=1)
    """Tokens that the family's last text encoder (T5, or the zeros that stand for it) contributes."""


class PromptConfig(Section):
    """Where training prompts come from."""

    path: str
    """JSONL file; each line an object with "prompt" and any metadata that the rewards need."""
    shuffle: bool = True
    """Visit the prompts in a seeded order that changes each epoch; false keeps the file's order."""


class SamplingConfig(Section):
    """How one trajectory is made, and which of its states are scored."""

    num_steps: int = Field(default=10, ge=2)
    """T: transitions of a trajectory; there are T + 1 states."""
    kernel: str = "ddim_sde"
    """ode | flow_sde | dance_sde | cps | ddim_sde | precise, or "my.module:Class"."""
    eta: float = Field(default=0.7, ge=0)
    """Noise level of the kernel (docs/papers.md section 0; Flow-GRPO calls it a)."""
    first_step: Literal["clamp", "literal"] = "clamp"
    """What t = 1 means inside a kernel's std: the schedule's second time (as Flow-GRPO does), or 1 itself."""
    min_std: float = Field(default=0.02, gt=0)
    """Transitions with a smaller std are taken but neither trained nor normalised over."""
    train_steps: list[int] | None = None
    """Transitions (0 = first) that may be trained; none means every one whose std reaches min_std."""
    scored_states: Literal["auto", "all", "trained", "final"] | list[int] = "auto"
    """States whose clean estimate is scored (0 = pure noise, T = image): all, both ends of each trained transition and
    the image (trained), the image alone (final), or a list; auto asks the credit rule."""
    num_substeps: int = Field(default=1, ge=1)
    """T': Euler substeps of a clean estimate; 1 is Tweedie's and costs no network call."""
    shared_initial_noise: bool = True
    """All trajectories of a group start from one x_T."""
    guidance_scale: float = Field(default=1.0, ge=1)
    """Classifier-free guidance; must be 1 when cfg_mode is off."""
    cfg_mode: Literal["off", "train"] = "off"
    """train: the guided velocity is the policy, in the rollout and in the ratio alike."""

    @model_validator(mode="after")
    def guidance_needs_cfg_mode_train(self) -> "SamplingConfig":
        if self.cfg_mode == "off" and self.guidance_scale != 1.0:
            raise ValueError(
                f"guidance_scale = {self.guidance_scale} has no effect with cfg_mode = 'off'; "
                "set cfg_mode = 'train' or guidance_scale = 1.0"
            )
        return self


class WorkersConfig(Section):
    """How many rollout workers: at the start, and between which bounds `flowcredit scale` may move them."""

    start: int = Field(default=1, ge=1)
    min: int = Field(default=1, ge=1)
    """A run begins when so many are ready; the others join when the cluster has room for them."""
    max: int = Field(default=1024, ge=1)

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> "WorkersConfig":
        if not self.min <= self.start <= self.max:
            raise ValueError(
                f"min = {self.min}, start = {self.start}, max = {self.max} must not fall in this order"
            )
        return self


class RolloutConfig(Section):
    """How many trajectories, and by how many actors."""

    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    """{start, min, max}; a plain number is its start."""
    threads_per_worker: int = Field(default=1, ge=1)
    """CPU threads of one actor; fixed, since a sum's order depends on it."""
    groups_per_batch: int = Field(default=16, ge=1)
    """B: groups that one training batch holds."""
    samples_per_group: int = Field(default=16, ge=2)
    """N: trajectories that share a prompt."""
    samples_per_slice: int | None = Field(default=None, ge=1)
    """Trajectories of a group that travel as one unit of work; none means the whole group."""
    slices_per_call: int = Field(default=1, ge=1)
    """Slices that a worker samples together in one network batch."""
    estimate_batch: int = Field(default=256, ge=1)
    """Most (trajectory, state) pairs refined or decoded in one call."""
    preview_groups: int = Field(default=1, ge=0)
    """Groups of each batch whose first trajectories keep PNG previews in the buffer, for reports."""
    preview_samples: int = Field(default=2, ge=0)
    """Trajectories of such a group that keep them."""
    embedding_dtype: Literal["float32", "float16"] = "float32"
    """Storage type of prompt embeddings in recorded trajectories; the rollout samples with embeddings rounded to it."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that one worker takes, such as {rollout = 1}: they name the nodes of its pool."""

    @field_validator("workers", mode="before")
    @classmethod
    def a_number_is_the_start(cls, value: Any) -> Any:
        return {"start": value} if type(value) is int else value

    @property
    def slice_size(self) -> int:
        """Trajectories of one slice."""
        return self.samples_per_slice or self.samples_per_group

    @property
    def slices_per_group(self) -> int:
        """Slices that make one group."""
        return self.samples_per_group // self.slice_size

    @model_validator(mode="after")
    def a_batch_divides_into_calls_of_equal_shape(self) -> "RolloutConfig":
        if self.samples_per_group % self.slice_size:
            raise ValueError(
                f"samples_per_group = {self.samples_per_group} does not divide into slices of "
                f"samples_per_slice = {self.slice_size}; choose a divisor"
            )
        num_slices = self.groups_per_batch * self.slices_per_group
        if num_slices % self.slices_per_call:
            raise ValueError(
                f"a batch has {num_slices} slices (groups_per_batch x slices per group), which does not divide "
                f"into calls of slices_per_call = {self.slices_per_call}; choose a divisor of {num_slices}"
            )
        return self
