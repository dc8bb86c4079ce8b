"""Prompts of the shapes world, in GenEval's six categories and with GenEval's metadata fields.

`python -m rewards.shapes.grammar` writes configs/prompts/shapes_{train,eval}.jsonl.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

CLASSES = ("circle", "square", "triangle", "cross")
PLURALS = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (225, 45, 45),
    "green": (45, 195, 65),
    "blue": (50, 80, 235),
    "yellow": (225, 210, 45),
    "purple": (205, 50, 205),
}
NUMBERS = {2: "two", 3: "three", 4: "four"}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
CATEGORIES = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
VOCABULARY = (
    *("a", "photo", "of", "and", "left", "right", "above", "below"),
    *(*CLASSES, *PLURALS.values(), *COLORS, *NUMBERS.values()),
)
"""Every word that a prompt may hold."""

NUM_EVAL_PER_CATEGORY = 184
TRAIN_COPIES = {
    "single_object": 8,  # distinct prompts times copies: hard categories weigh more
    "two_object": 8,
    "counting": 16,
    "colors": 6,
    "position": 12,
    "color_attr": 3,
}
SPLIT_SEED = 20

Record = dict[str, Any]
"""One line of a prompt file: prompt, tag, include, and for counting exclude."""


def _record(prompt: str, tag: str, include: list[Record], **more: Any) -> Record:
    return {"prompt": f"a photo of {prompt}", "tag": tag, "include": include, **more}


def _single() -> list[Record]:
    return [_record(f"a {c}", "single_object", [{"class": c, "count": 1}]) for c in CLASSES]


def _two() -> list[Record]:
    return [
        _record(f"a {a} and a {b}", "two_object", [{"class": c, "count": 1} for c in (a, b)])
        for a, b in itertools.permutations(CLASSES, 2)
    ]


def _counting() -> list[Record]:
    return [
        _record(
            f"{word} {PLURALS[c]}",
            "counting",
            [{"class": c, "count": n}],
            exclude=[{"class": c, "count": n + 1}],
        )
        for n, word in NUMBERS.items()
        for c in CLASSES
    ]


def _colors() -> list[Record]:
    return [
        _record(f"a {color} {c}", "colors", [{"class": c, "count": 1, "color": color}])
        for color in COLORS
        for c in CLASSES
    ]


def _position() -> list[Record]:
    # As in GenEval, the object that the relation is about comes second and points at the first.
    return [
        _record(
            f"a {a} {relation} a {b}",
            "position",
            [{"class": b, "count": 1}, {"class": a, "count": 1, "position": [relation, 0]}],
        )
        for a, b in itertools.permutations(CLASSES, 2)
        for relation in OPPOSITE
    ]


def _color_attr() -> list[Record]:
    return [
        _record(
            f"a {color_a} {a} and a {color_b} {b}",
            "color_attr",
            [
                {"class": a, "count": 1, "color": color_a},
                {"class": b, "count": 1, "color": color_b},
            ],
        )
        for a, b in itertools.permutations(CLASSES, 2)
        for color_a, color_b in itertools.permutations(COLORS, 2)
    ]


_BUILDERS = {
    "single_object": _single,
    "two_object": _two,
    "counting": _counting,
    "colors": _colors,
    "position": _position,
    "color_attr": _color_attr,
}


def all_records(category: str) -> list[Record]:
    """Every distinct prompt of a category, in a fixed order."""
    if category not in _BUILDERS:
        raise ValueError(f"unknown category {category!r}; known: {CATEGORIES}")
    return _BUILDERS[category]()


def meaning(record: Record) -> str:
    """A key that two wordings of the same scene share ("a left of b", "b right of a")."""
    include = record["include"]
    if record["tag"] == "position":
        target, subject = include
        relation = subject["position"][0]
        pair = (subject["class"], relation, target["class"])
        return str(min(pair, (pair[2], OPPOSITE[relation], pair[0])))
    return record["tag"] + str(sorted(json.dumps(item, sort_keys=True) for item in include))


def split(category: str) -> tuple[list[Record], list[Record]]:
    """Distinct (training, evaluation) prompts; only `position` and `color_attr` are disjoint.

    They are disjoint in meaning: no evaluated scene is trained under its other wording. The other
    categories have too few prompts, and are told apart by noise.
    """
    records = all_records(category)
    if category not in ("position", "color_attr"):
        return records, records
    meanings = sorted({meaning(record) for record in records})
    random.Random(SPLIT_SEED).shuffle(meanings)
    num_eval = min(NUM_EVAL_PER_CATEGORY // 2, len(meanings) // 2)
    held_out = set(meanings[:num_eval])
    train = [record for record in records if meaning(record) not in held_out]
    return train, [record for record in records if meaning(record) in held_out]


def train_records() -> list[Record]:
    """The training file's lines, shuffled once with a fixed seed."""
    lines = [r for c in CATEGORIES for r in split(c)[0] for _ in range(TRAIN_COPIES[c])]
    random.Random(SPLIT_SEED).shuffle(lines)
    return lines


def eval_records() -> list[Record]:
    """The evaluation file's lines: as many per category; a repeated prompt means other noise."""
    lines = []
    for category in CATEGORIES:
        held_out = split(category)[1]
        lines += list(itertools.islice(itertools.cycle(held_out), NUM_EVAL_PER_CATEGORY))
    return lines


def write_prompts(folder: str | Path) -> None:
    """Write shapes_train.jsonl and shapes_eval.jsonl into `folder`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train", train_records()), ("eval", eval_records())):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"shapes_{name}.jsonl").write_text(text, encoding="ascii")


if __name__ == "__main__":
    write_prompts(Path(__file__).parents[2] / "configs" / "prompts")
