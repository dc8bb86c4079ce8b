"""A run's looks at its held-out prompts, before, in between and after: what each leaves behind, which was best."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cluster.backend import WeightsAnswer
from cluster.config import ConfigError, RunConfig
from cluster.evaluation import EvaluationRun, HeldOut, picked
from cluster.evaluation_table import Columns, write_jsonl
from cluster.fleet import Fleet
from cluster.pictures import write_evaluation_pictures
from cluster.run_folder import BEST, evaluation_lines, read_optional, write_json


@dataclass
class Looks:
    """Evaluates and writes; `counts` adds up what it cost."""

    config: RunConfig
    folder: Path
    lines: HeldOut
    fleet: Fleet
    counts: dict[str, int] = field(default_factory=dict)
    on_end: Callable[[], None] = lambda: None
    """Told whenever one has ended."""

    def __post_init__(self) -> None:
        settings = self.config.evaluation
        self.columns = Columns(graded=settings.graded, strict=settings.strict)
        self._open: dict[str, EvaluationRun] = {}

    @property
    def done(self) -> bool:
        """Whether none is under way."""
        return not self._open

    def abandon(self) -> None:
        """Forget what is under way: the run goes back to a checkpoint."""
        self._open.clear()

    def start(self, name: str, weights: WeightsAnswer) -> None:
        """Begin an evaluation whose lines and pictures are kept under `name`."""
        look = EvaluationRun(
            self.fleet, weights, self.lines, self.config, partial(self._on_done, name)
        )
        self._open[name] = look
        look.start()

    def wait(self) -> None:
        """Return when none is under way."""
        self.fleet.events.until(lambda: self.done)

    def _on_done(self, name: str, look: EvaluationRun) -> None:
        seen = look.result()
        self._check_columns(sorted(seen.records[0]["rewards"]))
        write_jsonl(evaluation_lines(self.folder, name), seen.records)
        chosen, captions = picked(seen, self.columns.graded)
        write_evaluation_pictures(self.folder, name, seen.images[chosen], chosen, captions)
        for key, count in seen.counts.items():
            self.counts[key] = self.counts.get(key, 0) + count
        if name.startswith(BETWEEN):
            values = [record["rewards"][self.columns.graded] for record in seen.records]
            self._note_best(int(name.removeprefix(BETWEEN)), sum(values) / len(values))
        del self._open[name]
        self.on_end()

    def _note_best(self, iteration: int, graded: float) -> None:
        """Remember the best look in between; its checkpoint is spared from pruning."""
        best = read_optional(self.folder, BEST)
        if not best or graded > best["graded"]:
            write_json(self.folder / BEST, {"iteration": iteration, "graded": graded})

    def _check_columns(self, known: list[str]) -> None:
        for key, column in self.columns.items():
            if column not in known:
                raise ConfigError(
                    f"evaluation.{key} = {column!r} is no column of the rewards; they give {known}"
                )


BETWEEN = "iteration_"
"""Names of looks in between begin so, and go on with the iteration's number."""


def between(iteration: int) -> str:
    """Return the name of the look after `iteration`."""
    return f"{BETWEEN}{iteration:06d}"
