"""Held-out prompts, sampled without noise in between and scored: the same latents before and after training."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cluster.backend import Backend, Future, Handle, WeightsAnswer
from cluster.config import EvaluationConfig, RunConfig
from cluster.weights import EVALUATION_VERSION, WeightsNeverArrived
from rewards.base import RewardValues
from rollout.prompts import PromptSource
from rollout.records import EvaluationImages, Previews

log = logging.getLogger(__name__)

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


def load_everywhere(backend: Backend, weights: WeightsAnswer) -> list[int]:
    """Give all workers the weights to draw with; return those that prove to hold them, after one more try.

    Raises WeightsNeverArrived when none does.
    """
    proved: list[int] = []
    for _ in range(2):
        left = [worker for worker in backend.worker_ids() if worker not in proved]
        futures = [backend.load_weights(w, EVALUATION_VERSION, weights.tensors) for w in left]
        for worker, report in zip(left, gather(backend, futures), strict=True):
            if (report.version, report.checksum) == (EVALUATION_VERSION, weights.checksum):
                proved.append(worker)
            else:
                log.warning(
                    "rollout worker %d answered %s, not checksum %s",
                    worker,
                    report,
                    weights.checksum,
                )
    if not proved:
        raise WeightsNeverArrived(
            "no rollout worker took up the weights for an evaluation; see the warnings above"
        )
    return proved


def draw(
    backend: Backend, workers: Sequence[int], lines: HeldOut, settings: EvaluationConfig
) -> list[EvaluationImages]:
    """Draw all lines, settings.batch images a call, dealt out to the workers in turn."""
    return gather(
        backend,
        [
            backend.sample_images(
                workers[i % len(workers)],
                chunk.prompts,
                chunk.noise_ids,
                settings.num_steps,
                settings.guidance_scale,
                chunk.noise_seed,
            )
            for i, chunk in enumerate(lines.chunks(settings.batch))
        ],
    )


def evaluate(
    backend: Backend, workers: Sequence[int], lines: HeldOut, config: RunConfig
) -> Evaluation:
    """Draw and score all lines with the weights that the workers hold. RuntimeError when a scoring keeps failing."""
    settings, names = config.evaluation, config.reward_names
    pictures = draw(backend, workers, lines, settings)
    handles = [
        backend.store(_previews(chunk, drawn.images, settings.num_steps))
        for chunk, drawn in zip(lines.chunks(settings.batch), pictures, strict=True)
    ]
    columns: dict[str, list[float]] = {}
    for name in names:
        for values in _score(backend, name, handles, config.rewards.max_rescores):
            for column, numbers in values.columns.items():
                columns.setdefault(column, []).extend(numbers.tolist())
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
            "reward_calls": len(lines.prompts) * len(names),
        },
    )


def _score(
    backend: Backend, name: str, handles: Sequence[Handle], max_rescores: int
) -> list[RewardValues]:
    """Score all previews, and again those that failed, at most max_rescores times."""
    found: dict[int, RewardValues] = {}
    for attempt in range(max_rescores + 1):
        left = [index for index in range(len(handles)) if index not in found]
        answers = gather(backend, [backend.score(name, handles[index], None) for index in left])
        for index, answer in zip(left, answers, strict=True):
            if isinstance(answer.outcome, RewardValues):
                found[index] = answer.outcome
            elif attempt == max_rescores:
                raise RuntimeError(f"evaluation: reward {name!r} failed: {answer.outcome.message}")
    return [found[index] for index in range(len(handles))]


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


def gather(backend: Backend, futures: Sequence[Future]) -> list[Any]:
    """Wait for all futures and return their answers in order; the first error to appear is raised."""
    answers: dict[Future, Any] = {}
    waiting = list(futures)
    while waiting:
        for future in backend.wait(waiting):
            answers[future] = backend.result(future)
            waiting.remove(future)
    return [answers[future] for future in futures]
