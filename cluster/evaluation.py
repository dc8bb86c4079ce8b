"""Held-out prompts, sampled without noise in between and scored: the same latents before and after training."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cluster.backend import Future, ScoreAnswer, WeightsAnswer
from cluster.config import RunConfig
from cluster.fleet import Fleet
from cluster.pool import Call
from cluster.scoring import ScoreJob
from cluster.weights import EVALUATION_VERSION
from rewards.base import RewardFailure, RewardValues
from rollout.prompts import PromptSource
from rollout.records import EvaluationImages, Previews

NUM_PICTURES = 24
"""Held-out lines whose images are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What to draw: prompts, and which noise each begins from."""

    prompts: list[str]
    metadata: list[dict[str, Any]]
    noise_ids: list[int]
    noise_seed: int

    def chunks(self, size: int) -> list["HeldOut"]:
        """Cut into pieces of at most `size`."""
        return [
            replace(
                self,
                prompts=self.prompts[i:j],
                metadata=self.metadata[i:j],
                noise_ids=self.noise_ids[i:j],
            )
            for i, j in ((i, i + size) for i in range(0, len(self.prompts), size))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One look at the held-out prompts."""

    records: list[dict[str, Any]]
    """One a line: index, prompt, tag, rewards (column -> value)."""
    images: np.ndarray
    """uint8 [M, H, W, 3], in the order of the lines."""
    counts: dict[str, int]
    """images, network_calls, reward_calls."""


def held_out(path: str, num_prompts: int | None, seed: int) -> HeldOut:
    """Read the held-out lines; line i's noise follows from (seed, i). ValueError on a bad file."""
    source = PromptSource(path, shuffle=False)
    lines = [source.at(index) for index in range(len(source))][:num_prompts]
    return HeldOut(
        prompts=[prompt for prompt, _ in lines],
        metadata=[metadata for _, metadata in lines],
        noise_ids=list(range(len(lines))),
        noise_seed=seed,
    )


class EvaluationRun:
    """Draws held-out lines on the rollout pool and scores them; training may go on beside it."""

    def __init__(
        self,
        fleet: Fleet,
        weights: WeightsAnswer | None,
        lines: HeldOut,
        config: RunConfig,
        on_done: Callable[["EvaluationRun"], None] = lambda run: None,
        on_failed: Callable[[str], None] | None = None,
        *,
        scored: bool = True,
    ):
        """weights: what to draw with; None for workers without an adapter. scored: False only draws.

        `on_failed` is told, once, why a scoring has failed for good; None ends the loop with RuntimeError instead.
        """
        self.fleet, self.lines, self.settings = fleet, lines, config.evaluation
        self.on_done, self.on_failed = on_done, on_failed
        self.failed = False
        self.names = config.reward_names if scored else []
        self.chunks = lines.chunks(self.settings.batch)
        self.drawn: dict[int, EvaluationImages] = {}
        self._weights = weights and replace(weights, version=EVALUATION_VERSION)
        self._values: dict[tuple[str, int], RewardValues] = {}

    def start(self) -> None:
        """Queue all drawing, before anything that the pool has to do."""
        calls = [
            Call(
                name=f"evaluation, part {index}",
                weights=self._weights,
                start=partial(self._start, chunk),
                on_answer=partial(self._on_drawn, index),
                kind="evaluate",
            )
            for index, chunk in enumerate(self.chunks)
        ]
        self.fleet.pool.submit(calls, first=True)

    def run(self) -> "EvaluationRun":
        """Start, and return when all is done. RuntimeError when a scoring keeps failing."""
        self.start()
        self.fleet.events.until(lambda: self.done)
        return self

    @property
    def done(self) -> bool:
        """Whether every line is drawn and scored."""
        num_chunks = len(self.chunks)
        return len(self.drawn) == num_chunks and len(self._values) == num_chunks * len(self.names)

    def _start(self, chunk: HeldOut, worker: int) -> Future:
        return self.fleet.backend.sample_images(
            worker,
            chunk.prompts,
            chunk.noise_ids,
            self.settings.num_steps,
            self.settings.guidance_scale,
            chunk.noise_seed,
        )

    def _on_drawn(self, index: int, call: Call, drawn: EvaluationImages) -> None:
        if self.failed:
            return
        self.drawn[index] = drawn
        previews = _previews(self.chunks[index], drawn.images, self.settings.num_steps)
        handle = self.fleet.backend.store(previews) if self.names else None
        for name in self.names:
            job = ScoreJob(
                reward=name,
                previews=handle,
                request=None,
                on_answer=partial(self._on_scored, name, index),
            )
            self.fleet.scorer.score(job)
        if self.done:
            self.on_done(self)

    def _on_scored(self, name: str, index: int, answer: ScoreAnswer) -> None:
        if self.failed:
            return
        if isinstance(answer.outcome, RewardFailure):
            self._fail(f"evaluation: reward {name!r} failed: {answer.outcome.message}")
            return
        self._values[name, index] = answer.outcome
        if self.done:
            self.on_done(self)

    def _fail(self, reason: str) -> None:
        if self.on_failed is None:
            raise RuntimeError(reason)
        self.failed = True
        self.drawn.clear()
        self.on_failed(reason)

    def images(self) -> list[EvaluationImages]:
        """Return what was drawn, chunk by chunk in the order of the lines."""
        return [self.drawn[index] for index in range(len(self.chunks))]

    def result(self) -> Evaluation:
        """Return the scored lines."""
        columns: dict[str, list[float]] = {}
        for name in self.names:
            for index in range(len(self.chunks)):
                for column, numbers in self._values[name, index].columns.items():
                    columns.setdefault(column, []).extend(numbers.tolist())
        lines, pictures = self.lines, self.images()
        return Evaluation(
            records=[
                {
                    "index": index,
                    "prompt": prompt,
                    "tag": str(metadata.get("tag", "")),
                    "rewards": {name: values[index] for name, values in columns.items()},
                }
                for index, (prompt, metadata) in enumerate(
                    zip(lines.prompts, lines.metadata, strict=True)
                )
            ],
            images=np.concatenate([drawn.images for drawn in pictures]),
            counts={
                "images": len(lines.prompts),
                "network_calls": sum(drawn.stats.num_network_calls for drawn in pictures),
                "reward_calls": len(lines.prompts) * len(self.names),
            },
        )


def picked(seen: Evaluation, graded: str) -> tuple[list[int], list[str]]:
    """Return a few lines, spread evenly over the file, whose images are worth keeping, and their captions."""
    count = len(seen.records)
    chosen = np.linspace(0, count - 1, min(NUM_PICTURES, count)).astype(int).tolist()
    captions = [
        f"{seen.records[i]['prompt']} {seen.records[i]['rewards'][graded]:.2f}" for i in chosen
    ]
    return chosen, captions


def _previews(chunk: HeldOut, images: np.ndarray, num_steps: int) -> Previews:
    count = len(images)
    return Previews(
        images=images,
        prompts=chunk.prompts,
        metadata=chunk.metadata,
        group_ids=np.full(count, -1, np.int64),
        samples=np.arange(count),
        states=np.full(count, num_steps),
    )
