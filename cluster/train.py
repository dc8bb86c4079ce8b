"""One run from config to report: start the parts, pass the gates, evaluate, train, evaluate again, export."""

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cluster.actors import RayBackend, connect
from cluster.config import ConfigError, RunConfig, load, resolve_paths, user_mistakes
from cluster.controller import Controller
from cluster.costs import step_plan
from cluster.curves import curves_png
from cluster.evaluation import evaluate, gather, held_out, load_everywhere, picked
from cluster.evaluation_table import Columns, build_section, read_jsonl, write_jsonl
from cluster.iteration import IterationRecord
from cluster.metrics_row import metrics_row
from cluster.open_run import open_folder, write_start
from cluster.pictures import trajectory_strip, write_evaluation_pictures
from cluster.progress import Progress
from cluster.report import write_report
from cluster.run_folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    SUMMARY,
    TRAJECTORIES,
    WEIGHTS,
    append_jsonl,
    evaluation_lines,
    trajectory_picture,
    write_json,
)
from learner.checkpoint import latest, prune
from learner.credit.base import ScoredStates
from rollout.prompts import PromptSource
from rollout.trajectory import read_group, read_previews, write_ipc

COUNTS = ("images", "transitions", "network_calls", "reward_calls")


class TrainingRun:
    """One training run in its folder; `train` drives it."""

    def __init__(self, config: RunConfig, folder: Path, continued: bool):
        self.folder, self.continued = folder, continued
        self.config = resolve_paths(config, folder)
        self.started = time.monotonic()
        self.seconds: dict[str, float] = {}
        self.consumed, self.elapsed_before_s = 0, 0.0
        self.counts = dict.fromkeys(COUNTS, 0)
        self.evaluation_counts: dict[str, int] = {}
        self.plan, rule = step_plan(self.config)
        self._scored_states: ScoredStates = rule.scored_states
        prompts, settings = self.config.prompts, self.config.evaluation
        self.prompts = PromptSource(prompts.path, prompts.shuffle, self.config.run.seed)
        self.lines = held_out(settings.path, settings.num_prompts, settings.seed)
        self.columns = Columns(graded=settings.graded, strict=settings.strict)
        self.progress = Progress(self.config.run.num_iterations)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the run, and say that it goes on."""
        self.progress.phase(name)
        began = time.monotonic()
        yield
        self._add_seconds(name, time.monotonic() - began)

    def _add_seconds(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def elapsed_s(self) -> float:
        """Wall-clock seconds of this run, earlier sittings up to their last checkpoint included."""
        return self.elapsed_before_s + time.monotonic() - self.started

    # start

    def start(self) -> None:
        """Start the actors, pass the canaries, load the last checkpoint if there is one."""
        with self.phase("startup"):
            self.backend = RayBackend(self.config, self._scored_states, str(self.folder))
            checks = [self.backend.check_reward(name) for name in self.config.reward_names]
            for text in gather(self.backend, checks):
                self.progress.note(text)
        if self.continued:
            self._continue()

    def _continue(self) -> None:
        """Load the last checkpoint; without one, forget what was begun."""
        (self.folder / SUMMARY).unlink(missing_ok=True)
        found = latest(self.folder / CHECKPOINTS)
        if found is None:
            self.progress.note("no checkpoint yet: beginning anew")
            (self.folder / METRICS).unlink(missing_ok=True)
            evaluation_lines(self.folder, "before").unlink(missing_ok=True)
            return
        if self.config.run.max_policy_lag:
            raise ConfigError(
                f"run.max_policy_lag = {self.config.run.max_policy_lag}: such a run can't be continued yet, since its "
                "checkpoints hold one policy version; set run.max_policy_lag = 0 and another run.dir"
            )
        (state,) = gather(self.backend, [self.backend.load_checkpoint(str(found))])
        self.consumed, self.counts = state["consumed"], state["counts"]
        self.seconds, self.elapsed_before_s = state["seconds"], state["elapsed_s"]
        self.evaluation_counts = state["evaluation_counts"]
        if self.consumed > self.config.run.num_iterations:
            raise ConfigError(
                f"run.num_iterations = {self.config.run.num_iterations}, but {found} is {self.consumed} iterations "
                "in; set it higher"
            )
        if not evaluation_lines(self.folder, "before").exists():
            raise ConfigError(
                f"{self.folder} has lost its evaluation/before.jsonl, which can't be made again now"
            )
        self.progress.note(f"continuing after iteration {self.consumed} from {found}")

    # evaluate

    def evaluate(self, name: str, kind: str) -> None:
        """Evaluate with the learner's weights of that kind, and keep lines and pictures under `name`."""
        with self.phase(
            f"evaluation_{name}" if name in ("before", "after") else "evaluation_between"
        ):
            (weights,) = gather(self.backend, [self.backend.weights(kind)])
            workers = load_everywhere(self.backend, weights)
            seen = evaluate(self.backend, workers, self.lines, self.config)
            self._check_columns(sorted(seen.records[0]["rewards"]))
            write_jsonl(evaluation_lines(self.folder, name), seen.records)
            chosen, captions = picked(seen, self.columns.graded)
            write_evaluation_pictures(self.folder, name, seen.images[chosen], chosen, captions)
            for key, count in seen.counts.items():
                self.evaluation_counts[key] = self.evaluation_counts.get(key, 0) + count

    def _check_columns(self, known: list[str]) -> None:
        for key, column in self.columns.items():
            if column not in known:
                raise ConfigError(
                    f"evaluation.{key} = {column!r} is no column of the rewards; they give {known}"
                )

    # train

    def train(self) -> None:
        """Run the controller to the last iteration."""
        self.progress.phase("training")
        self.controller = Controller(
            self.config, self.plan, self.backend, self.prompts, self._on_iteration, self.consumed
        )
        self.controller.run()

    def _on_iteration(self, record: IterationRecord) -> Any:
        """Write the iteration's row; return the future of a checkpoint when one is due."""
        lag = record.iteration - 1 - record.learner_stats.policy_version
        row = metrics_row(record, lag, self.elapsed_s)
        append_jsonl(self.folder / METRICS, row)
        self.consumed = record.iteration
        self._add_seconds("training", record.seconds["total"])
        for name in COUNTS:
            self.counts[name] += row["counts"][name]
        self.progress.iteration(row)
        if self.config.run.record_trajectories:
            path = self.folder / TRAJECTORIES / f"batch_{record.iteration:06d}.arrow"
            path.parent.mkdir(exist_ok=True)
            write_ipc(path, list(record.batches))
        self._evaluate_if_due()
        last = record.iteration == self.config.run.num_iterations
        if record.iteration % self.config.run.checkpoint_every and not last:
            return None
        self._keep_strip(record)
        return self._save_checkpoint()

    def _evaluate_if_due(self) -> None:
        """Look at the held-out prompts in between; its time is not the next iteration's."""
        every = self.config.evaluation.every
        if every and self.consumed % every == 0 and self.consumed < self.config.run.num_iterations:
            self.evaluate(f"iteration_{self.consumed:06d}", self.config.evaluation.weights)
            self.controller.clock.start()

    def _keep_strip(self, record: IterationRecord) -> None:
        """Keep a picture of one trajectory: its previews step by step, each with its reward."""
        pngs = read_previews(record.batches[0])[0]
        if pngs is None:
            return
        group = read_group(record.batches[0])
        states = [state for state, png in enumerate(pngs) if png is not None]
        previews = [np.asarray(Image.open(io.BytesIO(pngs[state] or b""))) for state in states]
        path = trajectory_picture(self.folder, record.iteration)
        path.parent.mkdir(parents=True, exist_ok=True)
        values = [float(group.rewards[0][state]) for state in states]
        trajectory_strip(previews, values, states=states, prompt=group.prompt).save(path)

    def _save_checkpoint(self) -> Any:
        state = {
            "consumed": self.consumed,
            "counts": self.counts,
            "evaluation_counts": self.evaluation_counts,
            "seconds": self.seconds,
            "elapsed_s": self.elapsed_s,
        }
        folder = self.folder / CHECKPOINTS / f"step_{self.consumed:06d}"
        future = self.backend.save_checkpoint(str(folder), state)
        prune(self.folder / CHECKPOINTS, self.config.run.keep_checkpoints)
        return future

    # finish

    def finish(self) -> dict[str, Any]:
        """Export the trained weights, write summary, curves and report; return the summary."""
        kind = self.config.evaluation.weights
        with self.phase("export"):
            gather(self.backend, [self.backend.export(str(self.folder / WEIGHTS), kind)])
            prune(self.folder / CHECKPOINTS, self.config.run.keep_checkpoints)
        before = read_jsonl(evaluation_lines(self.folder, "before"))
        after = read_jsonl(evaluation_lines(self.folder, "after"))
        summary = {
            "status": "finished",
            "iterations": self.consumed,
            "weights": kind,
            "evaluation": build_section(before, after, self.columns),
            "counts": self.counts,
            "evaluation_counts": self.evaluation_counts,
            "seconds": {**self.seconds, "total": self.elapsed_s},
        }
        write_json(self.folder / SUMMARY, summary)
        curves_png(self.folder)
        write_report(self.folder)
        return summary


def train(config: RunConfig, address: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Train as the config says, or continue what its folder holds; return the folder and the summary.

    Raises ConfigError for what the user can mend; anything else is a failure of the run.
    """
    with user_mistakes():
        folder, continued = open_folder(config)
        run = TrainingRun(config, folder, continued)
        connect(run.config, address)
    write_start(folder, run.config)
    with run.progress:
        run.progress.note(f"run folder: {folder}")
        try:
            with user_mistakes():
                run.start()
            if run.consumed == 0:
                run.evaluate("before", "raw")
            run.train()
            run.evaluate("after", config.evaluation.weights)
            return folder, run.finish()
        finally:
            if hasattr(run, "backend"):
                run.backend.close()


def resume(
    folder: Path, overrides: list[str], address: str | None = None
) -> tuple[Path, dict[str, Any]]:
    """Continue the run in `folder` from its last checkpoint."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run: {CONFIG} is missing")
    again = [f'run.dir="{folder}"', 'run.resume="auto"']
    return train(load(folder / CONFIG, [*overrides, *again]), address)
