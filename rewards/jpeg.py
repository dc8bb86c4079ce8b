"""JPEG compressibility, as in DDPO (Black et al. 2023, arXiv 2305.13301): the smallest example."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rewards.base import Canaries


class JpegReward:
    """Minus the size of the JPEG file in kB (1,000 bytes), at quality 95 as in DDPO's code.

    It grows as an image loses detail, and is below 0 for every image. A file's fixed part (header
    and tables, about 0.6 kB) counts: from flat to noise, 32x32 images span [-1.8, -0.6] and 128x128
    ones [-20, -0.9]. The weight in the config scales it. Column "jpeg". Prompts and metadata are
    not read.
    """

    name = "jpeg"

    def __init__(self, quality: int = 95) -> None:
        """Args: quality: Pillow's JPEG quality, 1 to 100. Raises ValueError outside."""
        if not 1 <= quality <= 100:
            raise ValueError(f"quality = {quality} must lie in 1 .. 100")
        self.quality = quality

    def __call__(
        self, images: NDArray[np.uint8], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> dict[str, NDArray[np.float64]]:
        """uint8 [B, H, W, 3] -> {"jpeg": float64 [B], -kB}."""
        sizes = np.array([self._size_bytes(image) for image in images], np.float64)
        return {self.name: -sizes / 1000}

    def canaries(self) -> Canaries:
        """A flat image must be small, and noise must not; the bounds hold for every quality."""
        flat = np.full((128, 128, 3), 128, np.uint8)
        noise = np.random.default_rng(0).integers(0, 256, flat.shape, dtype=np.uint8)
        return Canaries(
            images=np.stack([flat, noise]),
            prompts=["a flat image", "noise"],
            metadata=[{}, {}],
            low=np.array([-1.0, -1.5 * flat.size / 1000]),
            high=np.array([-0.1, -1.1]),
        )

    def _size_bytes(self, image: NDArray[np.uint8]) -> int:
        """Bytes of one image, uint8 [H, W, 3], as a JPEG file."""
        file = io.BytesIO()
        Image.fromarray(image).save(file, format="JPEG", quality=self.quality)
        return file.tell()
