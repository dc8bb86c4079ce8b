"""What a model family must offer; the sampler and the learner know nothing else about a model.

A family is the only door to diffusers. Inside this project `t` falls from 1 (noise) to 0 (image),
latents are standardised and float32, and the network predicts the velocity v = x_1 - x_0 (docs/papers.md
section 0); whatever the model's own conventions are (timesteps in 0..1000, scaling factors, packed
latents), they end at this edge.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from rollout.config import ModelConfig

Conditioning = dict[str, Tensor]
"""What the network is told about its prompts: named tensors, batch first, one row a prompt."""

Part = Literal["network", "text", "decoder"]
"""What to load: the learner needs no decoder, a rollout worker with cached embeddings no text
encoder."""


class Family(ABC):
    """A flow-matching image model, split into network, text encoders and decoder."""

    network: nn.Module
    """The velocity network; the one module that is trained."""
    latent_shape: tuple[int, ...]
    """Shape of one standardised latent, without the batch dimension."""
    lora_targets: tuple[str, ...]
    """Module name endings that LoRA is published for."""

    @classmethod
    @abstractmethod
    def load(
        cls,
        config: ModelConfig,
        device: torch.device,
        parts: tuple[Part, ...] = ("network", "text", "decoder"),
    ) -> "Family":
        """Load the named parts, frozen and in eval mode; ValueError if the folder is missing or not
        such a model. Without "network", `network` has names and shapes, and need not have weights
        (the meta device)."""

    @abstractmethod
    def times(self, num_steps: int) -> Tensor:
        """Return the model's own schedule: float64 [T + 1], from 1 to 0."""

    @abstractmethod
    def encode_prompts(self, prompts: list[str]) -> Conditioning:
        """Encode prompts; rows are independent of the batch they are encoded in as far as the
        encoder allows."""

    @abstractmethod
    def velocity(
        self, network: nn.Module, x_t: Tensor, t: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Return float32 v [B, *latent_shape] for states x_t [B, *latent_shape] at times t [B],
        without guidance.

        `network` is passed in, since the learner calls its DeepSpeed engine where the rollout calls
        the bare module.
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Return images float32 [B, H, W, 3] in [0, 1] for standardised clean latents [B,
        *latent_shape]."""

    @abstractmethod
    def save_lora(self, folder: Path, tensors: dict[str, Tensor], alpha: float) -> None:
        """Write trained adapter tensors so that diffusers' `load_lora_weights(folder)` reads them,
        alpha included."""

    @abstractmethod
    def save_full(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write a whole pipeline folder whose network holds `tensors`, for diffusers'
        `from_pretrained`."""


def to_uint8(images: Tensor) -> np.ndarray:
    """Return uint8 [B, H, W, 3] on the CPU for images in [0, 1], rounded half to even as diffusers
    does for PIL."""
    return (images * 255).round().to(torch.uint8).cpu().numpy()


class PolicyVelocity:
    """The velocity that defines the policy: the network's, or with guidance the guided one.

    Rollout and learner both call this class, so that the ratio compares the same function on both
    sides.
    """

    def __init__(
        self,
        family: Family,
        network: nn.Module,
        guidance_scale: float,
        negative: Conditioning | None,
    ):
        """`negative` is the empty prompt's conditioning (one row), needed when guidance_scale is
        not 1."""
        if guidance_scale != 1.0 and negative is None:
            raise ValueError(
                f"guidance_scale = {guidance_scale} needs the empty prompt's conditioning"
            )
        self.family, self.network = family, network
        self.guidance_scale, self.negative = guidance_scale, negative
        self.num_network_calls = 0
        """Latents that went through the network so far; a guided velocity counts two."""

    def __call__(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Return float32 v [B, ...]; with guidance v_empty + scale (v_prompt - v_empty), in one
        batch of 2B."""
        if self.guidance_scale == 1.0:
            self.num_network_calls += len(x_t)
            return self.family.velocity(self.network, x_t, t, conditioning)
        assert self.negative is not None
        both = {
            name: torch.cat([self.negative[name].to(rows).expand_as(rows), rows])
            for name, rows in conditioning.items()
        }
        self.num_network_calls += 2 * len(x_t)
        v = self.family.velocity(self.network, torch.cat([x_t, x_t]), torch.cat([t, t]), both)
        v_empty, v_prompt = v.chunk(2)
        return v_empty + self.guidance_scale * (v_prompt - v_empty)
