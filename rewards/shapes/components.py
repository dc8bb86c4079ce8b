"""Finds the objects in images: connected components of one colour, over the whole batch at once.

Every component is compared with an ideal template of each class of its own area and centroid.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from rewards.shapes.geometry import AREA_FRAC, CENTROID_Y_FRAC, coverage
from rewards.shapes.grammar import CLASSES
from rewards.shapes.segmentation import UNNAMED, segment

MIN_AREA = 6  # pixels; smaller components are dust
MAX_COMPONENTS = 8  # per image, the largest ones; the rest is dust
_WINDOW = 17  # side of the crop that templates are compared in


@dataclass(frozen=True, kw_only=True)
class Components:
    """The components of a batch, N in all, ordered by image and then by falling area."""

    image: np.ndarray
    """int64 [N]: which image."""
    color: np.ndarray
    """int64 [N]: index into COLORS; len(COLORS) means none of them."""
    area: np.ndarray
    """float64 [N]: pixels, counted by coverage."""
    pixels: np.ndarray
    """int64 [N]: pixels, however faint."""
    center: np.ndarray
    """float64 [N, 2]: centroid (x, y) in pixels."""
    box: np.ndarray
    """int64 [N, 4]: x, y, width, height in pixels."""
    overlap: np.ndarray
    """float64 [N, 4]: soft intersection over union with the template of each of CLASSES."""
    rgb: np.ndarray
    """float64 [N, 3]: mean colour, weighted by coverage to the fourth power (the core)."""
    dust: np.ndarray
    """float64 [B]: pixels of each image in components too small or too many to be listed."""


def find_components(images: np.ndarray) -> Components:
    """Segment uint8 images [B, H, W, 3] and describe every component of one colour."""
    label, soft = segment(images)
    num, height = images.shape[:2]
    region = np.zeros(label.shape, dtype=np.int32)  # 0 is background
    boxes, colors = [], []
    offset = 0
    for value in range(1, UNNAMED + 1):
        mask = (label == value).astype(np.uint8)
        count, found, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
        region += np.where(found > 0, found + offset, 0).astype(np.int32)
        boxes.append(stats[1:])
        colors.append(np.full(count - 1, value - 1))
        offset += count - 1
    stats, color = np.concatenate(boxes).astype(np.int64), np.concatenate(colors)
    kept, dust = _keep(stats, num, height)
    return _describe(images, region, soft, stats[kept], color[kept], kept, dust)


def _keep(stats: np.ndarray, num: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the largest components of each image, and the other pixels of each image."""
    image, pixels = stats[:, 1] // (height + 1), stats[:, 4]
    order = np.lexsort((-pixels, image))
    rank = np.arange(len(order)) - np.searchsorted(image[order], image[order])
    large = (pixels[order] >= MIN_AREA) & (rank < MAX_COMPONENTS)
    left_out = order[~large]
    return order[large], np.bincount(image[left_out], pixels[left_out], minlength=num)


def _describe(
    images: np.ndarray,
    region: np.ndarray,
    soft: np.ndarray,
    stats: np.ndarray,
    color: np.ndarray,
    kept: np.ndarray,
    dust: np.ndarray,
) -> Components:
    height, width = images.shape[1:3]
    total = int(region.max()) + 1
    flat = region.ravel()
    ys, xs = np.divmod(np.flatnonzero(flat), width)
    ids, weight = region[ys, xs], soft[ys, xs].astype(np.float64)

    def mean(values: np.ndarray, by: np.ndarray) -> np.ndarray:
        return (
            np.bincount(ids, values * by, total)[kept + 1] / np.bincount(ids, by, total)[kept + 1]
        )

    area = np.bincount(ids, weight, total)[kept + 1]
    center = np.stack([mean(xs + 0.5, weight), mean(ys + 0.5, weight)], axis=-1).reshape(-1, 2)
    pixels = images[ys // (height + 1), ys % (height + 1), xs]
    core = weight**4
    rgb = np.stack([mean(pixels[:, c], core) for c in range(3)], axis=-1).reshape(-1, 3)
    overlap = _overlap(region, soft, kept + 1, center, area)
    image = stats[:, 1] // (height + 1)
    box = stats[:, :4].copy()
    box[:, 1] -= image * (height + 1)
    center[:, 1] -= image * (height + 1)
    return Components(
        image=image,
        color=color,
        area=area,
        pixels=stats[:, 4],
        center=center,
        box=box,
        overlap=overlap,
        rgb=rgb,
        dust=dust,
    )


def _overlap(
    region: np.ndarray, soft: np.ndarray, ids: np.ndarray, center: np.ndarray, area: np.ndarray
) -> np.ndarray:
    """Soft intersection over union [N, 4] with templates of the same area and centroid."""
    half = _WINDOW // 2
    region, soft = np.pad(region, half), np.pad(soft, half)
    corner = np.floor(center).astype(np.int64)  # in padded coordinates: the window's low corner
    step = np.arange(_WINDOW)
    rows = corner[:, 1, None, None] + step[:, None]
    columns = corner[:, 0, None, None] + step
    shape = np.where(region[rows, columns] == ids[:, None, None], soft[rows, columns], 0)
    x = (columns - half + 0.5 - center[:, 0, None, None]).astype(np.float32)
    y = (rows - half + 0.5 - center[:, 1, None, None]).astype(np.float32)
    result = np.empty((len(ids), len(CLASSES)))
    for k, name in enumerate(CLASSES):
        side = np.sqrt(area / AREA_FRAC[name]).astype(np.float32)[:, None, None]
        template = coverage(name, x, y + np.float32(CENTROID_Y_FRAC[name]) * side, side)
        common = np.minimum(shape, template).sum(axis=(1, 2), dtype=np.float64)
        result[:, k] = common / (2 * area - common)  # the template's area is the component's
    return result
