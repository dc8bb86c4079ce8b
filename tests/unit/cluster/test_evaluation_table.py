"""The evaluation section of summary.json, and its tables."""

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console, RenderableType

from cluster.evaluation_table import (
    Columns,
    build_section,
    markdown_table,
    single_table,
    summarise,
    terminal_table,
)
from cluster.statistics import paired_interval
from tests import fakes_run
from tests.fakes_run import COLUMNS


def line(index: int, tag: str, graded: float, strict: float) -> dict[str, Any]:
    rewards = {"shapes": graded, "shapes_strict": strict}
    return {"index": index, "prompt": f"prompt {index}", "tag": tag, "rewards": rewards}


BEFORE = [line(0, "counting", 0.2, 0), line(1, "counting", 0.4, 0), line(2, "colors", 0.6, 1)]
AFTER = [line(0, "counting", 0.4, 0), line(1, "counting", 0.6, 1), line(2, "colors", 0.9, 1)]


def test_the_section_holds_means_of_each_score_and_category() -> None:
    section = build_section(BEFORE, AFTER, COLUMNS)
    assert (section["num_lines"], section["num_prompts"], section["level"]) == (3, 3, 0.95)
    assert section["before"]["graded"]["mean"] == pytest.approx(0.4)
    assert section["after"]["strict"]["mean"] == pytest.approx(2 / 3)
    difference = section["paired_difference"]["graded"]
    assert difference["mean"] == pytest.approx((0.2 + 0.2 + 0.3) / 3)
    assert difference["categories"]["counting"]["mean"] == pytest.approx(0.2)
    assert difference["categories"]["colors"] == pytest.approx(
        {"mean": 0.3, "low": 0.3, "high": 0.3}
    )
    for part in ("before", "after", "paired_difference"):
        for score in ("strict", "graded"):
            assert set(section[part][score]) == {"mean", "low", "high", "categories"}


def test_the_difference_is_paired_and_bootstrapped_by_prompt() -> None:
    before, after = fakes_run.lines(), fakes_run.lines(lift=0.05)
    difference = build_section(before, after, COLUMNS)["paired_difference"]["graded"]
    graded = [np.array([item["rewards"]["shapes"] for item in part]) for part in (before, after)]
    prompts = [item["prompt"] for item in before]
    expected = paired_interval(graded[0], graded[1], prompts)
    assert (difference["mean"], difference["low"], difference["high"]) == pytest.approx(
        (expected.mean, expected.low, expected.high)
    )
    assert 0 < difference["low"] < difference["mean"] < difference["high"]


def test_without_a_strict_column_there_is_only_the_graded_score() -> None:
    section = build_section(BEFORE, AFTER, Columns(graded="shapes"))
    assert list(section["before"]) == list(section["paired_difference"]) == ["graded"]
    assert "strict" not in markdown_table(section)


def test_lines_that_do_not_pair_are_named() -> None:
    with pytest.raises(ValueError, match="3 lines before and 2 after"):
        build_section(BEFORE, AFTER[:2], COLUMNS)
    moved = [AFTER[0], {**AFTER[1], "prompt": "another"}, AFTER[2]]
    with pytest.raises(ValueError, match="line 1 does not pair: prompt is 'prompt 1' before"):
        build_section(BEFORE, moved, COLUMNS)


def test_a_reward_that_is_missing_or_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match=r"line 0 has no reward 'ocr'; it has \['shapes'"):
        summarise(BEFORE, Columns(graded="ocr"))
    with pytest.raises(ValueError, match="nan on line 0"):
        summarise([line(0, "counting", float("nan"), 0)], COLUMNS)
    with pytest.raises(ValueError, match="non-empty"):
        summarise([], COLUMNS)


def test_the_markdown_table_shows_the_numbers() -> None:
    rows = markdown_table(build_section(BEFORE, AFTER, COLUMNS)).splitlines()
    assert rows[0].startswith("| category | strict before | strict after | strict difference |")
    assert rows[2].startswith("| overall | 0.333 [")
    assert rows[4].endswith("| +0.300 [+0.300, +0.300] |")
    single = markdown_table(summarise(BEFORE, COLUMNS)).splitlines()
    assert single[0] == "| category | strict | graded |"


def printed(table: RenderableType) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_terminal_tables_fit_80_columns() -> None:
    section = build_section(fakes_run.lines(), fakes_run.lines(lift=0.1), COLUMNS)
    both, single = printed(terminal_table(section)), printed(single_table(section["after"], "demo"))
    assert both.count("overall") == 2
    assert single.count("overall") == 1
    for text in (both, single):
        assert "single_object" in text
        assert "\u2026" not in text  # nothing was cut
        assert f"{section['after']['graded']['mean']:.3f} [" in text
