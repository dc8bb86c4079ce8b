"""A run's looks at its held-out prompts, before, in between and after: what each leaves behind, which was best.

`evaluation/looks.json` knows which looks have begun, and what each one cost that has ended, whatever becomes of the
process. A look that the process did not outlive is taken again, with the weights of its iteration's checkpoint. One in
between whose scoring fails for good is noted as failed, and the run goes on: it is an observation, not a part of it.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.backend import WeightsAnswer
from cluster.config import ConfigError, RunConfig
from cluster.evaluation import EvaluationRun, HeldOut, picked
from cluster.evaluation_table import Columns, write_jsonl
from cluster.fleet import Fleet
from cluster.pictures import write_evaluation_pictures
from cluster.run_folder import BEST, LOOKS, evaluation_lines, read_optional, write_json

log = logging.getLogger(__name__)


def _nothing() -> None:
    """Where nobody waits."""


@dataclass
class Looks:
    """Evaluates and writes."""

    config: RunConfig
    folder: Path
    lines: HeldOut
    fleet: Fleet
    on_end: Callable[[], None] = _nothing
    """Told whenever one has ended."""

    def __post_init__(self) -> None:
        settings = self.config.evaluation
        self.columns = Columns(graded=settings.graded, strict=settings.strict)
        self._open: dict[str, EvaluationRun] = {}
        self._book: dict[str, dict[str, Any]] = {}
        """Name -> its kind of weights; and its counts, or why it failed, once it has ended."""

    @property
    def done(self) -> bool:
        """Whether none is under way."""
        return not self._open

    def counts(self) -> dict[str, int]:
        """Return what all that have ended have cost together."""
        total: Counter[str] = Counter()
        for entry in self._book.values():
            total.update(entry.get("counts", {}))
        return dict(total)

    def due(self, iteration: int) -> dict[str, str]:
        """Return name -> kind of weights of what shall be looked at after an iteration; the last one has "after"."""
        settings = self.config.evaluation
        last = self.config.run.num_iterations
        if not settings.every or iteration % settings.every or iteration == last:
            return {}
        kinds = {between(iteration): settings.weights}
        if settings.both_kinds:
            other = "raw" if settings.weights == "ema" else "ema"
            kinds[f"{other}_{between(iteration)}"] = other
        return kinds

    def abandon(self) -> None:
        """Forget what is under way, and who waits for its end: the run goes back to a checkpoint."""
        self._open.clear()
        self.on_end = _nothing

    def restart(self, consumed: int) -> None:
        """Remember what belongs to the run's history up to `consumed`, after which it goes on."""
        book = read_optional(self.folder, LOOKS).get("looks", {})
        self._book = {name: entry for name, entry in book.items() if _belongs(name, consumed)}
        self._write_book()

    def unfinished(self) -> list[tuple[int, str, str]]:
        """Return (iteration, name, kind of weights) of looks in between that began and have not ended in any way."""
        return [
            (_iteration(name), name, entry["kind"])
            for name, entry in self._book.items()
            if BETWEEN in name and not entry.keys() & {"counts", "failed"}
        ]

    def begin(self, name: str, kind: str) -> None:
        """Note, before the iteration's checkpoint is written, that there will be such a look."""
        self._book[name] = {"kind": kind}
        self._write_book()

    def forget(self, name: str) -> None:
        """There won't be such a look."""
        del self._book[name]
        self._write_book()

    def start(self, name: str, weights: WeightsAnswer) -> None:
        """Take a look that has begun; its lines and pictures are kept under `name`.

        One before or after whose scoring keeps failing ends the loop with RuntimeError.
        """
        assert name in self._book
        look = EvaluationRun(
            self.fleet,
            weights,
            self.lines,
            self.config,
            partial(self._on_done, name),
            partial(self._on_failed, name) if BETWEEN in name else None,
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
        if name.startswith(BETWEEN):
            values = [record["rewards"][self.columns.graded] for record in seen.records]
            self._note_best(_iteration(name), sum(values) / len(values))
        self._book[name]["counts"] = seen.counts
        self._write_book()
        del self._open[name]
        self.on_end()

    def _on_failed(self, name: str, reason: str) -> None:
        log.warning("evaluation %s failed, the run goes on without it: %s", name, reason)
        self._book[name]["failed"] = reason
        self._write_book()
        del self._open[name]
        self.on_end()

    def _write_book(self) -> None:
        write_json(self.folder / LOOKS, {"looks": self._book})

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


BEFORE, AFTER = "before", "after"
BETWEEN = "iteration_"
"""Names of looks in between begin so, and go on with the iteration's number."""


def between(iteration: int) -> str:
    """Return the name of the look after `iteration`."""
    return f"{BETWEEN}{iteration:06d}"


def _iteration(name: str) -> int:
    return int(name.partition(BETWEEN)[2])


def _belongs(name: str, consumed: int) -> bool:
    """Whether a look is part of the history up to `consumed`."""
    return _iteration(name) <= consumed if BETWEEN in name else name == BEFORE
