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


class PartLost(RuntimeError):
    """Who was to answer is gone (killed, out of memory, its node lost), or what the call was to read is.

    Where nobody else can answer, as for the learner, the run goes back to its last checkpoint.
    """

    def __init__(self, reason: str, *, is_data: bool = False):
        super().__init__(reason)
        self.reason = reason
        self.is_data = is_data
        """The part lives; an object that it needed went away with the node that had it."""


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

    @staticmethod
    def failed(failure: RewardFailure) -> "ScoreAnswer":
        """Return an answer without values."""
        nothing = np.zeros(0, np.int32)
        return ScoreAnswer(samples=nothing, states=nothing, outcome=failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAnswer:
    """One version of the trainable weights, as the learner gives it out."""

    tensors: Handle
    """dict[str, cluster.tensor_arrays.TensorBytes]."""
    version: int
    checksum: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCommand:
    """What `flowcredit scale` asks of a run; None leaves a number as it is."""

    rollout_workers: int | None = None
    replicas: dict[str, int] | None = None
    """By reward."""


class Backend(Protocol):
    """The machines of a run.

    Methods that give a future return at once; the future ends as an answer, as PartLost, or as the error that the
    call raised. Ids of workers and replicas are the caller's choice and used once.
    """

    def now(self) -> float:
        """Return seconds on a monotonic clock."""
        ...

    def busy_clock(self) -> float:
        """Return seconds on the clock that the controller's own work is measured with."""
        ...

    def add_worker(self, worker: int) -> Future:
        """Start a rollout worker: a dict of facts about it (node, pid, ...), once it has loaded its model."""
        ...

    def remove_worker(self, worker: int) -> None:
        """End a rollout worker, whatever it is doing; also one that is gone."""
        ...

    def add_replica(self, reward: str, replica: int) -> Future:
        """Start a server of a reward, canaries checked: facts, with the `column` that it trains on and `canaries`."""
        ...

    def remove_replica(self, reward: str, replica: int) -> None:
        """End a server; also one that is gone."""
        ...

    def start_learner(self) -> Future:
        """End what is left of the learner's ranks and start them all anew."""
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

    def score(
        self, reward: str, replica: int, previews: Handle, request: SliceRequest | None
    ) -> Future:
        """Score the previews that belong to one slice of a call, or all of them: ScoreAnswer."""
        ...

    def learn(self, groups: Sequence[Handle]) -> Future:
        """Train on one batch of sealed groups: LearnerStats."""
        ...

    def weights(self, kind: str) -> Future:
        """Gather the learner's weights, kind "raw" or "ema": WeightsAnswer."""
        ...

    def save_checkpoint(
        self, folder: str, state: dict[str, Any], older: Sequence[WeightsAnswer]
    ) -> Future:
        """Write a checkpoint with the caller's state in its manifest, and older versions beside the present one."""
        ...

    def load_checkpoint(self, folder: str) -> Future:
        """Load a checkpoint into the learner: the caller's state, and the older versions as list[WeightsAnswer]."""
        ...

    def export(self, folder: str, kind: str) -> Future:
        """Write the trained weights in diffusers' format."""
        ...

    def next_command(self) -> Future:
        """The next ScaleCommand from outside."""
        ...

    def report(self, status: dict[str, Any]) -> None:
        """Say where others can ask for it how the run stands."""
        ...

    def wait(self, futures: Sequence[Future], timeout_s: float) -> list[Future]:
        """Block until at least one of them is done, or for so long, and return the done ones."""
        ...

    def result(self, future: Future) -> Any:
        """Return a done future's answer, or raise what went wrong."""
        ...

    def forget(self, future: Future) -> None:
        """Keep nothing for a future that nobody waits for any more."""
        ...

    def fetch(self, handle: Handle) -> Any:
        """Return the data behind a handle; PartLost(is_data) when its node is gone."""
        ...

    def store(self, data: Any) -> Handle:
        """Put data, owned by the controller, where every actor can read it."""
        ...

    def close(self) -> None:
        """End all parts."""
        ...
