"""Reward names, and how a name in the config becomes a reward, imported when asked for."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from rewards.base import Reward
from rewards.config import RewardConfig

REWARDS: dict[str, str] = {
    "shapes": "rewards.shapes.reward:ShapesReward",
    "jpeg": "rewards.jpeg:JpegReward",
}
"""Registry name -> "module:Class". The class's `name` is the registry name."""


def make_reward(config: RewardConfig) -> Reward:
    """Construct the reward that a config names, with its options.

    Raises ValueError naming the unknown name and the known ones, the module or class that cannot be
    found, or the option that the constructor refused.
    """
    constructor = _find(config.name)
    _check_options(config.name, constructor, config.options)
    try:
        reward = constructor(**config.options)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"reward {config.name!r} refused its options {config.options}: {error}"
        ) from error
    name = getattr(reward, "name", None)
    if not isinstance(reward, Reward) or not isinstance(name, str) or not name:
        raise ValueError(
            f"reward {config.name!r} made a {type(reward).__name__}, which is no Reward: it needs "
            "a non-empty str `name` and __call__(images, prompts, metadata) (see rewards/base.py)"
        )
    assert config.name not in REWARDS or reward.name == config.name, (config.name, reward.name)
    return reward


def _find(name: str) -> Callable[..., object]:
    """The constructor behind a registry name or "my.module:Class"; raises ValueError."""
    target = REWARDS.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute or module_name.startswith("."):
        raise ValueError(
            f"unknown reward {name!r}; known: {', '.join(sorted(REWARDS))}, "
            "or name a class as 'my.module:Class'"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"reward {name!r}: importing {module_name!r} failed: {error}; it must be importable "
            "from where the run starts, with everything that it imports"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ValueError(f"reward {name!r}: module {module_name!r} has no class {attribute!r}")
    return found


def _check_options(name: str, constructor: Callable[..., object], options: dict[str, Any]) -> None:
    """Raise ValueError for an option that the constructor does not take, or one that it needs."""
    parameters = inspect.signature(constructor).parameters.values()
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in by_name]
    takes = f"it takes {', '.join(known)}" if known else "it takes none"
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in known:
                raise ValueError(f"reward {name!r} has no option {option!r}; {takes}")
    for parameter in by_name:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ValueError(f"reward {name!r} needs the option {parameter.name!r}; {takes}")
