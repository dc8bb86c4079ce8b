"""The total that is trained on: a weighted sum of rewards. Pure."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


def combine(
    parts: Mapping[str, NDArray[np.float64]], weights: Mapping[str, float]
) -> NDArray[np.float64]:
    """total = sum over rewards k of weights[k] * parts[k].

    The sum runs in the order of `weights`, in float64, so equal inputs give equal bits. A weight of
    0 leaves its part out altogether (a non-finite one cannot reach the total). Columns without a
    weight, such as "shapes_strict", are recorded values and stay out. A NaN (a state that was not
    scored) stays NaN.

    Args:
        parts: columns of one shape, such as [B] or [N, T + 1]; they are not changed.
        weights: reward name -> its factor; at least one is not 0.

    Returns:
        A new float64 array of that shape.

    Raises ValueError naming the weight that has no part, or the parts whose shapes differ.
    """
    total: NDArray[np.float64] | None = None
    for name, weight in weights.items():
        if name not in parts:
            raise ValueError(f"reward {name!r} has a weight but no values; found {sorted(parts)}")
        if weight == 0:
            continue
        part = np.asarray(parts[name], dtype=np.float64)
        if total is None:
            total = np.zeros_like(part)
        if part.shape != total.shape:
            raise ValueError(
                f"reward {name!r} has shape {list(part.shape)}, others have {list(total.shape)}"
            )
        total += weight * part
    if total is None:
        raise ValueError(f"no reward has a weight other than 0: {dict(weights)}")
    return total
