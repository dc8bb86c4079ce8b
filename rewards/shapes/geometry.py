"""The four shapes as signed distances, shared by the renderer and the verifier's templates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

CROSS_ARM_FRAC = 0.36  # thickness of a cross's arm over its side
_SQRT5 = 5.0**0.5

AREA_FRAC = {
    "circle": np.pi / 4,
    "square": 1.0,
    "triangle": 0.5,
    "cross": 2 * CROSS_ARM_FRAC - CROSS_ARM_FRAC**2,
}
"""Area of each class over the square of its bounding side."""

CENTROID_Y_FRAC = {"circle": 0.0, "square": 0.0, "triangle": 1 / 6, "cross": 0.0}
"""How far below the box's middle the centroid lies, over the bounding side."""


def _circle(x: np.ndarray, y: np.ndarray, side: np.ndarray) -> np.ndarray:
    return np.sqrt(x * x + y * y) - side / 2


def _square(x: np.ndarray, y: np.ndarray, side: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(x), np.abs(y)) - side / 2


def _triangle(x: np.ndarray, y: np.ndarray, side: np.ndarray) -> np.ndarray:
    # Apex (0, -side/2), base from (-side/2, side/2) to (side/2, side/2).
    flank = (2 * np.abs(x) - y - side / 2) / _SQRT5
    return np.maximum(y - side / 2, flank)


def _cross(x: np.ndarray, y: np.ndarray, side: np.ndarray) -> np.ndarray:
    ax, ay, half, arm = np.abs(x), np.abs(y), side / 2, CROSS_ARM_FRAC * side / 2
    return np.minimum(np.maximum(ax - half, ay - arm), np.maximum(ax - arm, ay - half))


_DISTANCE: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
}


def coverage(name: str, x: np.ndarray, y: np.ndarray, side: np.ndarray | float) -> np.ndarray:
    """Anti-aliased coverage in [0, 1] of pixels at offsets (x, y) from the box's middle.

    x, y, side are in pixels and broadcast against each other; y grows downwards.
    """
    if name not in _DISTANCE:
        raise ValueError(f"unknown class {name!r}; known: {sorted(_DISTANCE)}")
    return np.clip(0.5 - _DISTANCE[name](x, y, np.asarray(side)), 0.0, 1.0)
