"""Gives every pixel a colour label and a soft coverage, by one table look-up."""

from __future__ import annotations

import numpy as np

from rewards.shapes.grammar import COLORS

UNNAMED = len(COLORS) + 1  # label of pixels that are no background and have no named colour
# Background is what lies within these three; its greys are 26 to 38 in renders, and 18 to 45 with
# the autoencoder's ripples. Colours are quantised to steps of 8, so each bound holds within 8.
MAX_CHROMA = 20  # max - min channel
MIN_GREY = 12  # of the brightest channel
MAX_GREY = 54
MIN_COSINE = 0.9  # between a named pixel's chroma and its colour's
_PALETTE = np.array(list(COLORS.values()), dtype=np.float32)


def _chroma(rgb: np.ndarray) -> np.ndarray:
    return rgb - rgb.min(axis=-1, keepdims=True)


def _tables() -> tuple[np.ndarray, np.ndarray]:
    """(label uint8 [32768], coverage float32 [32768]) of colours quantised to 5 bits a channel."""
    level = np.arange(32, dtype=np.float32) * 8 + 4
    rgb = np.stack(np.meshgrid(level, level, level, indexing="ij"), axis=-1).reshape(-1, 3)
    chroma, palette = _chroma(rgb), _chroma(_PALETTE)
    length = np.linalg.norm(chroma, axis=-1)
    cosine = chroma @ palette.T / np.linalg.norm(palette, axis=-1)
    cosine /= np.maximum(length, 1e-6)[:, None]
    nearest = cosine.argmax(axis=-1)
    colored = chroma.max(axis=-1) > MAX_CHROMA
    named = colored & (cosine.max(axis=-1) >= MIN_COSINE)
    brightest = rgb.max(axis=-1)
    label = np.zeros(len(rgb), dtype=np.uint8)
    label[colored | (brightest <= MIN_GREY) | (brightest > MAX_GREY)] = UNNAMED
    label[named] = nearest[named] + 1
    full = palette.max(axis=-1)[nearest]
    soft = np.where(named, np.clip(chroma.max(axis=-1) / full, 0, 1), label > 0)
    return label, soft.astype(np.float32)


_LABEL, _SOFT = _tables()
_BLANK = int(np.flatnonzero(_LABEL == 0)[0])


def segment(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Label uint8 and coverage float32, both [B * (H + 1), W], of uint8 images [B, H, W, 3].

    Label 0 is background, 1.. are COLORS in order, then UNNAMED. The images lie below one another
    with a blank row between, so that one pass finds the connected components of all of them.
    """
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
        raise ValueError(f"want uint8 [B, H, W, 3], got {images.dtype} {images.shape}")
    num, height, width, _ = images.shape
    tall = np.full((num, height + 1, width), _BLANK, dtype=np.uint16)
    quantised = (images >> 3).astype(np.uint16)
    tall[:, :height] = (quantised[..., 0] << 10) | (quantised[..., 1] << 5) | quantised[..., 2]
    tall = tall.reshape(-1, width)
    return _LABEL[tall], _SOFT[tall]
