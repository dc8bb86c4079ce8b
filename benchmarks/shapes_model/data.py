"""Scenes to train on: rendered once, cached as images, then as standardised latents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL

from benchmarks.shapes_model.ranks import NUM_RANKS, total
from rewards.shapes.grammar import CATEGORIES, all_records
from rewards.shapes.renderer import render

CHUNK = 1000  # scenes that share a seed
MIXTURE = {  # share of each category in the training scenes
    "single_object": 0.06,
    "two_object": 0.14,
    "counting": 0.20,
    "colors": 0.10,
    "position": 0.22,
    "color_attr": 0.28,
}
_RECORDS = {category: all_records(category) for category in CATEGORIES}
CAPTIONS = [record["prompt"] for records in _RECORDS.values() for record in records]
"""Every caption of the grammar, in a fixed order; the empty one is added while training."""
_CAPTION_INDEX = {caption: i for i, caption in enumerate(CAPTIONS)}


def render_chunk(seed: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """CHUNK scenes: images uint8 [CHUNK, 32, 32, 3] and caption indices int64 [CHUNK]."""
    rng = np.random.default_rng([seed, chunk])
    tags = rng.choice(list(MIXTURE), size=CHUNK, p=list(MIXTURE.values()))
    records = [_RECORDS[tag][rng.integers(len(_RECORDS[tag]))] for tag in tags]
    images = np.stack([render(record, rng) for record in records])
    return images, np.array([_CAPTION_INDEX[record["prompt"]] for record in records])


def make_scenes(rank: int, workdir: Path, seed: int, num_chunks: int) -> None:
    """Render this rank's chunks into workdir, unless they are there."""
    for chunk in range(rank, num_chunks, NUM_RANKS):
        path = workdir / f"scenes_{chunk:04d}.npz"
        if not path.exists():
            images, captions = render_chunk(seed, chunk)
            partial = path.with_suffix(".partial.npz")
            np.savez(partial, images=images, captions=captions)
            partial.rename(path)
    dist.barrier()


def load_scenes(rank: int, workdir: Path, num_chunks: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's share of the scenes: images uint8 [N, 32, 32, 3], captions int64 [N]."""
    files = [np.load(workdir / f"scenes_{c:04d}.npz") for c in range(rank, num_chunks, NUM_RANKS)]
    return (
        np.concatenate([file["images"] for file in files]),
        np.concatenate([file["captions"] for file in files]),
    )


def to_pixels(images: np.ndarray) -> torch.Tensor:
    """uint8 [B, 32, 32, 3] -> float32 [B, 3, 32, 32] in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def to_images(pixels: torch.Tensor) -> np.ndarray:
    """float [B, 3, 32, 32] in [-1, 1] -> uint8 [B, 32, 32, 3], rounded as diffusers does."""
    scaled = (pixels.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    return (scaled * 255).round().astype(np.uint8)


@torch.no_grad()
def encode_latents(autoencoder: AutoencoderKL, images: np.ndarray) -> torch.Tensor:
    """Posterior means float32 [N, 16, 4, 4] of uint8 images, not standardised."""
    parts = [
        autoencoder.encode(to_pixels(images[i : i + 256])).latent_dist.mode()
        for i in range(0, len(images), 256)
    ]
    return torch.cat(parts)


def standardise(autoencoder: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """Set the autoencoder's shift and scale from all ranks' latents, and apply them."""
    moments = torch.stack([latents.double().sum(), latents.double().square().sum()])
    count = total(torch.tensor(float(latents.numel()), dtype=torch.float64))
    mean, square = (total(moments) / count).tolist()
    shift, scale = mean, (square - mean * mean) ** -0.5
    autoencoder.register_to_config(shift_factor=shift, scaling_factor=scale)
    return (latents - shift) * scale
