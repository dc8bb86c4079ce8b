"""A model family and a reward that sleep for as long as a GPU would work, and compute next to nothing.

    [model]
    family = "benchmarks.sleeping:SleepingFamily"
    path = "sleep:call_s=0.1,learn_call_s=0.05,latent=8,numel=1000000"

    [[rewards.components]]
    name = "benchmarks.sleeping:SleepingReward"    # column "sleeping"
    options = {call_s = 0.2}

So many actors share few cores, while all that the system does around the network is real: latents, trainable
tensors, gradients, checksums. Whoever sleeps keeps no core busy, as a process that waits for its GPU.
"""

import math
import time
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from rollout.config import ModelConfig
from rollout.families.base import Conditioning, Family, Part
from rollout.flow.schedule import shifted_times

PREFIX = "sleep:"
EMBEDDING_SIZE = 16
BULK_CHUNK = 2**22
"""Entries of one bulk tensor (16 MiB), about those of a large model's matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepSettings:
    """What `model.path` says after "sleep:", as key=value with commas in between; "sleep:" alone takes all defaults."""

    call_s: float = 0.0
    """Seconds of one network call without gradients, whatever its batch: a slice's call on a rollout worker makes T of
    them, and T' - 1 more for each estimate batch. The learner's reference pass sleeps as long."""
    learn_call_s: float = 0.0
    """Seconds of one with gradients: the learner's micro-batch, its backward included."""
    latent: int = 4
    """Side of a latent [3, latent, latent], and of the image in pixels."""
    numel: int = 0
    """Weights, 4 bytes each, beside the few that compute; learner.adapter = "full" trains and publishes them."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name == "latent")
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{field.name} = {value} must be finite and at least {least}")


def parse_path(path: str) -> SleepSettings:
    """Read `model.path`; ValueError for another prefix, an unknown or repeated key, or no number."""
    types = {field.name: type(field.default) for field in fields(SleepSettings)}
    found: dict[str, Any] = {}
    if not path.startswith(PREFIX):
        raise ValueError(f"model.path = {path!r} must begin with {PREFIX!r}, as sleep:call_s=0.1")
    for entry in filter(None, path.removeprefix(PREFIX).split(",")):
        key, _, text = entry.partition("=")
        if key not in types:
            raise ValueError(
                f"model.path = {path!r}: unknown key {key!r}; known: {', '.join(types)}"
            )
        if key in found:
            raise ValueError(f"model.path = {path!r} says {key} twice")
        try:
            found[key] = types[key](text)
        except ValueError:
            kind = "a whole number" if types[key] is int else "a number"
            raise ValueError(f"model.path = {path!r}: {key} = {text!r} is not {kind}") from None
    try:
        return SleepSettings(**found)
    except ValueError as error:
        raise ValueError(f"model.path = {path!r}: {error}") from None


class SleepingNetwork(nn.Module):
    """A velocity that pulls each latent to a centre of its prompt's own; no data's law stands behind it."""

    def __init__(self, settings: SleepSettings) -> None:
        super().__init__()
        self.settings = settings
        draw = torch.Generator().manual_seed(0)
        self.centre = nn.Linear(EMBEDDING_SIZE, 3 * settings.latent**2)
        for parameter in self.centre.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw) / EMBEDDING_SIZE**0.5
        self.bulk_names: list[str] = []
        pattern = torch.randn(min(BULK_CHUNK, settings.numel), generator=draw) / 1000
        for first in range(0, settings.numel, BULK_CHUNK):
            # Of the network itself, not of a list inside it: ZeRO-3 gathers what a module's own forward reads.
            name = f"bulk_{len(self.bulk_names):04d}"
            chunk = pattern[: settings.numel - first].clone()
            self.register_parameter(name, nn.Parameter(chunk))
            self.bulk_names.append(name)

    def forward(self, x_t: Tensor, t: Tensor, embedding: Tensor) -> Tensor:
        """v [B, 3, S, S] for x_t [B, 3, S, S], t [B], embedding [B, EMBEDDING_SIZE], after the nap."""
        settings = self.settings
        time.sleep(settings.learn_call_s if torch.is_grad_enabled() else settings.call_s)
        v = (x_t - self.centre(embedding).reshape(x_t.shape)) * (0.5 + t).reshape(-1, 1, 1, 1)
        for name in self.bulk_names:  # so that each has a gradient
            v = v + getattr(self, name)[0]
        return v


class SleepingFamily(Family):
    """Contract: `rollout.families.base.Family`. Prompts are hashed, an image is a squashed latent."""

    lora_targets = ("centre",)

    def __init__(
        self, settings: SleepSettings, device: torch.device, parts: tuple[Part, ...]
    ) -> None:
        where = device if "network" in parts else torch.device("meta")
        self.network = SleepingNetwork(settings).requires_grad_(False).to(where).eval()
        self.latent_shape = (3, settings.latent, settings.latent)
        self._device, self._parts = device, parts

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        device: torch.device,
        parts: tuple[Part, ...] = ("network", "text", "decoder"),
    ) -> "SleepingFamily":
        """Make the named parts from what config.path says; ValueError for its mistakes, and for half precision."""
        if config.dtype != "float32":
            raise ValueError(f"model.dtype = {config.dtype!r}: the sleeping model has only float32")
        return cls(parse_path(config.path), device, parts)

    def times(self, num_steps: int) -> Tensor:
        return shifted_times(num_steps, 1.0)

    def encode_prompts(self, prompts: list[str]) -> Conditioning:
        """float32 [len(prompts), EMBEDDING_SIZE] in [-1, 1]; ValueError when loaded without its text part."""
        self._needs("text")
        digests = [sha256(prompt.encode()).digest()[:EMBEDDING_SIZE] for prompt in prompts]
        numbers = np.array([list(digest) for digest in digests], np.float32) / 127.5 - 1
        return {"embedding": torch.from_numpy(numbers).to(self._device)}

    def velocity(
        self, network: nn.Module, x_t: Tensor, t: Tensor, conditioning: Conditioning
    ) -> Tensor:
        return network(x_t, t.to(x_t.dtype), conditioning["embedding"])

    def decode(self, latents: Tensor) -> Tensor:
        """Images; ValueError when loaded without its decoder."""
        self._needs("decoder")
        return latents.sigmoid().movedim(1, -1)

    def save_lora(self, folder: Path, tensors: dict[str, Tensor], alpha: float) -> None:
        _save(folder, tensors, {"alpha": f"{alpha:g}"})

    def save_full(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        _save(folder, tensors, {})

    def _needs(self, part: Part) -> None:
        if part not in self._parts:
            raise ValueError(f"the sleeping model was loaded without its {part} part")


def _save(folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """The format is the family's own: no library reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "sleeping.safetensors", metadata)


class SleepingReward:
    """Mean brightness in [0, 1], after a nap of call_s seconds for a call, whatever its batch."""

    name = "sleeping"

    def __init__(self, call_s: float = 0.0) -> None:
        """Raises ValueError for a time that can't be slept."""
        if not (math.isfinite(call_s) and call_s >= 0):
            raise ValueError(f"call_s = {call_s} must be finite and at least 0")
        self.call_s = call_s

    def __call__(
        self, images: NDArray[np.uint8], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> dict[str, NDArray[np.float64]]:
        time.sleep(self.call_s)
        sums = images.sum(axis=(1, 2, 3), dtype=np.int64)
        return {self.name: sums / (255.0 * images[0].size)}
