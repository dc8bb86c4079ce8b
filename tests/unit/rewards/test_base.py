"""Values or a typed failure: what a reward may return, and what becomes of everything else."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rewards.base import (
    Canaries,
    FailureKind,
    HasCanaries,
    Reward,
    RewardCall,
    RewardFailure,
    RewardValues,
    evaluate_checked,
)
from tests.fakes import BrightnessReward, FaultMode, FaultyReward, reward_call


class Returns:
    """Gives the same answer to every call."""

    name = "fixed"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
        return self.answer


def failure_of(answer: Any, num_images: int = 3) -> RewardFailure:
    result = evaluate_checked(Returns(answer), reward_call([0] * num_images))
    assert isinstance(result, RewardFailure)
    assert result.reward == "fixed"
    assert result.num_images == num_images
    return result


def test_the_fakes_are_rewards() -> None:
    assert isinstance(BrightnessReward(), Reward)
    assert isinstance(BrightnessReward(), HasCanaries)
    assert not isinstance(Returns(None), HasCanaries)


def test_values_come_back_per_image_in_float64_with_recorded_columns() -> None:
    result = evaluate_checked(BrightnessReward(), reward_call([0, 51, 255]))
    assert isinstance(result, RewardValues)
    assert list(result.columns) == ["brightness", "brightness_first"]
    assert result.columns["brightness"].dtype == np.float64
    np.testing.assert_array_equal(result.columns["brightness"], [0.0, 0.2, 1.0])
    np.testing.assert_array_equal(result.columns["brightness_first"], [0, 51, 255])


@pytest.mark.parametrize(
    "column",
    [
        [0.5, 1, 2],
        np.array([0.5, 1, 2], np.float32),
        np.array([0.5, 1, 2], np.float16),
        (0.5, True, 2),
    ],
)
def test_anything_real_valued_of_the_right_length_is_converted(column: Any) -> None:
    result = evaluate_checked(Returns({"fixed": column}), reward_call([0, 0, 0]))
    assert isinstance(result, RewardValues)
    assert result.columns["fixed"].dtype == np.float64
    np.testing.assert_array_equal(result.columns["fixed"], [0.5, 1, 2])


def test_bools_and_integers_become_numbers() -> None:
    answer = {"fixed": np.array([True, False]), "count": np.array([7, 8], np.int16)}
    result = evaluate_checked(Returns(answer), reward_call([0, 0]))
    assert isinstance(result, RewardValues)
    np.testing.assert_array_equal(result.columns["fixed"], [1.0, 0.0])
    np.testing.assert_array_equal(result.columns["count"], [7.0, 8.0])


def test_the_values_do_not_alias_an_array_that_the_reward_keeps() -> None:
    kept = np.array([1.0, 2.0])
    result = evaluate_checked(Returns({"fixed": kept}), reward_call([0, 0]))
    assert isinstance(result, RewardValues)
    kept[:] = 9
    np.testing.assert_array_equal(result.columns["fixed"], [1.0, 2.0])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "returned NoneType, not a dict"),
        ([1.0, 2.0, 3.0], "returned list, not a dict"),
        ({"other": [1.0, 2.0, 3.0]}, "own column 'fixed' is missing; it returned ['other']"),
        ({}, "own column 'fixed' is missing"),
        ({"fixed": ["1", "2", "3"]}, "column 'fixed' has dtype <U1"),
        ({"fixed": [None, 1.0, 2.0]}, "column 'fixed' has dtype object"),
        ({"fixed": [1j, 1.0, 2.0]}, "column 'fixed' has dtype complex128"),
        ({"fixed": [[1.0], [1.0, 2.0], 3.0]}, "column 'fixed' does not convert to an array"),
        ({"fixed": [1.0, 2.0, 3.0], 5: [1.0, 2.0, 3.0]}, "column name 5 is not a str"),
    ],
)
def test_what_is_not_a_dict_of_real_columns_is_wrong_type(answer: Any, message: str) -> None:
    failure = failure_of(answer)
    assert failure.kind is FailureKind.WRONG_TYPE
    assert message in failure.message


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"fixed": [1.0, 2.0]}, "column 'fixed' has shape [2] for 3 images; expected [3]"),
        ({"fixed": [1.0] * 4}, "column 'fixed' has shape [4] for 3 images"),
        ({"fixed": 1.0}, "column 'fixed' has shape [] for 3 images"),
        ({"fixed": [[1.0]] * 3}, "column 'fixed' has shape [3, 1] for 3 images"),
        ({"fixed": [1.0] * 3, "extra": [1.0]}, "column 'extra' has shape [1] for 3 images"),
    ],
)
def test_anything_but_one_number_per_image_is_wrong_count(answer: Any, message: str) -> None:
    failure = failure_of(answer)
    assert failure.kind is FailureKind.WRONG_COUNT
    assert message in failure.message


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", ["fixed", "recorded"])
def test_a_non_finite_value_in_any_column_fails_and_names_the_image(
    bad: float, column: str
) -> None:
    answer = {"fixed": [1.0, 1.0, 1.0], "recorded": [1.0, 1.0, 1.0]}
    answer[column] = [1.0, bad, bad]
    failure = failure_of(answer)
    assert failure.kind is FailureKind.NON_FINITE
    assert failure.message == (
        f"column '{column}' has 2 non-finite of 3 values; the first is {bad} for image 1 "
        "(group 0, sample 1, state 0, prompt 'a red circle')"
    )


def test_an_exception_becomes_a_failure_with_its_traceback() -> None:
    result = evaluate_checked(FaultyReward("raises"), reward_call([0, 0], prompt="bad"))
    assert isinstance(result, RewardFailure)
    assert result.kind is FailureKind.EXCEPTION
    assert result.num_images == 2
    assert "ZeroDivisionError: the reward model is broken" in result.message
    assert "fakes.py" in result.message
    assert str(result).startswith("reward 'brightness' failed on 2 images (exception): Traceback")


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("nan", FailureKind.NON_FINITE),
        ("wrong_count", FailureKind.WRONG_COUNT),
        ("raises", FailureKind.EXCEPTION),
        ("exits", FailureKind.EXCEPTION),
        ("cancels", FailureKind.EXCEPTION),
        ("wrong_type", FailureKind.WRONG_TYPE),
        ("no_own_column", FailureKind.WRONG_TYPE),
    ],
)
def test_every_fault_is_typed_and_only_for_the_marked_images(
    mode: FaultMode, kind: FailureKind
) -> None:
    reward = FaultyReward(mode)
    good = evaluate_checked(reward, reward_call([255]))
    bad = evaluate_checked(reward, reward_call([255], prompt="bad"))
    assert isinstance(good, RewardValues)
    assert isinstance(bad, RewardFailure)
    assert bad.kind is kind


def test_a_reward_that_writes_into_its_images_fails_and_they_stay_as_they_were() -> None:
    class Scribbles(BrightnessReward):
        def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
            images[:] = 0
            return super().__call__(images, prompts, metadata)

    call = reward_call([7])
    result = evaluate_checked(Scribbles(), call)
    assert isinstance(result, RewardFailure)
    assert result.kind is FailureKind.EXCEPTION
    assert "read-only" in result.message
    assert call.images.flags.writeable
    np.testing.assert_array_equal(call.images, 7)


def test_a_reward_that_changes_metadata_changes_its_own_copy() -> None:
    """A group's images share one dict, and a retry gets the same call."""

    class Pops(BrightnessReward):
        def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
            assert [entry.pop("tag") for entry in metadata] == ["colors"] * len(images)
            return super().__call__(images, prompts, metadata)

    call = replace(reward_call([1, 2, 3]), metadata=[{"tag": "colors"}] * 3)
    for _ in range(2):
        assert isinstance(evaluate_checked(Pops(), call), RewardValues)
    assert call.metadata == [{"tag": "colors"}] * 3


