"""Judges images of the shapes world against metadata records, from the pixels alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rewards.shapes.components import Components, find_components
from rewards.shapes.grammar import CLASSES, COLORS
from rewards.shapes.matching import STRICT_GRADED, View, color_match, score_image, shape_quality

__all__ = ["STRICT_GRADED", "Seen", "Verdict", "judge"]

LISTED_AREA = 10.0  # components of fewer pixels are not named
LISTED_OVERLAP = 0.6  # nor are those that look like no class
_COLOR_NAMES = (*COLORS, "unnamed")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """An object that the verifier names in an image."""

    shape: str
    """One of CLASSES."""
    color: str
    """One of COLORS, or "unnamed"."""
    box: tuple[int, int, int, int]
    """x, y, width, height in pixels."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the verifier says about one image."""

    strict: bool
    """Every wanted object, colour, count and relation is right, and fewer than STRICT_CLUTTER
    pixels (half of the smallest rendered object) are neither theirs nor background, however faint:
    see MAX_CHROMA, MIN_GREY and MAX_GREY in segmentation."""
    graded: float
    """Smooth score in [0, 1]; at least STRICT_GRADED when strict."""
    seen: tuple[Seen, ...]
    """The objects that were named, largest first."""


def _name(found: Components, k: int) -> Seen:
    x, y, width, height = found.box[k].tolist()
    return Seen(
        shape=CLASSES[int(found.overlap[k].argmax())],
        color=_COLOR_NAMES[int(found.color[k])],
        box=(x, y, width, height),
    )


def judge(images: np.ndarray, records: list[dict[str, Any]]) -> list[Verdict]:
    """Judge uint8 images [B, H, W, 3], each against its own metadata record."""
    for record in records:
        if "include" not in record:
            raise ValueError(f"metadata record without 'include': {record!r}")
    if len(images) != len(records):
        raise ValueError(f"{len(images)} images but {len(records)} records")
    if len(images) == 0:
        return []
    found = find_components(images)
    columns = View(
        quality=shape_quality(found),
        match=color_match(found),
        shape=found.overlap.argmax(axis=1),
        color=found.color,
        pixels=found.pixels,
        center=found.center,
    )
    listed = (found.area >= LISTED_AREA) & (found.overlap.max(axis=1) >= LISTED_OVERLAP)
    edges = np.searchsorted(found.image, np.arange(len(images) + 1)).tolist()
    verdicts = []
    for b, record in enumerate(records):
        own = slice(edges[b], edges[b + 1])
        view = View(*(column[own] for column in columns))
        strict, graded = score_image(record, view, float(found.dust[b]))
        seen = tuple(_name(found, k) for k in range(edges[b], edges[b + 1]) if listed[k])
        verdicts.append(Verdict(strict=strict, graded=graded, seen=seen))
    return verdicts
