"""Held-out prompts, sampled without noise in between and scored: the same latents before and after training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cluster.backend import Backend, Future, WeightsAnswer
from cluster.weights import EVALUATION_VERSION, WeightsNeverArrived
from rewards.base import RewardFailure
from rollout.prompts import PromptSource
from rollout.records import EvaluationImages, Previews


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


def load_everywhere(backend: Backend, weights: WeightsAnswer) -> None:
    """Give all workers the weights to draw with, and check what they hold. Raises WeightsNeverArrived."""
    futures = [
        backend.load_weights(w, EVALUATION_VERSION, weights.tensors) for w in backend.worker_ids()
    ]
    for report in gather(backend, futures):
        if report.checksum != weights.checksum:
            raise WeightsNeverArrived(
                f"a rollout worker holds checksum {report.checksum} where the learner gave {weights.checksum}"
            )


def draw(
    backend: Backend, lines: HeldOut, batch: int, num_steps: int, guidance: float
) -> list[EvaluationImages]:
    """Draw all lines, `batch` images a call, dealt out to the workers in turn."""
    workers = backend.worker_ids()
    return gather(
        backend,
        [
            backend.sample_images(
                workers[i % len(workers)],
                chunk.prompts,
                chunk.noise_ids,
                num_steps,
                guidance,
                chunk.noise_seed,
            )
            for i, chunk in enumerate(lines.chunks(batch))
        ],
    )


def evaluate(
    backend: Backend,
    reward_names: Sequence[str],
    lines: HeldOut,
    *,
    batch: int,
    num_steps: int,
    guidance: float,
) -> Evaluation:
    """Draw and score all lines with the weights that the workers hold. RuntimeError when a scoring fails."""
    pictures = draw(backend, lines, batch, num_steps, guidance)
    handles = [
        backend.store(_previews(chunk, drawn.images, num_steps))
        for chunk, drawn in zip(lines.chunks(batch), pictures, strict=True)
    ]
    columns: dict[str, list[float]] = {}
    for reward in reward_names:
        for answer in gather(backend, [backend.score(reward, handle, None) for handle in handles]):
            if isinstance(answer.outcome, RewardFailure):
                raise RuntimeError(
                    f"evaluation: reward {reward!r} failed: {answer.outcome.message}"
                )
            for name, values in answer.outcome.columns.items():
                columns.setdefault(name, []).extend(values.tolist())
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
            "reward_calls": len(lines.prompts) * len(reward_names),
        },
    )


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
