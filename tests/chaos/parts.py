"""A model and a reward of milliseconds that linger in each phase, so that a killer can meet a process inside it.

    [model]                                      [[rewards.components]]
    family = "tests.chaos.parts:LingeringFamily"     name = "tests.chaos.parts:LingeringReward"
    path = "linger:FOLDER"                           options = {marks = "FOLDER"}

FOLDER takes the marks; "linger:" and "" linger nowhere, and change no number. All hooks are here, not in the product:
the family's load runs in workers, ranks and driver, and wraps there what lies at the heart of sealing, publishing and
saving.
"""

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.config import ModelConfig
from rollout.families.base import Conditioning, Part
from tests.chaos.marks import linger
from tests.fake_family import GaussianFamily
from tests.fakes import BrightnessReward

PREFIX = "linger:"
LENGTH_S = {
    "sample": 0.2,
    "score": 0.15,
    "seal": 0.1,
    "train": 0.2,
    "publish": 0.15,
    "checkpoint": 0.15,
}


class LingeringFamily(GaussianFamily):
    """GaussianFamily with images of 3 x 32 x 32: a call's data is too large to travel inside Ray's messages, so it lies
    in the node's object store, and is lost with the node."""

    latent_shape = (3, 32, 32)
    marks: Path | None = None

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        device: torch.device,
        parts: tuple[Part, ...] = ("network", "text", "decoder"),
    ) -> "LingeringFamily":
        family = super().load(config, device, parts)
        assert isinstance(family, LingeringFamily)
        family.marks = folder_of(config.path)
        if family.marks is not None:
            hook(parts, family.marks)
        return family

    def velocity(
        self, network: nn.Module, x_t: Tensor, t: Tensor, conditioning: Conditioning
    ) -> Tensor:
        if torch.is_grad_enabled():
            linger(self.marks, "train", LENGTH_S["train"])
        elif float(t.max()) == 1.0:  # a call's first step
            linger(self.marks, "sample", LENGTH_S["sample"])
        return super().velocity(network, x_t, t, conditioning)


class LingeringReward(BrightnessReward):
    """BrightnessReward (sums of whole numbers, so exact in any batch) that lingers over all but its canaries."""

    def __init__(self, marks: str = "") -> None:
        super().__init__()
        self.marks = Path(marks) if marks else None
        self._canary_prompts = self.canaries().prompts

    def __call__(
        self, images: NDArray[np.uint8], prompts: list[str], metadata: list[dict[str, Any]]
    ) -> dict[str, NDArray[np.float64]]:
        if prompts != self._canary_prompts:
            linger(self.marks, "score", LENGTH_S["score"])
        return super().__call__(images, prompts, metadata)


def folder_of(path: str) -> Path | None:
    """Read `model.path`; ValueError for another prefix."""
    if not path.startswith(PREFIX):
        raise ValueError(f"model.path = {path!r} must begin with {PREFIX!r}")
    return Path(path.removeprefix(PREFIX)) if path != PREFIX else None


def hook(parts: tuple[Part, ...], marks: Path) -> None:
    """Have this process linger where the family alone would not be asked: worker, rank or driver, by what it loads."""
    if "text" in parts:
        before("rollout.worker", "load_tensors", marks, "publish")
    elif "network" in parts:
        before("learner.worker", "checksum", marks, "publish")
        after("learner.checkpoint", "save_file", marks, "checkpoint")
    else:
        before("cluster.controller", "seal", marks, "seal")


def before(module: str, name: str, marks: Path, phase: str) -> None:
    """Have a function of a module linger first, in this process."""
    _wrap(module, name, lambda call: (linger(marks, phase, LENGTH_S[phase]), call())[1])


def after(module: str, name: str, marks: Path, phase: str) -> None:
    """Have a function of a module linger once it is done, in this process."""
    _wrap(module, name, lambda call: (call(), linger(marks, phase, LENGTH_S[phase]))[0])


def _wrap(module: str, name: str, around: Callable[[Callable[[], Any]], Any]) -> None:
    place = importlib.import_module(module)
    function = getattr(place, name)
    if hasattr(function, "__wrapped__"):
        return  # it lingers already: the driver loads the family more than once

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(lambda: function(*args, **kwargs))

    setattr(place, name, wrapped)
