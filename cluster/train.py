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
from cluster.config import ConfigError, RunConfig, load, resolve_paths
from cluster.controller import Controller
from cluster.costs import step_plan
from cluster.curves import curves_png
from cluster.evaluation import Evaluation, evaluate, gather, held_out, load_everywhere
from cluster.evaluation_table import Columns, build_section, read_jsonl, write_jsonl
from cluster.folder import (
    CHECKPOINTS,
    TRAJECTORIES,
    WEIGHTS,
    config_digest,
    metrics_row,
    open_folder,
    write_start,
)
from cluster.iteration import IterationRecord
from cluster.pictures import trajectory_strip, write_evaluation_pictures
from cluster.progress import Progress
from cluster.report import write_report
from cluster.run_folder import (
    CONFIG,
    METRICS,
    SUMMARY,
    append_jsonl,
    evaluation_lines,
    read_metrics,
    trajectory_picture,
    write_json,
)
from learner.checkpoint import latest, prune
from learner.credit.base import ScoredStates
from rollout.prompts import PromptSource
from rollout.trajectory import read_group, read_previews, write_ipc

COUNTS = ("images", "transitions", "network_calls", "reward_calls")
NUM_PICTURES = 24
"""Held-out lines whose images are kept before and after training."""


class Run:
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
        self.prompts = PromptSource(
            self.config.prompts.path, self.config.prompts.shuffle, self.config.run.seed
        )
        settings = self.config.evaluation
        self.lines = held_out(settings.path, settings.num_prompts, settings.seed)
        self.columns = Columns(graded=settings.graded, strict=settings.strict)
        self.progress = Progress(self.config.run.num_iterations)
        self._scored_states: ScoredStates = rule.scored_states

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the run, and say that it goes on."""
        self.progress.phase(name)
        began = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def start(self) -> None:
        """Start the actors, pass the canaries, load the last checkpoint if there is one."""
        with self.phase("startup"):
            self.backend = RayBackend(self.config, self._scored_states, str(self.folder))
            names = [reward.name for reward in self.config.rewards.components]
            for text in gather(self.backend, [self.backend.check_reward(name) for name in names]):
                self.progress.note(text)
            if self.continued:
                self._load_checkpoint()

    def _load_checkpoint(self) -> None:
        found = latest(self.folder / CHECKPOINTS)
        if found is None:
            self.progress.note("no checkpoint yet: starting from the beginning")
            (self.folder / METRICS).unlink(missing_ok=True)
            return
        (state,) = gather(self.backend, [self.backend.load_checkpoint(str(found))])
        if state["config_digest"] != config_digest(self.config):
            raise ConfigError(
                f"{self.folder} holds a run with other settings; compare its {CONFIG} with yours, "
                "or choose another run.dir"
            )
        self.consumed, self.counts = state["consumed"], state["counts"]
        self.seconds, self.elapsed_before_s = state["seconds"], state["elapsed_s"]
        self.evaluation_counts = state["evaluation_counts"]
        self.progress.note(f"continuing after iteration {self.consumed} from {found}")

    def evaluate(self, name: str, kind: str) -> None:
        """Evaluate with the learner's weights of that kind, and keep lines and pictures under `name`."""
        with self.phase(
            f"evaluation_{name}" if name in ("before", "after") else "evaluation_between"
        ):
            (weights,) = gather(self.backend, [self.backend.weights(kind)])
            load_everywhere(self.backend, weights)
            settings = self.config.evaluation
            seen = evaluate(
                self.backend,
                [reward.name for reward in self.config.rewards.components],
                self.lines,
                batch=settings.batch,
                num_steps=settings.num_steps,
                guidance=settings.guidance_scale,
            )
            self._check_columns(seen)
            self._keep(name, seen)

    def _check_columns(self, seen: Evaluation) -> None:
        for key, column in (("graded", self.columns.graded), ("strict", self.columns.strict)):
            if column and column not in seen.records[0]["rewards"]:
                raise ConfigError(
                    f"evaluation.{key} = {column!r} is no column of the rewards; they give "
                    f"{sorted(seen.records[0]['rewards'])}"
                )

    def _keep(self, name: str, seen: Evaluation) -> None:
        write_jsonl(evaluation_lines(self.folder, name), seen.records)
        chosen = np.linspace(
            0, len(self.lines.prompts) - 1, min(NUM_PICTURES, len(self.lines.prompts))
        ).astype(int)
        write_evaluation_pictures(
            self.folder,
            name,
            seen.images[chosen],
            chosen.tolist(),
            [
                f"{r['prompt']} {r['rewards'][self.columns.graded]:.2f}"
                for r in (seen.records[i] for i in chosen)
            ],
        )
        for key, count in seen.counts.items():
            self.evaluation_counts[key] = self.evaluation_counts.get(key, 0) + count

    def train(self) -> None:
        """Run the controller to the last iteration."""
        self.progress.phase("training")
        self.controller = Controller(
            self.config,
            self.plan,
            self.backend,
            self.prompts,
            self._on_iteration,
            self.consumed,
        )
        self.controller.run()

    def _on_iteration(self, record: IterationRecord) -> Any:
        """Write the iteration's row; return the future of a checkpoint when one is due."""
        elapsed = self.elapsed_before_s + time.monotonic() - self.started
        row = metrics_row(
            record, record.iteration - 1 - record.learner_stats.policy_version, elapsed
        )
        append_jsonl(self.folder / METRICS, row)
        self.consumed = record.iteration
        self.seconds["training"] = self.seconds.get("training", 0.0) + record.seconds["total"]
        for name in COUNTS:
            self.counts[name] += row["counts"][name]
        self.progress.iteration(row)
        if self.config.run.record_trajectories:
            path = self.folder / TRAJECTORIES / f"batch_{record.iteration:06d}.arrow"
            path.parent.mkdir(exist_ok=True)
            write_ipc(path, list(record.batches))
        self._evaluate_if_due(record.iteration)
        every = self.config.run.checkpoint_every
        if record.iteration % every and record.iteration != self.config.run.num_iterations:
            return None
        self._keep_strip(record)
        return self._save_checkpoint(elapsed)

    def _evaluate_if_due(self, iteration: int) -> None:
        """Look at the held-out prompts in between; its time is not the next iteration's."""
        every = self.config.evaluation.every
        if every and iteration % every == 0 and iteration < self.config.run.num_iterations:
            self.evaluate(f"iteration_{iteration:06d}", self.config.evaluation.weights)
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

    def _save_checkpoint(self, elapsed: float) -> Any:
        state = {
            "consumed": self.consumed,
            "counts": self.counts,
            "evaluation_counts": self.evaluation_counts,
            "seconds": self.seconds,
            "elapsed_s": elapsed,
            "config_digest": config_digest(self.config),
        }
        folder = self.folder / CHECKPOINTS / f"step_{self.consumed:06d}"
        future = self.backend.save_checkpoint(str(folder), state)
        prune(self.folder / CHECKPOINTS, self.config.run.keep_checkpoints)
        return future

    def finish(self, status: str = "finished") -> dict[str, Any]:
        """Export the trained weights, write summary, curves and report; return the summary."""
        with self.phase("export"):
            kind = self.config.evaluation.weights
            gather(self.backend, [self.backend.export(str(self.folder / WEIGHTS), kind)])
            prune(self.folder / CHECKPOINTS, self.config.run.keep_checkpoints)
        before = read_jsonl(evaluation_lines(self.folder, "before"))
        after = read_jsonl(evaluation_lines(self.folder, "after"))
        summary = {
            "status": status,
            "iterations": self.consumed,
            "weights": self.config.evaluation.weights,
            "evaluation": build_section(before, after, self.columns),
            "counts": self.counts,
            "evaluation_counts": self.evaluation_counts,
            "seconds": {
                **self.seconds,
                "total": self.elapsed_before_s + time.monotonic() - self.started,
            },
            "config_digest": config_digest(self.config),
        }
        write_json(self.folder / SUMMARY, summary)
        curves_png(self.folder)
        write_report(self.folder)
        return summary


def train(config: RunConfig, address: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Train as the config says, or continue what its folder holds; return the folder and the summary."""
    folder, continued = open_folder(config)
    run = Run(config, folder, continued)
    if not continued:
        write_start(folder, run.config)
    with run.progress:
        run.progress.note(f"run folder: {folder}")
        connect(run.config, address)
        run.start()
        if not evaluation_lines(folder, "before").exists():
            run.evaluate("before", "raw")
        run.train()
        run.evaluate("after", config.evaluation.weights)
        return folder, run.finish()


def resume(
    folder: Path, overrides: list[str], address: str | None = None
) -> tuple[Path, dict[str, Any]]:
    """Continue the run in `folder` from its last checkpoint."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run: {CONFIG} is missing")
    config = load(folder / CONFIG, [*overrides, f'run.dir="{folder}"', 'run.resume="auto"'])
    return train(config, address)


__all__ = ["Run", "read_metrics", "resume", "train"]
