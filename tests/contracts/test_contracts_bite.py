"""Each suite is shown plug-ins that break one promise, so that no test can pass by never looking."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learner.config import ObjectiveConfig
from learner.credit import Gain, Outcome, ScoredStates
from learner.credit.normaliser import joint
from learner.objective import ObjectiveOutput, PpoClip
from rollout.config import ModelConfig
from rollout.families.base import Conditioning
from rollout.families.registry import load_family
from rollout.flow.kernels import Coefficients, KernelSettings, Ode
from tests.contracts import uncovered
from tests.contracts.credit_rule import CreditRuleContract
from tests.contracts.family import FamilyContract
from tests.contracts.kernel import KernelContract
from tests.contracts.normaliser import NormaliserContract
from tests.contracts.objective import ObjectiveContract
from tests.contracts.reward import RewardContract
from tests.contracts.test_rewards import TestJpeg as JpegSuite
from tests.fake_family import GaussianFamily


def path_of(plug_in: type) -> str:
    return f"{__name__}:{plug_in.__qualname__}"


def check(suite: Any, promise: str, *arguments: Any) -> None:
    """The suite's one test whose name holds `promise` fails."""
    (name,) = (name for name in dir(suite) if name.startswith("test_") and promise in name)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(suite, name)(*arguments)


class Brightness:
    """A good reward, to be broken."""

    name = "mine"

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> dict[str, Any]:
        return {self.name: self.values(images.astype(np.float64).mean(axis=(1, 2, 3)))}

    def values(self, brightness: Any) -> Any:
        return brightness


class BatchCentred(Brightness):
    def values(self, brightness: Any) -> Any:
        return brightness - brightness.mean()


class ByPosition(Brightness):
    def values(self, brightness: Any) -> Any:
        return brightness + np.arange(len(brightness))


class Single(Brightness):
    def values(self, brightness: Any) -> Any:
        return brightness.astype(np.float32)


class Constant(Brightness):
    def values(self, brightness: Any) -> Any:
        return brightness * 0


class NotBlank(Brightness):
    def values(self, brightness: Any) -> Any:
        assert brightness.all(), "a black image"
        return brightness


class Counting(Brightness):
    calls = 0

    def values(self, brightness: Any) -> Any:
        self.calls += 1
        return brightness + self.calls


class Painting(Brightness):
    def __call__(self, images: Any, prompts: Any, metadata: Any) -> dict[str, Any]:
        images.flags.writeable = True
        images[:, 0, 0] = 0
        return super().__call__(images, prompts, metadata)


class OneSize(Brightness):
    def __call__(self, images: Any, prompts: Any, metadata: Any) -> dict[str, Any]:
        if images.shape[1:] != (32, 32, 3):
            raise IndexError
        return super().__call__(images, prompts, metadata)


@pytest.mark.parametrize(
    ("plug_in", "promise"),
    [
        (BatchCentred, "does_not_depend_on_the_others"),
        (ByPosition, "permuted"),
        (Single, "finite_float64"),
        (Constant, "finite_float64"),
        (NotBlank, "blank"),
        (Counting, "same_call"),
        (Painting, "not_modified"),
    ],
)
def test_a_broken_reward_is_seen(plug_in: type, promise: str) -> None:
    class Suite(RewardContract):
        name = path_of(plug_in)
        batch = JpegSuite.batch

    check(Suite(), promise)


def test_a_reward_that_fails_on_another_size_is_seen() -> None:
    class Suite(RewardContract):
        name = path_of(OneSize)
        batch = JpegSuite.batch

    with pytest.raises(IndexError):
        Suite().test_other_sizes_are_scored_or_refused_with_a_value_error((8, 8))


class Rising(KernelSettings):
    """k > t': the mean rises with the velocity."""

    def _choose(self, t: float, t_next: float) -> Coefficients:
        return Coefficients(noise=t_next + self.eta, std=self.eta)


class Overshooting(KernelSettings):
    def _choose(self, t: float, t_next: float) -> Coefficients:
        return Coefficients(noise=t_next - self.eta, std=self.eta)


class SinglePrecision(KernelSettings):
    def _choose(self, t: float, t_next: float) -> Coefficients:
        return Coefficients(noise=float(np.float32(t_next)), std=self.eta)


class Remembering(KernelSettings):
    seen: list[float] = []  # noqa: RUF012

    def _choose(self, t: float, t_next: float) -> Coefficients:
        self.seen.append(t)
        return Coefficients(noise=t_next, std=self.eta * len(self.seen))


@pytest.mark.parametrize(
    ("plug_in", "promise"),
    [
        (Rising, "falls_with_it"),
        (Overshooting, "right_sign"),
        (SinglePrecision, "euler_step"),
        (Remembering, "asked_before"),
        (Ode, "zero_only_where_stated"),
    ],
)
def test_a_broken_kernel_is_seen(plug_in: type, promise: str) -> None:
    class Suite(KernelContract):
        name = path_of(plug_in) if plug_in is not Ode else "ode"

    check(Suite(), promise)


class Running(Outcome):
    """Sums over the members so far."""

    def __call__(self, reward_values: Tensor) -> Tensor:
        return reward_values[..., :-1].cumsum(dim=1)


