"""Scores one image's components against one metadata record.

graded = (mean + min of the wanted objects' scores) / 2 * relation factor * clutter factor, where a
wanted object's score is its shape quality times its colour match with the component it is paired
with. Everything is a ramp, so that a reward made of it climbs; strict adds the hard conditions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from rewards.shapes.components import Components
from rewards.shapes.grammar import CLASSES, COLORS
from rewards.shapes.renderer import RELATION_AXIS

OVERLAP_RAMP = (0.45, 0.85)  # soft overlap with the template: quality 0 and 1
MARGIN_RAMP = (0.6, 4.0)  # factor = 0.6 + 4 * (overlap - best other class's overlap), at most 1
COLOR_RAMP = (50.0, 150.0)  # RGB distance to the named colour: match 1 and 0
FULL_AREA = 36.0  # an object of fewer pixels is worth less, in proportion
# Cosine between the named direction and the one from centroid to centroid: factor RELATION_LOW and
# 1. The upper end lies above cos 45 deg, so the named axis dominates, as it does in renders.
RELATION_RAMP = (-0.5, 0.71)
RELATION_LOW = 0.3
CLUTTER_AREA = 60.0  # that many pixels of clutter halve the score
STRICT_GRADED = 0.85  # a strictly right image scores at least this
STRICT_OBJECT = 0.8  # and each of its objects this
STRICT_CLUTTER = 20.0  # and holds less clutter, in pixels
_PALETTE = np.array(list(COLORS.values()), dtype=np.float64)
_COLOR_INDEX = {name: i for i, name in enumerate(COLORS)}
_CLASS_INDEX = {name: i for i, name in enumerate(CLASSES)}


class Wanted(NamedTuple):
    """One object that a record asks for."""

    shape: int
    """Index into CLASSES."""
    color: int | None
    """Index into COLORS; None means any of them."""
    relation: str | None
    """One of RELATION_AXIS, to the wanted object `target`."""
    target: int
    """Index of a wanted object; -1 without a relation."""


class View(NamedTuple):
    """The components of one image: [n] each, quality [n, 4], match [n, 5], center [n, 2]."""

    quality: np.ndarray
    match: np.ndarray
    shape: np.ndarray
    color: np.ndarray
    pixels: np.ndarray
    center: np.ndarray


def _ramp(value: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.clip((value - low) / (high - low), 0.0, 1.0)


def shape_quality(found: Components) -> np.ndarray:
    """[N, 4] in [0, 1]: how well each component shows each of CLASSES."""
    overlap = found.overlap
    best_two = np.sort(overlap, axis=1)[:, -2:]
    best_other = np.where(overlap == best_two[:, 1:], best_two[:, :1], best_two[:, 1:])
    base, slope = MARGIN_RAMP
    margin = np.clip(base + slope * (overlap - best_other), 0.0, 1.0)
    size = np.minimum(found.area / FULL_AREA, 1.0)[:, None]
    return _ramp(overlap, *OVERLAP_RAMP) * margin * size


def color_match(found: Components) -> np.ndarray:
    """[N, 5] in [0, 1]: how well each component shows each of COLORS."""
    distance = np.linalg.norm(found.rgb[:, None] - _PALETTE, axis=-1)
    return 1.0 - _ramp(distance, *COLOR_RAMP)


def wanted_objects(record: dict[str, Any]) -> list[Wanted]:
    """Expand `include` to one entry per object; a relation points at an item's first object."""
    objects: list[Wanted] = []
    first: list[int] = []  # of each item's objects
    for item in record["include"]:
        color, position = item.get("color"), item.get("position")
        relation, index = position if position else (None, -1)
        try:
            if relation is not None:
                RELATION_AXIS[relation]
            entry = Wanted(
                _CLASS_INDEX[item["class"]],
                None if color is None else _COLOR_INDEX[color],
                relation,
                -1 if relation is None else first[int(index)],
            )
        except (KeyError, IndexError) as error:
            raise ValueError(f"{error} is not of the shapes world, in record {record!r}") from None
        first.append(len(objects))
        objects += [entry] * int(item.get("count", 1))
    if not objects:
        raise ValueError(f"record wants no object: {record!r}")
    return objects


def _relation_factor(center: np.ndarray, wanted: list[Wanted], paired: dict[int, int]) -> float:
    factor = 1.0
    for i, want in enumerate(wanted):
        if want.relation is None:
            continue
        if i not in paired or want.target not in paired:
            return RELATION_LOW
        axis, sign = RELATION_AXIS[want.relation]
        offset = (center[paired[want.target]] - center[paired[i]]).tolist()
        cosine = sign * offset[axis] / max(math.hypot(*offset), 1e-6)
        low, high = RELATION_RAMP
        ramp = min(max((cosine - low) / (high - low), 0.0), 1.0)
        factor *= RELATION_LOW + (1.0 - RELATION_LOW) * ramp
    return factor


def score_image(record: dict[str, Any], view: View, dust: float) -> tuple[bool, float]:
    """(strict, graded) of one image, of which `dust` pixels lie in no listed component."""
    wanted = wanted_objects(record)
    if len(view.pixels) == 0:
        return False, 0.0
    any_color = view.match.max(axis=1)
    score = np.stack(
        [
            view.quality[:, want.shape]
            * (any_color if want.color is None else view.match[:, want.color])
            for want in wanted
        ]
    )
    rows, columns = linear_sum_assignment(-score)
    paired = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    object_score = np.zeros(len(wanted))
    object_score[rows] = score[rows, columns]
    # A component that serves a wanted object badly is clutter to that extent; a faint one counts in
    # full, or dimming a surplus object would pay like removing it.
    use = np.zeros(len(view.pixels))
    use[columns] = np.minimum(score[rows, columns] / STRICT_OBJECT, 1.0)
    clutter = float((view.pixels * (1.0 - use)).sum() + dust)
    factor = _relation_factor(view.center, wanted, paired)
    objects = float(object_score.mean() + object_score.min()) / 2
    graded = objects * factor / (1.0 + clutter / CLUTTER_AREA)
    strict = (
        graded >= STRICT_GRADED
        and factor == 1.0
        and clutter < STRICT_CLUTTER
        and bool(object_score.min() >= STRICT_OBJECT)  # so every wanted object is paired
        and all(_is_named(wanted[i], view, k) for i, k in paired.items())
    )
    return strict, graded


def _is_named(want: Wanted, view: View, k: int) -> bool:
    """Does component k go by the wanted class and colour?"""
    colors = range(len(COLORS)) if want.color is None else (want.color,)
    return bool(view.shape[k] == want.shape) and int(view.color[k]) in colors
