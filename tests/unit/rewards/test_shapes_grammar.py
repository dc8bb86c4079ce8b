import json
from collections import Counter
from pathlib import Path

import pytest

from rewards.shapes.grammar import (
    CATEGORIES,
    OPPOSITE,
    VOCABULARY,
    all_records,
    eval_records,
    meaning,
    split,
    train_records,
    write_prompts,
)

SHIPPED = Path(__file__).parents[3] / "configs" / "prompts"


def test_number_of_distinct_prompts_per_category():
    counts = {category: len(all_records(category)) for category in CATEGORIES}
    assert counts == {
        "single_object": 4,
        "two_object": 12,
        "counting": 12,
        "colors": 20,
        "position": 48,
        "color_attr": 240,
    }
    for category in CATEGORIES:
        prompts = [record["prompt"] for record in all_records(category)]
        assert len(set(prompts)) == len(prompts)


def test_prompts_use_the_vocabulary_and_at_most_ten_words():
    words = [r["prompt"].split() for c in CATEGORIES for r in all_records(c)]
    assert max(len(prompt) for prompt in words) == 10
    assert {word for prompt in words for word in prompt} == set(VOCABULARY)


def test_counting_excludes_one_more():
    for record in all_records("counting"):
        (wanted,), (excluded,) = record["include"], record["exclude"]
        assert excluded == {"class": wanted["class"], "count": wanted["count"] + 1}


def test_position_points_at_the_first_entry_as_in_geneval():
    record = next(
        r for r in all_records("position") if r["prompt"] == "a photo of a circle above a cross"
    )
    assert record["include"] == [
        {"class": "cross", "count": 1},
        {"class": "circle", "count": 1, "position": ["above", 0]},
    ]


def test_meaning_joins_two_wordings_of_a_scene():
    by_prompt = {r["prompt"]: r for c in CATEGORIES for r in all_records(c)}
    for relation, opposite in OPPOSITE.items():
        a = by_prompt[f"a photo of a circle {relation} a square"]
        b = by_prompt[f"a photo of a square {opposite} a circle"]
        assert meaning(a) == meaning(b)
        assert meaning(a) != meaning(by_prompt[f"a photo of a square {relation} a circle"])
    a = by_prompt["a photo of a red circle and a green square"]
    b = by_prompt["a photo of a green square and a red circle"]
    assert meaning(a) == meaning(b)
    assert meaning(a) != meaning(by_prompt["a photo of a green circle and a red square"])


@pytest.mark.parametrize("category", ["position", "color_attr"])
def test_large_categories_share_no_meaning_between_the_files(category):
    train = {meaning(r) for r in train_records() if r["tag"] == category}
    held_out = {meaning(r) for r in eval_records() if r["tag"] == category}
    assert train
    assert held_out
    assert not train & held_out


def test_color_attr_evaluates_120_distinct_prompts():
    assert len(split("color_attr")[1]) == 120
    assert len(split("position")[1]) == 24


def test_eval_has_184_lines_per_category():
    assert Counter(r["tag"] for r in eval_records()) == dict.fromkeys(CATEGORIES, 184)


def test_written_files_are_the_shipped_ones(tmp_path):
    write_prompts(tmp_path)
    for name in ("shapes_train.jsonl", "shapes_eval.jsonl"):
        text = (tmp_path / name).read_text(encoding="ascii")
        assert text == (SHIPPED / name).read_text(encoding="ascii")
        for line in text.splitlines():
            assert {"prompt", "tag", "include"} <= json.loads(line).keys()


def test_unknown_category_is_named():
    with pytest.raises(ValueError, match="'texture'"):
        all_records("texture")