class Relative(Gain):
    """Asks for the image only, and divides by what went before."""

    @property
    def scored_states(self) -> ScoredStates:
        return "final"

    def __call__(self, reward_values: Tensor) -> Tensor:
        return reward_values.diff(dim=-1) / reward_values[..., :-1]


class Filling(Gain):
    """Takes a state that was not scored for one without reward."""

    def __call__(self, reward_values: Tensor) -> Tensor:
        return super().__call__(reward_values.nan_to_num(0.0))


class Patching(Outcome):
    """Gives some trajectories no credit where the first state was not scored."""

    def __call__(self, reward_values: Tensor) -> Tensor:
        credit = super().__call__(reward_values)
        credit[0] += 0 * reward_values[0, :, :1]
        return credit


@pytest.mark.parametrize(
    ("plug_in", "promise", "arguments"),
    [
        (Running, "permuted", ()),
        (Running, "equal_rewards", ()),
        (Relative, "constant_added", ("joint",)),
        (Relative, "are_enough", ()),
        (Patching, "credit_for_all", ()),
        (Filling, "needed_state_that_is_not_scored", ()),
        (Filling, "some_trajectories_only", ()),
    ],
)
def test_a_broken_credit_rule_is_seen(plug_in: type, promise: str, arguments: tuple) -> None:
    class Suite(CreditRuleContract):
        name = path_of(plug_in)

    check(Suite(), promise, *arguments)


def unmasked(raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the zeros of untrained transitions."""
    return joint(raw, torch.ones_like(trained))


def over_the_batch(raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = raw[trained].mean(), raw[trained].std(correction=0)
    return mean, std


def first_member(raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    return raw[:, :1], joint(raw, trained)[1]


@pytest.mark.parametrize(
    ("scope", "promise"),
    [
        (unmasked, "shift_and_scale"),
        (over_the_batch, "another_group"),
        (first_member, "permuted"),
        (first_member, "signal"),
    ],
)
def test_a_broken_scope_is_seen(scope: Any, promise: str) -> None:
    class Suite(NormaliserContract):
        name = f"{__name__}:{scope.__name__}"

    check(Suite(), promise)


@dataclass(frozen=True)
class Reduced(PpoClip):
    """Divides by the batch's size, which is the caller's task."""

    def __call__(self, *arguments: Tensor) -> ObjectiveOutput:
        output = super().__call__(*arguments)
        return replace(output, loss=output.loss / len(output.loss))


class Silent:
    """Turns what isn't finite into zeros, and clips nothing."""

    @classmethod
    def from_config(cls, config: ObjectiveConfig) -> "Silent":
        return cls()

    def __call__(self, log_prob: Tensor, old: Tensor, advantage: Tensor) -> ObjectiveOutput:
        ratio = (log_prob - old).exp()
        loss = (-advantage * ratio).nan_to_num(0.0, 0.0, 0.0)
        return ObjectiveOutput(loss, ratio, torch.ones_like(ratio, dtype=torch.bool))


@pytest.mark.parametrize(
    ("plug_in", "promise", "arguments"),
    [
        (Reduced, "at_ratio_one", ()),
        (Reduced, "does_not_depend_on_the_others", ()),
        (Silent, "not_finite", (2, float("nan"))),
        (Silent, "finite_inputs", (1e3,)),
        (Silent, "only_the_loss_has_a_gradient", ()),
        (Silent, "zero_advantage", ()),
    ],
)
def test_a_broken_objective_is_seen(plug_in: type, promise: str, arguments: tuple) -> None:
    class Suite(ObjectiveContract):
        name = path_of(plug_in)

    check(Suite(), promise, *arguments)


class BrokenFamily(GaussianFamily):
    """Uses its own network whatever it is given, lets rows see each other, clamps nothing."""

    def velocity(
        self, network: nn.Module, x_t: Tensor, t: Tensor, conditioning: Conditioning
    ) -> Tensor:
        v = super().velocity(self.network, x_t, t, conditioning)
        return (v + v.mean(dim=0)).double()

    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents) + latents.permute(0, 2, 3, 1)

    def encode_prompts(self, prompts: list[str]) -> Conditioning:
        longest = max(len(prompt) for prompt in prompts)
        return {n: rows + longest for n, rows in super().encode_prompts(prompts).items()}


@pytest.mark.parametrize(
    ("promise", "takes_config"),
    [
        ("velocity_is_float32", False),
        ("velocity_of_a_row", False),
        ("network_passed_in", True),
        ("decoded", False),
        ("encoded", False),
        ("ode_rollout", False),
    ],
)
def test_a_broken_family_is_seen(promise: str, takes_config: bool) -> None:
    config = ModelConfig(family=path_of(BrokenFamily), path="")

    class Suite(FamilyContract):
        name = config.family

        @classmethod
        def model_config(cls, folder: Path) -> ModelConfig:
            return config

    family = load_family(config, torch.device("cpu"))
    check(Suite(), promise, family, *[config] * takes_config)


def test_an_item_without_a_suite_is_seen() -> None:
    class Contract:
        """A kind of plug-in."""

    class TestOne(Contract):
        name = "one"

    class NotCollected(TestOne):
        name = "two"

    assert uncovered(Contract, {"one": 1, "two": 2}) == {"two"}
