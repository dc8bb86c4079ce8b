"""A model family without diffusers whose velocity is exact: Gaussian data, one Gaussian a prompt.

Named "tests.fake_family:GaussianFamily" in a config. It loads in milliseconds, and a test that
knows the data's law knows what sampling must give.
"""

from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rollout.config import ModelConfig
from rollout.families.base import Conditioning, Family, Part
from rollout.flow.schedule import shifted_times

EMBEDDING_SIZE = 8
DATA_STD = 0.5


class GaussianNetwork(nn.Module):
    """The velocity field of data N(centre(embedding), DATA_STD^2 I); `centre` is what trains."""

    def __init__(self, latent_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.centre = nn.Linear(EMBEDDING_SIZE, int(np.prod(latent_shape)))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x_t: Tensor, t: Tensor, embedding: Tensor) -> Tensor:
        """v = E[x_1 - x_0 | x_t], for x_t [B, ...], t [B], embedding [B, EMBEDDING_SIZE]."""
        assert x_t.shape[0] == t.shape[0] == embedding.shape[0], (x_t.shape, t.shape)
        assert bool(((t >= 0) & (t <= 1)).all()), t
        t = t.to(x_t.dtype).reshape(-1, *[1] * (x_t.ndim - 1))
        centre = self.centre(embedding).reshape(x_t.shape)
        variance = ((1 - t) * DATA_STD) ** 2 + t**2
        slope = (t - (1 - t) * DATA_STD**2) / variance
        return slope * (x_t - (1 - t) * centre) - centre


class GaussianFamily(Family):
    """Latents [3, 4, 4] are the images, from -2 .. 2 to 0 .. 1; prompts are hashed, "" is 0."""

    latent_shape = (3, 4, 4)
    lora_targets = ("centre",)

    def __init__(self, device: torch.device, parts: tuple[Part, ...]) -> None:
        self.network = GaussianNetwork(self.latent_shape).requires_grad_(False).to(device).eval()
        self._device, self._parts = device, parts

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        device: torch.device,
        parts: tuple[Part, ...] = ("network", "text", "decoder"),
    ) -> "GaussianFamily":
        assert config.dtype == "float32", config.dtype
        return cls(device, parts)

    def times(self, num_steps: int) -> Tensor:
        return shifted_times(num_steps, 3.0)

    def encode_prompts(self, prompts: list[str]) -> Conditioning:
        assert "text" in self._parts, "loaded without text"
        rows = [
            np.frombuffer(blake2b(prompt.encode(), digest_size=EMBEDDING_SIZE).digest(), np.uint8)
            * bool(prompt)
            for prompt in prompts
        ]
        embedding = torch.from_numpy(np.stack(rows).astype(np.float32) / 255)
        return {"embedding": embedding.to(self._device)}

    def velocity(
        self, network: nn.Module, x_t: Tensor, t: Tensor, conditioning: Conditioning
    ) -> Tensor:
        assert x_t.shape[1:] == self.latent_shape, x_t.shape
        return network(x_t, t, conditioning["embedding"])

    def decode(self, latents: Tensor) -> Tensor:
        assert "decoder" in self._parts, "loaded without decoder"
        return (latents / 4 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)

    def save_lora(self, folder: Path, tensors: dict[str, Tensor], alpha: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "lora.safetensors", metadata={"alpha": str(alpha)})

    def save_full(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "network.safetensors")
