"""What the controller may ask of the machines, whoever answers: Ray actors, or fakes in this process.

A `Future` is an opaque, hashable handle of an answer that is still being made; `Handle` is an opaque name of data
that lives elsewhere (the object store). The controller moves handles, and looks at data only to seal a group.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rewards.base import RewardFailure, RewardValues
from rollout.records import SliceRequest
from rollout.stats import RolloutStats

Future = Hashable
Handle = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAnswer:
    """What a rollout worker made of one call; the data stays where it is."""

    slices: Handle
    """list[pa.RecordBatch], one a slice, in the order of the requests."""
    previews: Handle
    """Previews of all the slices, for the reward servers."""
    stats: RolloutStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAnswer:
    """One reward's answer for one slice."""

    samples: np.ndarray
    """int32 [B]: which trajectory each scored preview belongs to."""
    states: np.ndarray
    """int32 [B]: which of its states."""
    outcome: RewardValues | RewardFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAnswer:
    """One version of the trainable weights, as the learner gives it out."""

    tensors: Handle
    """dict[str, Tensor] on the CPU."""
    version: int
    checksum: str
    num_bytes: int


class Backend(Protocol):
    """The machines of a run. Every method but `wait`, `result`, `fetch` and `store` returns at once."""

    def worker_ids(self) -> list[int]:
        """Return the rollout workers that take calls."""
        ...

    def reward_columns(self) -> dict[str, str]:
        """Return the column that each reward trains on, by its name in the config (a plug-in names its own)."""
        ...

    def sample(self, worker: int, requests: Sequence[SliceRequest]) -> Future:
        """Sample the slices of one call: SampleAnswer."""
        ...

    def load_weights(self, worker: int, version: int, tensors: Handle) -> Future:
        """Load a version and read it back from the live module: WeightReport."""
        ...

    def sample_images(
        self,
        worker: int,
        prompts: Sequence[str],
        noise_ids: Sequence[int],
        num_steps: int,
        guidance_scale: float,
        noise_seed: int,
    ) -> Future:
        """Sample images without noise in between: EvaluationImages."""
        ...

    def score(self, reward: str, previews: Handle, request: SliceRequest | None) -> Future:
        """Score the previews that belong to one slice of a call, or all of them: ScoreAnswer."""
        ...

    def check_reward(self, reward: str) -> Future:
        """Score the reward's canaries: what was checked, as text; the call fails if they are out of order."""
        ...

    def learn(self, groups: Sequence[Handle]) -> Future:
        """Train on one batch of sealed groups: LearnerStats."""
        ...

    def weights(self, kind: str) -> Future:
        """Gather the learner's weights, kind "raw" or "ema": WeightsAnswer."""
        ...

    def save_checkpoint(self, folder: str, state: dict[str, Any]) -> Future:
        """Write a checkpoint with the caller's state in its manifest."""
        ...

    def load_checkpoint(self, folder: str) -> Future:
        """Load a checkpoint into the learner: the caller's state."""
        ...

    def export(self, folder: str, kind: str) -> Future:
        """Write the trained weights in diffusers' format."""
        ...

    def wait(self, futures: Sequence[Future]) -> list[Future]:
        """Block until at least one of them is done, and return the done ones."""
        ...

    def result(self, future: Future) -> Any:
        """Return a done future's answer, or raise what went wrong."""
        ...

    def fetch(self, handle: Handle) -> Any:
        """Return the data behind a handle."""
        ...

    def store(self, data: Any) -> Handle:
        """Put data, owned by the controller, where every actor can read it."""
        ...
