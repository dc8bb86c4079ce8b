"""Judges images of the shapes world against metadata records, from the pixels alone.

graded = (mean + min of the wanted objects' scores) / 2 * relation factor * clutter factor, where a
wanted object's score is its shape quality times its colour match with the component it is paired
with. Everything is a ramp, so that a reward made of it climbs; strict adds the hard conditions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from rewards.shapes.components import Components, find_components
from rewards.shapes.grammar import CLASSES, COLORS
from rewards.shapes.renderer import RELATION_AXIS

OVERLAP_RAMP = (0.45, 0.85)  # soft overlap with the template: quality 0 and 1
MARGIN_RAMP = (0.6, 4.0)  # factor = 0.6 + 4 * (overlap - best other class's overlap), at most 1
COLOR_RAMP = (50.0, 150.0)  # RGB distance to the named colour: match 1 and 0
FULL_AREA = 36.0  # an object of fewer pixels is worth less, in proportion
RELATION_RAMP = (-8.0, 4.0)  # pixels between centroids along the axis: factor RELATION_LOW and 1
RELATION_LOW = 0.3
CLUTTER_AREA = 60.0  # that many pixels of clutter halve the score
STRICT_GRADED = 0.85  # a strictly right image scores at least this
STRICT_OBJECT = 0.8  # and each of its objects this
STRICT_CLUTTER = 20.0  # and holds less clutter, in pixels
LISTED_AREA = 10.0  # smaller components are not named
LISTED_OVERLAP = 0.6  # nor are those that look like nothing
_PALETTE = np.array(list(COLORS.values()), dtype=np.float64)
_COLOR_INDEX = {name: i for i, name in enumerate(COLORS)}
_CLASS_INDEX = {name: i for i, name in enumerate(CLASSES)}


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
    """Every wanted object, colour, count and relation is right, and nothing else is there."""
    graded: float
    """Smooth score in [0, 1]; at least STRICT_GRADED when strict."""
    seen: tuple[Seen, ...]
    """The objects that were named, largest first."""


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


def _wanted(record: dict[str, Any]) -> list[tuple[int, int | None, tuple[str, int] | None]]:
    """One (class index, colour index or None, relation or None) per wanted object."""
    objects = []
    for item in record["include"]:
        relation = item.get("position")
        color = item.get("color")
        try:
            entry = (
                _CLASS_INDEX[item["class"]],
                None if color is None else _COLOR_INDEX[color],
                None if relation is None else (relation[0], int(relation[1])),
            )
        except KeyError as error:
            raise ValueError(f"{error} is not of the shapes world, in record {record!r}") from None
        objects += [entry] * int(item.get("count", 1))
    if not objects:
        raise ValueError(f"record wants no object: {record!r}")
    return objects


def _relation_factor(centers: np.ndarray, wanted: list, paired: dict[int, int]) -> float:
    factor = 1.0
    for i, (_, _, relation) in enumerate(wanted):
        if relation is None:
            continue
        if i not in paired or relation[1] not in paired:
            return RELATION_LOW
        axis, sign = RELATION_AXIS[relation[0]]
        offset = sign * (centers[paired[relation[1]], axis] - centers[paired[i], axis])
        ramp = float(_ramp(np.float64(offset), *RELATION_RAMP))
        factor *= RELATION_LOW + (1.0 - RELATION_LOW) * ramp
    return factor


def _judge_one(
    record: dict[str, Any],
    quality: np.ndarray,
    match: np.ndarray,
    found_class: np.ndarray,
    found_color: np.ndarray,
    area: np.ndarray,
    center: np.ndarray,
    dust: float,
) -> tuple[bool, float]:
    wanted = _wanted(record)
    if len(area) == 0:
        return False, 0.0
    any_color = match.max(axis=1)
    score = np.stack(
        [quality[:, c] * (any_color if k is None else match[:, k]) for c, k, _ in wanted]
    )
    rows, columns = linear_sum_assignment(-score)
    paired = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    paired_score = np.zeros(len(wanted))
    paired_score[rows] = score[rows, columns]
    # A component that serves a wanted object badly is clutter to that extent.
    use = np.zeros(len(area))
    use[columns] = np.minimum(score[rows, columns] / STRICT_OBJECT, 1.0)
    clutter = float((area * (1.0 - use)).sum() + dust)
    factor = _relation_factor(center, wanted, paired)
    objects = (paired_score.mean() + paired_score.min()) / 2
    graded = float(objects) * factor / (1.0 + clutter / CLUTTER_AREA)
    strict = (
        len(paired) == len(wanted)
        and graded >= STRICT_GRADED
        and factor == 1.0
        and clutter < STRICT_CLUTTER
        and paired_score.min() >= STRICT_OBJECT
        and all(
            found_class[paired[i]] == c
            and found_color[paired[i]] in ((k,) if k is not None else _COLOR_INDEX.values())
            for i, (c, k, _) in enumerate(wanted)
        )
    )
    return bool(strict), graded


def _name(found: Components, k: int) -> Seen:
    names = [*COLORS, "unnamed"]
    return Seen(
        shape=CLASSES[int(found.overlap[k].argmax())],
        color=names[found.color[k]],
        box=tuple(int(v) for v in found.box[k]),
    )


def judge(images: np.ndarray, records: list[dict[str, Any]]) -> list[Verdict]:
    """Judge uint8 images [B, H, W, 3], each against its own metadata record."""
    for record in records:
        if "include" not in record:
            raise ValueError(f"metadata record without 'include': {record!r}")
    if len(images) != len(records):
        raise ValueError(f"{len(images)} images but {len(records)} records")
    found = find_components(images)
    quality, match = shape_quality(found), color_match(found)
    found_class = found.overlap.argmax(axis=1)
    listed = (found.area >= LISTED_AREA) & (found.overlap.max(axis=1) >= LISTED_OVERLAP)
    edges = np.searchsorted(found.image, np.arange(len(images) + 1))
    verdicts = []
    for b, record in enumerate(records):
        own = slice(int(edges[b]), int(edges[b + 1]))
        strict, graded = _judge_one(
            record,
            quality[own],
            match[own],
            found_class[own],
            found.color[own],
            found.area[own],
            found.center[own],
            float(found.dust[b]),
        )
        seen = tuple(_name(found, k) for k in range(own.start, own.stop) if listed[k])
        verdicts.append(Verdict(strict=strict, graded=graded, seen=seen))
    return verdicts
