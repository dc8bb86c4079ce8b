"""From a name in the config to a reward, and what a user reads when that fails."""

from typing import Any

import pytest

from rewards.base import Reward
from rewards.config import RewardConfig
from rewards.jpeg import JpegReward
from rewards.registry import REWARDS, make_reward
from tests.fakes import BrightnessReward, FaultyReward


class NeedsPath:
    name = "needs_path"

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any: ...


class TakesAnything:
    name = "takes_anything"

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any: ...


class Nameless:
    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any: ...


not_callable = 3


def make(name: str, **options: Any) -> Reward:
    return make_reward(RewardConfig.model_validate({"name": name, "options": options}))


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_registered_reward_is_constructed_and_carries_its_registry_name(name: str) -> None:
    assert make(name).name == name


def test_options_reach_the_constructor() -> None:
    reward = make("jpeg", quality=50)
    assert isinstance(reward, JpegReward)
    assert reward.quality == 50


def test_a_class_of_the_users_own_is_named_by_module_and_class() -> None:
    assert isinstance(make("tests.fakes:BrightnessReward"), BrightnessReward)
    faulty = make("tests.fakes:FaultyReward", mode="nan", marker="x")
    assert isinstance(faulty, FaultyReward)
    assert (faulty.mode, faulty.marker) == ("nan", "x")


def test_a_constructor_with_free_options_gets_them_all() -> None:
    reward = make(f"{__name__}:TakesAnything", a=1, b=2)
    assert isinstance(reward, TakesAnything)
    assert reward.options == {"a": 1, "b": 2}


@pytest.mark.parametrize("name", ["jpg", "", ":", "my.module:", ":Class", ".mine:Class"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"unknown reward .*; known: jpeg, shapes, or .*Class'"
    ) as e:
        make(name)
    assert repr(name) in str(e.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "no.such:Reward",
            {},
            "'no.such:Reward': importing 'no.such' failed: No module named 'no'",
        ),
        ("tests.fakes:Missing", {}, "module 'tests.fakes' has no class 'Missing'"),
        (f"{__name__}:not_callable", {}, "has no class 'not_callable'"),
        ("jpeg", {"qualty": 9}, "reward 'jpeg' has no option 'qualty'; it takes quality"),
        ("tests.fakes:BrightnessReward", {"a": 1}, "has no option 'a'; it takes none"),
        (f"{__name__}:NeedsPath", {}, "needs the option 'path'; it takes path"),
        (
            "jpeg",
            {"quality": 0},
            r"'jpeg' refused its options {'quality': 0}: quality = 0 must lie",
        ),
        ("jpeg", {"quality": "high"}, r"'jpeg' refused its options {'quality': 'high'}"),
        (
            f"{__name__}:Nameless",
            {},
            "made a Nameless, which is no Reward: it needs a non-empty str",
        ),
    ],
)
def test_a_users_mistake_is_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, **options)
