"""The shapes reward: the verifier's graded score, with its strict verdict beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

from rewards.base import Canaries
from rewards.shapes.grammar import CATEGORIES, split
from rewards.shapes.renderer import render
from rewards.shapes.verifier import judge

CANARY_SEED = 7
GOOD = (0.9, 1.0)  # where the graded score of a right image must fall
WRONG = (0.0, 0.7)  # of the next category's scene: near misses earn a part
BLANK = (0.0, 0.01)  # of noise and of plain grey


class ShapesReward:
    """Scores images of the shapes world from their pixels alone."""

    name = "shapes"

    def __call__(
        self, images: np.ndarray, prompts: list[str], metadata: list[dict[str, Any]]
    ) -> dict[str, np.ndarray]:
        """Graded score in [0, 1] and strict 0/1, both float64 [B], of uint8 images [B, H, W, 3].

        The metadata says what is wanted (`include`); the prompts are not read.
        """
        if not len(images) == len(prompts) == len(metadata):
            raise ValueError(
                f"{len(images)} images, {len(prompts)} prompts and {len(metadata)} records differ"
            )
        verdicts = judge(images, metadata)
        return {
            "shapes": np.array([v.graded for v in verdicts], dtype=np.float64),
            "shapes_strict": np.array([v.strict for v in verdicts], dtype=np.float64),
        }

    def canaries(self) -> Canaries:
        """Images whose graded score is known to lie in an interval.

        Per category a right scene and another category's scene; then noise and plain grey.
        """
        rng = np.random.default_rng(CANARY_SEED)
        records = [split(category)[0][0] for category in CATEGORIES]
        right = np.stack([render(record, rng) for record in records])
        wrong = np.roll(right, 1, axis=0)
        noise = rng.integers(0, 256, size=right.shape[1:], dtype=np.uint8)
        blank = np.stack([noise, np.full_like(noise, 128)])
        wanted = [*records, *records, *records[:2]]
        bounds = np.array([GOOD] * len(right) + [WRONG] * len(wrong) + [BLANK] * len(blank))
        images = np.concatenate([right, wrong, blank])
        prompts = [record["prompt"] for record in wanted]
        return Canaries(
            images=images,
            prompts=prompts,
            metadata=wanted,
            low=bounds[:, 0],
            high=bounds[:, 1],
        )
