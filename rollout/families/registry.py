"""From a family's name to the family, imported only when it is asked for."""

from typing import cast

import torch

from rollout.config import ModelConfig
from rollout.families.base import Family, Part
from rollout.registry import load_object

FAMILIES = {"sd3": "rollout.families.sd3:SD3Family"}
"""Registry name -> "module:Class"; a plug-in is named by its own "my.module:Class"."""


def family_class(name: str) -> type[Family]:
    """Return the class that `name` stands for; ValueError lists the known names or says what the
    class lacks."""
    if ":" not in name and name not in FAMILIES:
        raise ValueError(
            f"unknown model family {name!r}: choose from {sorted(FAMILIES)} or 'my.module:Class'"
        )
    found = load_object(FAMILIES.get(name, name))
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise ValueError(f"model family {name!r} is no subclass of rollout.families.base.Family")
    return cast(type[Family], found)


def load_family(
    config: ModelConfig,
    device: torch.device,
    parts: tuple[Part, ...] = ("network", "text", "decoder"),
) -> Family:
    """Load the named parts of the configured model on `device`, frozen and in eval mode.

    Raises ValueError when the family is unknown, the folder is missing or holds no such model.
    """
    return family_class(config.family).load(config, device, parts)
