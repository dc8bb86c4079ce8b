"""Draws a 32x32 scene that satisfies a metadata record."""

from __future__ import annotations

from typing import Any

import numpy as np

from rewards.shapes.geometry import coverage
from rewards.shapes.grammar import COLORS

IMAGE_SIZE = 32
BACKGROUND = (26.0, 38.0)  # range of the grey level of the plain, dark background
COLOR_JITTER = 8.0  # each channel of an object's colour varies by this much
GAP = 2.0  # least distance in pixels between the boxes of two objects
SIDE = {1: (10.0, 14.0), 2: (10.0, 13.5), 3: (9.0, 12.0), 4: (9.0, 11.0)}  # by number of objects
RELATION_AXIS = {"left of": (0, 1), "right of": (0, -1), "above": (1, 1), "below": (1, -1)}
"""relation -> (axis 0 = x or 1 = y, sign of target minus subject)."""


def objects_of(record: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Expand `include` to one entry per object; a colour that is left open is drawn."""
    entries: list[dict[str, Any]] = []
    first: list[int] = []  # of each item's objects: what a relation's index points at
    for item in record["include"]:
        # One colour for all the objects of an item: three circles share it.
        color = item.get("color") or str(rng.choice(list(COLORS)))
        relation = item.get("position")
        position = (relation[0], first[relation[1]]) if relation else None
        entry = {"class": item["class"], "color": color, "position": position}
        first.append(len(entries))
        entries += [dict(entry) for _ in range(item["count"])]
    if not 1 <= len(entries) <= max(SIDE):
        raise ValueError(f"a scene holds 1 to {max(SIDE)} objects, got {len(entries)}: {record}")
    return entries


def _fits(entries: list[dict[str, Any]], sides: np.ndarray, centers: np.ndarray) -> bool:
    for i, entry in enumerate(entries):
        for j in range(i):
            need = (sides[i] + sides[j]) / 2 + GAP
            if np.abs(centers[i] - centers[j]).max() < need:
                return False
        if entry["position"]:
            relation, target = entry["position"]
            axis, sign = RELATION_AXIS[relation]
            offset = centers[target] - centers[i]
            if sign * offset[axis] < abs(offset[1 - axis]) + 1.0:
                return False
    return True


def place(entries: list[dict[str, Any]], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw sides [n] and centres (x, y) [n, 2] in pixels that do not overlap and fit."""
    low, high = SIDE[len(entries)]
    while True:
        sides = rng.uniform(low, high, len(entries))
        for _ in range(50):
            span = (IMAGE_SIZE - sides - 2.0)[:, None]
            centers = 1.0 + sides[:, None] / 2 + rng.uniform(size=(len(entries), 2)) * span
            if _fits(entries, sides, centers):
                return sides, centers
        high = max(low, high - 0.5)  # smaller objects until they fit


def render(record: dict[str, Any], rng: np.random.Generator) -> np.ndarray:
    """Draw one scene for a record: uint8 [32, 32, 3]."""
    entries = objects_of(record, rng)
    sides, centers = place(entries, rng)
    canvas = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), rng.uniform(*BACKGROUND))
    y, x = np.mgrid[:IMAGE_SIZE, :IMAGE_SIZE] + 0.5
    for entry, side, (cx, cy) in zip(entries, sides, centers, strict=True):
        color = np.array(COLORS[entry["color"]]) + rng.uniform(-COLOR_JITTER, COLOR_JITTER, 3)
        alpha = coverage(entry["class"], x - cx, y - cy, side)[:, :, None]
        canvas = canvas * (1 - alpha) + color * alpha
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
