"""Bootstrap intervals against closed forms and against simulated truth."""

import time

import numpy as np
import pytest

from cluster.statistics import Estimate, by_category, interval, paired_interval, unpaired_interval


def clustered_normal(
    rng: np.random.Generator, num_prompts: int, lines: int
) -> tuple[np.ndarray, list[str]]:
    """Lines of one prompt share an effect as large as their own noise; the true mean is 0.5."""
    shared = np.repeat(rng.normal(size=num_prompts), lines)
    prompts = [f"prompt {index}" for index in range(num_prompts) for _ in range(lines)]
    return 0.5 + shared + rng.normal(size=num_prompts * lines), prompts


@pytest.mark.parametrize("num_prompts", [8, 40])
def test_the_interval_holds_the_true_mean_about_19_times_in_20(num_prompts: int) -> None:
    rng = np.random.default_rng(7)
    trials, held = 400, 0
    for trial in range(trials):
        values, prompts = clustered_normal(rng, num_prompts, lines=4)
        estimate = interval(values, prompts, num_resamples=800, seed=trial)
        held += estimate.low <= 0.5 <= estimate.high
    assert 0.92 <= held / trials <= 0.98  # binomial std of 400 trials: 0.011


def test_the_width_is_that_of_the_closed_form() -> None:
    values, prompts = clustered_normal(np.random.default_rng(1), num_prompts=300, lines=2)
    prompt_means = values.reshape(300, 2).mean(axis=1)
    half_width = 1.968 * prompt_means.std(ddof=1) / np.sqrt(300)  # t of 299 degrees of freedom
    estimate = interval(values, prompts)
    assert estimate.mean == pytest.approx(values.mean())
    assert (estimate.high - estimate.low) / 2 == pytest.approx(half_width, rel=0.04)


def test_lines_of_one_prompt_are_resampled_together() -> None:
    values, prompts = clustered_normal(np.random.default_rng(2), num_prompts=50, lines=8)
    together = interval(values, prompts)
    apart = interval(values, [str(line) for line in range(len(values))])
    # Variance of the mean: (1 + 1/8) / 50 against 2 / 400, a factor of 4.5 or 2.1 in width.
    assert (together.high - together.low) / (apart.high - apart.low) == pytest.approx(2.12, rel=0.2)


def test_a_prompt_with_more_lines_weighs_more() -> None:
    assert interval([1.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b"]).mean == 0.75


def test_pairing_is_narrower_where_before_and_after_correlate() -> None:
    before, prompts = clustered_normal(np.random.default_rng(3), num_prompts=80, lines=2)
    after = before + 0.1 + 0.05 * np.random.default_rng(4).normal(size=len(before))
    paired = paired_interval(before, after, prompts)
    unpaired = unpaired_interval(before, prompts, after, prompts)
    assert paired.mean == pytest.approx(unpaired.mean)
    assert paired.low > 0 > unpaired.low
    assert (paired.high - paired.low) < 0.1 * (unpaired.high - unpaired.low)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3])
def test_constant_values_have_no_width(value: float) -> None:
    estimate = interval([value] * 30, [f"prompt {line % 7}" for line in range(30)])
    assert estimate == Estimate(mean=estimate.mean, low=estimate.mean, high=estimate.mean)
    assert estimate.mean == pytest.approx(value)


def test_one_prompt_draws_its_lines() -> None:
    estimate = interval([0.0, 1.0, 0.0, 1.0], ["same"] * 4)
    assert estimate.low < estimate.mean == 0.5 < estimate.high


def test_categories_keep_their_order_and_their_own_lines() -> None:
    estimates = by_category(
        [0.0, 1.0, 0.0, 1.0], ["two", "one", "two", "one"], ["a", "b", "c", "d"]
    )
    assert list(estimates) == ["two", "one"]
    assert estimates["one"] == Estimate(mean=1.0, low=1.0, high=1.0)
    assert estimates["two"].as_dict() == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_same_seed_same_interval() -> None:
    values, prompts = clustered_normal(np.random.default_rng(5), num_prompts=20, lines=1)
    assert interval(values, prompts, seed=3) == interval(values, prompts, seed=3)
    assert interval(values, prompts, seed=3) != interval(values, prompts, seed=4)


def test_six_hundred_lines_take_less_than_a_second() -> None:
    values, prompts = clustered_normal(np.random.default_rng(6), num_prompts=600, lines=1)
    start = time.process_time()
    interval(values, prompts)
    assert time.process_time() - start < 1.0


def test_str_is_short() -> None:
    assert str(Estimate(mean=0.5, low=0.25, high=0.75)) == "0.500 [0.250, 0.750]"


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="non-empty"):
        interval([], [])
    with pytest.raises(ValueError, match="2 values and 1 prompts"):
        interval([1.0, 2.0], ["a"])
    with pytest.raises(ValueError, match=r"nan on line 1 \(prompt 'b'\)"):
        interval([1.0, float("nan")], ["a", "b"])
    with pytest.raises(ValueError, match=r"before \(1,\) and after \(2,\)"):
        paired_interval([1.0], [1.0, 2.0], ["a", "b"])
    with pytest.raises(ValueError, match="level = 95"):
        interval([1.0, 2.0], ["a", "b"], level=95)
    with pytest.raises(ValueError, match="1 tags"):
        by_category([1.0, 2.0], ["t"], ["a", "b"])
