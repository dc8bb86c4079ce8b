"""Which checkpoints a run has, which one it goes on from, which ones it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.backend import Backend, WeightsAnswer
from cluster.config import RunConfig
from cluster.remote_folder import fetched
from cluster.remote_path import Place
from cluster.run_folder import BEST, CHECKPOINTS, read_optional
from cluster.tensor_arrays import as_arrays
from cluster.weights import EVALUATION_VERSION
from learner.checkpoint import CheckpointError, latest, load, names, prune
from rollout.families.trainable import checksum, num_bytes


@dataclass(slots=True)
class RunCheckpoints:
    """The checkpoints below a run folder, wherever that is kept."""

    where: Place
    """The run folder."""
    folder: Path
    """Where the driver has the run's small files."""
    keep: int
    saved_at: int = 0
    """Iterations behind the checkpoint that was saved or loaded last; 0 when there is none."""

    def path(self, iteration: int) -> Place:
        """Where the checkpoint after so many iterations belongs."""
        return self.where / CHECKPOINTS / _name(iteration)

    def newest(self) -> Place | None:
        """Return the newest whole one, None when the run has written none yet.

        Raises CheckpointError when there are some and all are damaged: to begin anew would delete what the run has
        measured, which is not ours to decide.
        """
        directory = self.where / CHECKPOINTS
        found = latest(directory)
        if found is None and (damaged := names(directory)):
            raise CheckpointError(
                f"{directory} holds {', '.join(damaged)}, but none of them is whole (the warnings say what is wrong "
                "with each), so the run can't go on; put a whole one there from a copy, or remove them to begin the "
                "run anew, or choose another run.dir"
            )
        return found

    def prune(self, needed: Sequence[int] = ()) -> None:
        """Remove old ones; never the best look's, nor the one that the run would go back to now, nor `needed`."""
        best = read_optional(self.folder, BEST)
        spare = [self.saved_at, best.get("iteration"), *needed]
        prune(self.where / CHECKPOINTS, self.keep, [_name(one) for one in spare if one])


def weights_in(checkpoint: Place, kind: str, config: RunConfig, backend: Backend) -> WeightsAnswer:
    """Return the weights that a checkpoint holds, for an evaluation; raw ones where no averaged ones are kept.

    Raises CheckpointError when it is damaged or gone.
    """
    with fetched(checkpoint) as folder:
        found = load(folder)
    live = torch.float32 if config.learner.adapter == "lora" else getattr(torch, config.model.dtype)
    kept = (found.ema if kind == "ema" else None) or found.weights
    tensors = {name: tensor.to(live) for name, tensor in kept.items()}
    return WeightsAnswer(
        tensors=backend.store(as_arrays(tensors)),
        version=EVALUATION_VERSION,
        checksum=checksum(tensors),
        num_bytes=num_bytes(tensors),
    )


def _name(iteration: int) -> str:
    return f"step_{iteration:06d}"
