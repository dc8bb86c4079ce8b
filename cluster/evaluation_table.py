"""From the lines of an evaluation to the `evaluation` section of summary.json, and to tables.

A line is `{"index": int, "prompt": str, "tag": str, "rewards": {name: number, ...}}`: one prompt,
one noise, one image. Before and after hold the same lines in the same order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table

from cluster.run_folder import read_jsonl, write_jsonl
from cluster.statistics import Estimate, by_category, interval

__all__ = [
    "Columns",
    "build_section",
    "markdown_table",
    "paired_rows",
    "read_jsonl",
    "single_table",
    "summarise",
    "terminal_table",
    "write_jsonl",
]

PARTS = {"before": "before", "after": "after", "paired_difference": "difference"}
"""Keys of the section that hold numbers, with their column titles."""

SCORES = ("strict", "graded")
"""In the order in which a reader asks for them."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which reward of a line is the graded score, and which (if any; else "") the strict one."""

    graded: str
    strict: str = ""

    def items(self) -> Iterator[tuple[str, str]]:
        """(score, reward name), in the order of SCORES."""
        if self.strict:
            yield "strict", self.strict
        yield "graded", self.graded


def summarise(
    lines: Sequence[Line],
    columns: Columns,
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """One evaluation: `{score: {mean, low, high, categories: {tag: {mean, low, high}}}}`."""
    options = {"level": level, "num_resamples": num_resamples, "seed": seed}
    values = {score: _values(lines, reward) for score, reward in columns.items()}
    return {score: _estimates(numbers, lines, options) for score, numbers in values.items()}


def build_section(
    before: Sequence[Line],
    after: Sequence[Line],
    columns: Columns,
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """The whole section: before, after, and the difference paired by line."""
    options = {"level": level, "num_resamples": num_resamples, "seed": seed}
    pairs = paired_rows(before, after)
    differences = {}
    for score, reward in columns.items():
        old, new = _values(before, reward), _values(after, reward)
        numbers = [last - first for first, last in zip(old, new, strict=True)]
        differences[score] = _estimates(numbers, before, options)
    return {
        "num_lines": len(pairs),
        "num_prompts": len({line["prompt"] for line in before}),
        "level": level,
        "num_resamples": num_resamples,
        "before": summarise(before, columns, **options),
        "after": summarise(after, columns, **options),
        "paired_difference": differences,
    }


def paired_rows(before: Sequence[Line], after: Sequence[Line]) -> list[tuple[Line, Line]]:
    """Both evaluations line by line; a line that has no counterpart is named."""
    if len(before) != len(after):
        raise ValueError(f"{len(before)} lines before and {len(after)} after do not pair")
    for old, new in zip(before, after, strict=True):
        for key in ("index", "prompt", "tag"):
            if old[key] != new[key]:
                raise ValueError(
                    f"line {old['index']} does not pair: {key} is {old[key]!r} before "
                    f"and {new[key]!r} after; evaluate the same file in the same order"
                )
    return list(zip(before, after, strict=True))


def terminal_table(section: Mapping[str, Any], title: str = "Held-out prompts") -> Group:
    """The section for an 80-column terminal: a table for each score, a row for each category."""
    scores = _scores(section)
    return Group(*(_rich_table(section, [score], f"{title}: {score} score") for score in scores))


def single_table(evaluation: Mapping[str, Any], title: str) -> Table:
    """What `summarise` gives, for a terminal: a row for each category, a column for each score."""
    return _rich_table(evaluation, _scores(evaluation), title)


def markdown_table(section: Mapping[str, Any]) -> str:
    """The section as one Markdown table."""
    header, rows = _cells(section, _scores(section))
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _rich_table(section: Mapping[str, Any], scores: Sequence[str], title: str) -> Table:
    header, rows = _cells(section, scores)
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, collapse_padding=True
    )
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number == 0 else "")
    return table


def _parts(section: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Evaluations by column title; a section without parts is one evaluation, from `summarise`."""
    parts = {title: section[part] for part, title in PARTS.items() if part in section}
    return parts or {"": section}


def _scores(section: Mapping[str, Any]) -> list[str]:
    some_part = next(iter(_parts(section).values()))
    return [score for score in SCORES if score in some_part]


def _cells(section: Mapping[str, Any], scores: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: overall first, then every category."""
    parts = _parts(section)
    columns = [(score, title) for score in scores for title in parts]
    categories = next(iter(parts.values()))[scores[0]]["categories"]
    header = ["category", *(f"{score} {title}".strip() for score, title in columns)]
    rows = [["overall", *(_text(parts[title][score], title) for score, title in columns)]]
    for tag in categories:
        cells = (_text(parts[title][score]["categories"][tag], title) for score, title in columns)
        rows.append([tag, *cells])
    return header, rows


def _text(numbers: Mapping[str, float], title: str) -> str:
    sign = "+" if title == PARTS["paired_difference"] else ""
    low, high = (format(numbers[end], f"{sign}.3f") for end in ("low", "high"))
    return f"{numbers['mean']:{sign}.3f} [{low}, {high}]"


def _values(lines: Sequence[Line], reward: str) -> list[float]:
    values = []
    for line in lines:
        value = line["rewards"].get(reward)
        if value is None:
            raise ValueError(
                f"line {line['index']} has no reward {reward!r}; it has {sorted(line['rewards'])}"
            )
        values.append(float(value))
    return values


def _estimates(
    values: Sequence[float], lines: Sequence[Line], options: Mapping[str, Any]
) -> dict[str, Any]:
    prompts = [line["prompt"] for line in lines]
    tags = [line["tag"] for line in lines]
    categories: dict[str, Estimate] = by_category(values, tags, prompts, **options)
    return {
        **interval(values, prompts, **options).as_dict(),
        "categories": {tag: estimate.as_dict() for tag, estimate in categories.items()},
    }
