"""Trains the autoencoder."""

from __future__ import annotations

import time

import numpy as np
import torch
from diffusers import AutoencoderKL

from benchmarks.shapes_model.data import to_images, to_pixels
from benchmarks.shapes_model.networks import build_autoencoder
from benchmarks.shapes_model.ranks import average_gradients
from rewards.shapes.grammar import eval_records
from rewards.shapes.renderer import render
from rewards.shapes.verifier import judge

LEARNING_RATE = 2e-3
KL_WEIGHT = 1e-4  # per latent number, against the mean squared error of pixels in [-1, 1]
BATCH_PER_RANK = 16
LOG_EVERY = 200
NUM_SEEDS = 1000  # keeps the random streams of neighbouring seeds apart


def train_autoencoder(
    rank: int, images: np.ndarray, seed: int, num_steps: int
) -> tuple[AutoencoderKL, dict[str, float]]:
    """Squared error plus a light KL term; returns the network and what the card says about it."""
    torch.manual_seed(seed)
    model = build_autoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=num_steps + 1, pct_start=0.05
    )
    rng = np.random.default_rng([seed, rank, 1])
    torch.manual_seed(seed * NUM_SEEDS + rank)
    start = time.monotonic()
    for step in range(1, num_steps + 1):
        pixels = to_pixels(images[rng.integers(len(images), size=BATCH_PER_RANK)])
        with torch.autocast("cpu", torch.bfloat16):
            posterior = model.encode(pixels).latent_dist
            output = model.decode(posterior.sample()).sample
        error = (output.float() - pixels).square().mean()
        loss = error + KL_WEIGHT * posterior.kl().float().mean() / posterior.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if rank == 0 and (step % LOG_EVERY == 0 or step == num_steps):
            seconds = time.monotonic() - start
            print(f"autoencoder step {step} error {error:.5f} seconds {seconds:.0f}", flush=True)
    return model, reconstruction_scores(model, seed)


@torch.no_grad()
def reconstruction_scores(model: AutoencoderKL, seed: int) -> dict[str, float]:
    """Squared error, and the verifier's scores of reconstructions of fresh scenes."""
    rng = np.random.default_rng([seed, 2])
    records = eval_records()
    images = np.stack([render(record, rng) for record in records])
    pixels = to_pixels(images)
    output = model.decode(model.encode(pixels).latent_dist.mode()).sample
    verdicts = judge(to_images(output), records)
    return {
        "error": (output - pixels).square().mean().item(),
        "strict": float(np.mean([v.strict for v in verdicts])),
        "graded": float(np.mean([v.graded for v in verdicts])),
    }
