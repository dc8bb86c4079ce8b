"""The weighted total."""

from typing import Any

import numpy as np
import pytest

from rewards.composite import combine


def test_the_total_is_the_weighted_sum_and_the_parts_stay() -> None:
    parts = {"a": np.array([1.0, 2.0]), "b": np.array([10.0, -20.0])}
    before = {name: part.copy() for name, part in parts.items()}
    total = combine(parts, {"a": 0.5, "b": 0.25})
    np.testing.assert_array_equal(total, [3.0, -4.0])
    assert total.dtype == np.float64
    for name, part in parts.items():
        np.testing.assert_array_equal(part, before[name])


def test_the_total_is_a_new_array_even_of_one_part_with_weight_1() -> None:
    part = np.array([1.0, 2.0])
    total = combine({"a": part}, {"a": 1.0})
    total[:] = 0
    np.testing.assert_array_equal(part, [1.0, 2.0])


def test_columns_without_a_weight_are_left_out() -> None:
    total = combine({"a": np.array([1.0]), "a_strict": np.array([100.0])}, {"a": 2.0})
    np.testing.assert_array_equal(total, [2.0])


def test_weight_0_keeps_even_a_non_finite_part_out() -> None:
    parts = {"a": np.array([1.0, 2.0]), "b": np.array([np.nan, np.inf])}
    np.testing.assert_array_equal(combine(parts, {"a": 1.0, "b": 0.0}), [1.0, 2.0])


def test_nan_marks_of_unscored_states_stay_where_they_are() -> None:
    a = np.array([[0.0, np.nan, 1.0], [2.0, np.nan, 3.0]])
    total = combine({"a": a, "b": np.ones((2, 3))}, {"a": 2.0, "b": 1.0})
    np.testing.assert_array_equal(total, [[1.0, np.nan, 3.0], [5.0, np.nan, 7.0]])


def test_integer_and_float32_parts_are_summed_in_float64() -> None:
    parts: dict[str, Any] = {"a": np.array([1], np.float32), "b": np.array([3])}
    total = combine(parts, {"a": 0.1, "b": 0.1})
    assert total.dtype == np.float64
    np.testing.assert_array_equal(total, [0.1 * 1.0 + 0.1 * 3.0])


def test_a_weight_without_values_is_named() -> None:
    with pytest.raises(ValueError, match=r"reward 'b' has a weight but no values; found \['a'\]"):
        combine({"a": np.zeros(2)}, {"a": 1.0, "b": 1.0})


def test_parts_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward 'b' has shape \[3\], others have \[2\]"):
        combine({"a": np.zeros(2), "b": np.zeros(3)}, {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}])
def test_a_total_of_nothing_is_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no reward has a weight other than 0"):
        combine({"a": np.zeros(2)}, weights)
