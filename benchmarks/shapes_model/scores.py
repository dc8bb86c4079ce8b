"""Samples the model on the held-out prompts and lets the verifier judge."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from diffusers import AutoencoderKL

from benchmarks.shapes_model.data import to_images
from benchmarks.shapes_model.networks import (
    LATENT_SHAPE,
    TextToVelocity,
    build_scheduler,
    caption_ids,
)
from rewards.shapes.grammar import CATEGORIES, eval_records
from rewards.shapes.verifier import judge

NUM_SAMPLING_STEPS = 10
NUM_ZERO_TOKENS = 1  # `max_sequence_length`: what the pipeline appends for the missing T5


def noise_of_line(line: int) -> torch.Tensor:
    """Initial noise [16, 4, 4] of one line of the evaluation file."""
    return torch.randn(LATENT_SHAPE, generator=torch.Generator().manual_seed(1_000_000 + line))


@torch.no_grad()
def sample_images(
    model: TextToVelocity, autoencoder: AutoencoderKL, captions: list[str], noise: torch.Tensor
) -> np.ndarray:
    """Images uint8 [B, 32, 32, 3] by Euler steps without guidance from noise [B, 16, 4, 4]."""
    scheduler = build_scheduler()
    scheduler.set_timesteps(NUM_SAMPLING_STEPS)
    times = scheduler.sigmas.tolist()
    embeds, pooled = model.encode(caption_ids(captions), NUM_ZERO_TOKENS)
    x = noise
    for t, t_next in itertools.pairwise(times):
        velocity = model.velocity(x, torch.full((len(x),), t), embeds, pooled)
        x = x + (t_next - t) * velocity
    latents = x / autoencoder.config.scaling_factor + autoencoder.config.shift_factor
    return to_images(autoencoder.decode(latents).sample)


def score_lines(model: TextToVelocity, autoencoder: AutoencoderKL, lines: range) -> torch.Tensor:
    """Per category sums of (strict, graded, 1) over lines of the evaluation file: float [6, 3]."""
    records = eval_records()
    own = [records[i] for i in lines]
    noise = torch.stack([noise_of_line(i) for i in lines])
    images = sample_images(model, autoencoder, [r["prompt"] for r in own], noise)
    sums = torch.zeros(len(CATEGORIES), 3)
    for record, verdict in zip(own, judge(images, own), strict=True):
        row = CATEGORIES.index(record["tag"])
        sums[row] += torch.tensor([verdict.strict, verdict.graded, 1.0])
    return sums


def means(sums: torch.Tensor) -> dict[str, list[float]]:
    """category, and "all" -> [strict, graded] from the sums of score_lines."""
    table = torch.cat([sums, sums.sum(dim=0, keepdim=True)])
    return {
        name: (row[:2] / row[2]).tolist()
        for name, row in zip([*CATEGORIES, "all"], table, strict=True)
    }
