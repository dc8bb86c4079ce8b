import numpy as np
import pytest

from rewards.shapes.grammar import eval_records
from rewards.shapes.renderer import render
from rewards.shapes.reward import ShapesReward
from tests.fakes import judge_own_canaries


def test_columns_are_float64_and_strict_implies_graded():
    rng = np.random.default_rng(0)
    records = eval_records()[::10]
    images = np.stack([render(r, rng) for r in records])
    images[::3] = images[0]  # some are wrong for their prompt
    answer = ShapesReward()(images, [r["prompt"] for r in records], records)
    assert set(answer) == {"shapes", "shapes_strict"}
    assert all(v.dtype == np.float64 and v.shape == (len(records),) for v in answer.values())
    assert set(np.unique(answer["shapes_strict"])) == {0.0, 1.0}
    assert answer["shapes"][answer["shapes_strict"] == 1].min() >= 0.85


def test_read_only_images_are_accepted():
    record = eval_records()[0]
    image = render(record, np.random.default_rng(0))[None]
    image.flags.writeable = False
    assert ShapesReward()(image, [record["prompt"]], [record])["shapes"][0] >= 0.9


def test_a_record_without_include_is_named():
    image = np.zeros((1, 32, 32, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"without 'include'.*'tag': 'odd'"):
        ShapesReward()(image, ["a photo"], [{"tag": "odd"}])


def test_lengths_that_differ_are_refused():
    image = np.zeros((1, 32, 32, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="1 images, 2 prompts and 1 records"):
        ShapesReward()(image, ["a", "b"], [{"include": []}])


def test_canaries_pass_and_tell_good_from_bad():
    canaries = ShapesReward().canaries()
    assert judge_own_canaries(ShapesReward()).problems == []
    assert (canaries.low > 0.8).sum() == 6
    assert (canaries.high < 0.8).sum() == 8


def test_canaries_catch_swapped_color_channels():
    reward = ShapesReward()
    canaries = reward.canaries()
    swapped = np.ascontiguousarray(canaries.images[..., ::-1])
    score = reward(swapped, canaries.prompts, canaries.metadata)["shapes"]
    assert ((score < canaries.low) | (score > canaries.high)).any()
