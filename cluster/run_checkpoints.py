"""Which checkpoints a run has, which one it goes on from, which ones it keeps."""

from dataclasses import dataclass
from pathlib import Path

from cluster.remote_path import Place
from cluster.run_folder import BEST, CHECKPOINTS, read_optional
from learner.checkpoint import CheckpointError, latest, names, prune


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

    def prune(self) -> None:
        """Remove old ones; never the best look's, nor the one that the run would go back to now."""
        best = read_optional(self.folder, BEST)
        spare = [
            _name(iteration) for iteration in (self.saved_at, best.get("iteration")) if iteration
        ]
        prune(self.where / CHECKPOINTS, self.keep, spare)


def _name(iteration: int) -> str:
    return f"step_{iteration:06d}"
