"""Grids and strips: where pixels land, and that captions leave ink."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from cluster import pictures
from tests.fakes_run import images


def ink_below(picture: Image.Image, top: int) -> int:
    """Dark pixels of the rows under `top`."""
    return int((np.asarray(picture)[top:].max(axis=-1) < 120).sum())


def test_small_images_are_enlarged_pixel_by_pixel() -> None:
    shown = images(4)
    page = np.asarray(pictures.grid(shown, num_columns=2))
    step, margin = 128 + pictures.MARGIN, pictures.MARGIN
    assert page.shape[:2] == (2 * step + margin, 2 * step + margin)
    second_row = page[margin + step : margin + step + 128, margin + step : margin + step + 128]
    np.testing.assert_array_equal(second_row[2::4, 2::4], shown[3])
    np.testing.assert_array_equal(second_row[0::4, 0::4], second_row[3::4, 3::4])


def test_an_array_of_rows_and_columns_keeps_its_shape() -> None:
    page = pictures.grid(images(6).reshape(2, 3, 32, 32, 3))
    assert page.size == (3 * 136 + 8, 2 * 136 + 8)


def test_captions_take_as_many_lines_as_the_longest_needs() -> None:
    short = pictures.grid(images(2), ["a", "b"])
    long = pictures.grid(images(2), ["a", "a photo of a purple triangle left of a yellow square"])
    assert long.height == short.height + 2 * pictures.LINE_HEIGHT
    assert ink_below(long, 8 + 128) > ink_below(short, 8 + 128) > 0


def test_large_images_keep_their_size() -> None:
    assert pictures.grid(images(1, size=256)).size == (256 + 16, 256 + 16)


def test_before_and_after_stand_side_by_side() -> None:
    before, after = images(5), images(5, seed=1)
    page = pictures.before_after(before, after, ["a prompt"] * 5, [(0.1, 0.9)] * 5)
    assert page.width == 4 * (2 * 128 + 2 + 8) + 8
    pixels = np.asarray(page)
    np.testing.assert_array_equal(pixels[8:136, 8:136][::4, ::4], before[0])
    np.testing.assert_array_equal(pixels[8:136, 138:266][::4, ::4], after[0])
    without_scores = pictures.before_after(before, after, ["a prompt"] * 5)
    assert without_scores.height == page.height - 2 * pictures.LINE_HEIGHT


def test_a_strip_is_one_row_with_state_and_reward_below() -> None:
    strip = pictures.trajectory_strip(
        images(3), [0.1, None, 0.3], states=[0, 2, 4], prompt="a red circle"
    )
    assert strip.width == 3 * 136 + 8
    assert ink_below(strip, strip.height - 2 * pictures.LINE_HEIGHT - pictures.MARGIN) > 100


def test_words_wrap_at_spaces_and_are_never_lost() -> None:
    font = ImageFont.load_default(pictures.FONT_SIZE)
    lines = pictures.wrap("two red circles left of averyveryverylongwordindeed", 60, font)
    assert " ".join(lines) == "two red circles left of averyveryverylongwordindeed"
    assert all(font.getlength(line) <= 60 for line in lines if " " in line)


def test_evaluation_pictures_are_kept_at_their_own_size_and_as_a_grid(tmp_path: Path) -> None:
    shown = images(3)
    pictures.write_evaluation_pictures(tmp_path, "before", shown, [0, 7, 20], ["a", "b", "c"])
    with Image.open(tmp_path / "evaluation/before/0007.png") as kept:
        np.testing.assert_array_equal(np.asarray(kept), shown[1])
    with Image.open(tmp_path / "evaluation/before.png") as page:
        assert page.width == 3 * 136 + 8


def test_wrong_images_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"uint8 images \[n, H, W, 3\], got float64 \[2, 8, 8, 3\]"
    ):
        pictures.grid(np.zeros((2, 8, 8, 3)))
    with pytest.raises(ValueError, match="2 images and 1 captions"):
        pictures.grid(images(2), ["only one"])
    with pytest.raises(ValueError, match="do not pair"):
        pictures.before_after(images(2), images(3), ["a", "b"])
