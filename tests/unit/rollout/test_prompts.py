import json
import re
from pathlib import Path

import pytest

from rollout.prompts import PromptSource


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": f"prompt {i}", "tag": "counting", "n": i}) for i in range(10)]
    return write(tmp_path / "ten.jsonl", *lines)


def test_file_order_without_shuffle_round_and_round(ten: Path) -> None:
    source = PromptSource(ten, shuffle=False)
    assert [source.at(i)[0] for i in range(12)] == [f"prompt {i % 10}" for i in range(12)]
    assert len(source) == 10


def test_metadata_are_the_lines_other_fields_and_a_copy(ten: Path) -> None:
    source = PromptSource(ten, shuffle=False)
    prompt, metadata = source.at(3)
    assert (prompt, metadata) == ("prompt 3", {"tag": "counting", "n": 3})
    metadata["n"] = 99
    assert source.at(3)[1]["n"] == 3


def test_each_epoch_is_another_order_of_the_same_prompts(ten: Path) -> None:
    source = PromptSource(ten, seed=1)
    epochs = [[source.at(10 * epoch + i)[0] for i in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == [f"prompt {i}" for i in range(10)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    other = PromptSource(ten, seed=2)
    assert [other.at(i)[0] for i in range(10)] != epochs[0]


def test_the_order_is_pinned(ten: Path) -> None:
    """It must be the same on every machine and in every later release: runs are resumed."""
    source = PromptSource(ten, seed=0)
    assert [source.at(i)[1]["n"] for i in range(10)] == [8, 9, 1, 2, 6, 7, 0, 4, 5, 3]


def test_access_is_random(ten: Path) -> None:
    """Whatever was asked before, over three epochs: a resumed run gets the uninterrupted one's."""
    indices = list(range(25))
    whole = [PromptSource(ten, seed=5).at(i) for i in indices]
    source = PromptSource(ten, seed=5)
    assert [source.at(i) for i in reversed(indices)] == whole[::-1]


def test_a_byte_order_mark_at_the_start_is_skipped(tmp_path: Path) -> None:
    """As Windows editors write it; anywhere else it isn't JSON."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    source = PromptSource(path, shuffle=False)
    assert [source.at(i) for i in range(len(source))] == [("a", {}), ("b", {})]
    path.write_bytes(b'{"prompt": "a"}\n\xef\xbb\xbf{"prompt": "b"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: not JSON"):
        PromptSource(path)


def test_a_byte_that_is_not_utf8_is_named_by_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "gr\u00fcn"}\n'.encode() + b'{"prompt": "gr\xfcn"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: byte 0xfc at column 15 isn't UTF-8"):
        PromptSource(path)


def test_blank_lines_are_skipped_and_line_separators_in_text_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", "", '{"prompt": "a\u2028b"}', "   ", '{"prompt": "c"}')
    source = PromptSource(path, shuffle=False)
    assert [source.at(i)[0] for i in range(2)] == ["a\u2028b", "c"]


def test_negative_indices_are_refused(ten: Path) -> None:
    with pytest.raises(IndexError, match="prompt index -1 is negative"):
        PromptSource(ten).at(-1)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl does not exist; give a JSONL file"):
        PromptSource(tmp_path / "none.jsonl")


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty\.jsonl is empty; it needs one JSON object a line"):
        PromptSource(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 1}", "line 3: not JSON (Expecting property name enclosed in double quotes)"),
        ('["a prompt"]', "line 3: a JSON object is wanted, not '[\"a prompt\"]'"),
        ('{"text": "a"}', 'line 3: no "prompt" (a text that isn\'t empty)'),
        ('{"prompt": 7}', 'line 3: no "prompt" (a text that isn\'t empty)'),
        ('{"prompt": " "}', 'line 3: no "prompt" (a text that isn\'t empty)'),
    ],
)
def test_a_malformed_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "p.jsonl", '{"prompt": "fine"}', "", line)
    with pytest.raises(ValueError, match=re.escape(message)):
        PromptSource(path)
