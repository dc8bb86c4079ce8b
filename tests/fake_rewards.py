"""Rewards that are wrong on purpose, named in configs of the integration tests."""

from typing import Any

import numpy as np


class ConstantReward:
    """Says the same of every image."""

    name = "constant"

    def __call__(
        self, images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> dict[str, np.ndarray]:
        return {"constant": np.full(len(images), 0.25)}
