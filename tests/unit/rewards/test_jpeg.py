"""JPEG compressibility: minus the file's size."""

import io

import numpy as np
import pytest
from PIL import Image

from rewards.base import RewardValues, evaluate_checked
from rewards.jpeg import JpegReward
from tests.fakes import judge_own_canaries, reward_call


def noise(num: int, size: int = 32) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (num, size, size, 3), dtype=np.uint8)


def values(images: np.ndarray, quality: int = 95) -> np.ndarray:
    num = len(images)
    return JpegReward(quality)(images, [""] * num, [{}] * num)["jpeg"]


def test_the_value_is_minus_the_kilobytes_of_pillows_file() -> None:
    images = noise(3)
    expected: list[float] = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=95)
        expected.append(-len(file.getvalue()) / 1000)
    np.testing.assert_array_equal(values(images), expected)


def test_less_detail_and_lower_quality_score_higher() -> None:
    sharp = noise(1)
    soft = np.repeat(np.repeat(sharp[:, ::8, ::8], 8, axis=1), 8, axis=2)
    flat = np.full_like(sharp, 90)
    (a,), (b,), (c,) = values(sharp), values(soft), values(flat)
    assert a < b < c < 0
    assert values(sharp, quality=20)[0] > a


def test_an_images_value_does_not_depend_on_its_batch() -> None:
    images = noise(5)
    alone = np.concatenate([values(images[i : i + 1]) for i in range(5)])
    np.testing.assert_array_equal(values(images), alone)


def test_a_checked_call_gives_one_column() -> None:
    result = evaluate_checked(JpegReward(), reward_call([0, 128, 255]))
    assert isinstance(result, RewardValues)
    assert list(result.columns) == ["jpeg"]
    assert result.columns["jpeg"].shape == (3,)


@pytest.mark.parametrize("quality", [1, 5, 50, 95, 100])
def test_its_canaries_pass_at_every_quality(quality: int) -> None:
    result = judge_own_canaries(JpegReward(quality))
    assert result.num_canaries == 2
    assert result.problems == []


@pytest.mark.parametrize("quality", [0, 101, -5])
def test_a_quality_outside_1_to_100_is_refused(quality: int) -> None:
    with pytest.raises(ValueError, match=rf"quality = {quality} must lie in 1 \.\. 100"):
        JpegReward(quality)