def test_an_interrupt_from_the_keyboard_is_no_failure_of_the_reward() -> None:
    class Interrupted(BrightnessReward):
        def __call__(self, images: Any, prompts: Any, metadata: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_checked(Interrupted(), reward_call([1]))


def test_parts_of_a_call_join_to_the_call() -> None:
    call = reward_call([1, 2, 3, 4, 5], group_id=9)
    again = RewardCall.join([call.part(0, 2), call.part(2, 3), call.part(3, 99)])
    assert again.num_images == 5
    for field in ("images", "group_ids", "samples", "states"):
        expected, found = getattr(call, field), getattr(again, field)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    assert again.prompts == call.prompts
    assert again.metadata == call.metadata
    assert RewardCall.join([call]) is call


def test_parts_of_values_join_to_the_values() -> None:
    values = RewardValues(columns={"a": np.arange(5.0), "b": -np.arange(5.0)})
    again = RewardValues.join([values.part(0, 1), values.part(1, 5)])
    assert list(again.columns) == ["a", "b"]
    np.testing.assert_array_equal(again.columns["a"], values.columns["a"])
    np.testing.assert_array_equal(again.columns["b"], values.columns["b"])


def test_a_part_of_values_does_not_keep_or_share_the_batchs_memory() -> None:
    values = RewardValues(columns={"a": np.arange(5.0)})
    assert values.part(1, 3).columns["a"].base is None
    assert not np.shares_memory(values.part(1, 3).columns["a"], values.columns["a"])


def test_values_whose_columns_differ_do_not_join() -> None:
    one = RewardValues(columns={"a": np.zeros(1)})
    two = RewardValues(columns={"a": np.zeros(1), "b": np.zeros(1)})
    with pytest.raises(
        ValueError, match=r"columns differ between batches: \['a'\] and \['a', 'b'\]"
    ):
        RewardValues.join([one, two])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": np.zeros((2, 4, 4, 3), np.float32)}, "images are float32, not uint8"),
        ({"images": np.zeros((2, 4, 4), np.uint8)}, r"images are \[2, 4, 4\]"),
        ({"images": np.zeros((2, 3, 4, 4), np.uint8)}, r"images are \[2, 3, 4, 4\]"),
        ({"images": np.zeros((0, 4, 4, 3), np.uint8)}, "a call without images"),
        ({"prompts": ["one"]}, "1 prompts for 2 images"),
        ({"metadata": []}, "0 metadata for 2 images"),
        ({"states": np.zeros(3, np.int32)}, "3 states for 2 images"),
    ],
)
def test_a_call_whose_fields_do_not_fit_cannot_be_made(
    change: dict[str, Any], message: str
) -> None:
    call = reward_call([1, 2])
    fields = {name: getattr(call, name) for name in RewardCall.__dataclass_fields__}
    with pytest.raises(AssertionError, match=message):
        RewardCall(**(fields | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": ["one"]}, "canaries have 2 images but 1 prompts"),
        ({"high": np.array([1.0])}, "canaries have 2 images but 1 high"),
        ({"low": np.array([0.0, 2.0])}, "canaries need low <= high"),
        ({"low": np.array([0.0, np.nan])}, "canaries need low <= high"),
    ],
)
def test_canaries_that_do_not_fit_together_are_refused(
    change: dict[str, Any], message: str
) -> None:
    canaries = BrightnessReward().canaries()
    fields = {name: getattr(canaries, name) for name in Canaries.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        Canaries(**(fields | change))


def test_canaries_without_an_image_are_refused() -> None:
    nothing = np.zeros(0)
    with pytest.raises(ValueError, match="canaries hold no image"):
        Canaries(
            images=np.zeros((0, 4, 4, 3), np.uint8),
            prompts=[],
            metadata=[],
            low=nothing,
            high=nothing,
        )
