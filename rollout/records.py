"""What travels between the controller and the rollout workers: requests and answers. Imports no
torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollout.stats import RolloutStats

if TYPE_CHECKING:
    from rollout.trajectory import RecordBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Ask for the N trajectories of one prompt.

    Example: GroupRequest(group_id=7, prompt="a red circle", metadata={"tag": "colors"},
    num_samples=16, run_seed=0, policy_version=3, incarnation=0)
    """

    group_id: int
    """Counts admitted groups over the whole run; batch b holds groups bB .. bB + B - 1."""
    prompt: str
    metadata: dict[str, Any]
    """The prompt line's other fields, as the rewards read them."""
    num_samples: int
    """N, the trajectories of the whole group."""
    run_seed: int
    """With group_id, sample and step it determines every noise (rollout.flow.noise)."""
    policy_version: int
    """Weights that must be loaded when this group is sampled."""
    incarnation: int = 0
    """Counts roll-backs of the run; answers of an older one are fenced off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRequest:
    """The unit of work: samples first .. first + count - 1 of a group."""

    group: GroupRequest
    first: int
    count: int
    score_initial: bool
    """Whether this slice makes the preview of x_T; only a group's first slice does when x_T is
    shared."""
    keep_previews: int = 0
    """How many of its first trajectories keep PNG previews."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Which tensors of the network are trained: LearnerConfig's adapter settings, as the worker
    needs them."""

    adapter: Literal["lora", "full", "none"] = "lora"
    """none: a frozen network, for evaluating a model as it is."""
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] | None = None
    """Module name endings; none takes the family's published list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Previews:
    """Decoded clean estimates, exactly what a reward server needs to score them; P entries each."""

    images: np.ndarray
    """uint8 [P, H, W, 3]."""
    prompts: list[str]
    metadata: list[dict[str, Any]]
    group_ids: np.ndarray
    """int64 [P]."""
    samples: np.ndarray
    """int64 [P]; a shared x_T is scored under its group's sample 0 and stands for all samples."""
    states: np.ndarray
    """int64 [P], 0 = pure noise, T = the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What one call of a rollout worker returns: facts, pictures to score, and counts."""

    slices: list["RecordBatch"]
    """One Arrow record batch a request, in the order of the requests, without rewards
    (rollout.trajectory)."""
    previews: Previews
    stats: RolloutStats


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReport:
    """A worker's answer to a published version."""

    version: int
    num_tensors: int
    checksum: str
    """rollout.families.trainable.checksum of the module's live tensors, read back after loading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationImages:
    """Images made without noise between the steps, and the latents they started from; M entries
    each."""

    images: np.ndarray
    """uint8 [M, H, W, 3]."""
    initial_latents: np.ndarray
    """float32 [M, *latent_shape]: the same model makes the same images from them in plain
    diffusers."""
    stats: RolloutStats
