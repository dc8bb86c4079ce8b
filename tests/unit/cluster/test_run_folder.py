"""Files of a run folder: atomic, versioned, and named when they are broken."""

from pathlib import Path

import pytest

from cluster.run_folder import (
    METRICS,
    append_jsonl,
    cut_unfinished_line,
    read_json,
    read_jsonl,
    read_metrics,
    read_run,
    write_json,
    write_jsonl,
)
from tests import fakes_run


def test_lines_come_back_with_their_version(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "lines.jsonl"
    write_jsonl(path, [{"index": 0}, {"index": 1}])
    append_jsonl(path, {"index": 2})
    assert [record["index"] for record in read_jsonl(path)] == [0, 1, 2]
    assert {record["format_version"] for record in read_jsonl(path)} == {1}
    assert [file.name for file in path.parent.iterdir()] == ["lines.jsonl"]


def test_an_iteration_written_again_after_a_rollback_counts_once(tmp_path: Path) -> None:
    for iteration, loss in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.25)):
        append_jsonl(tmp_path / METRICS, {"iteration": iteration, "loss": loss})
    assert [line["loss"] for line in read_metrics(tmp_path)] == [0.1, 0.25, 0.3]


def test_a_line_that_a_killed_driver_left_half_is_cut(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    cut_unfinished_line(path)
    assert not path.exists()
    for iteration in (1, 2):
        append_jsonl(path, {"iteration": iteration})
    whole = path.read_bytes()
    cut_unfinished_line(path)
    assert path.read_bytes() == whole
    for torn in (b"{", b'{"format_version": 1, "iteration": 3}'):
        path.write_bytes(whole + torn)
        cut_unfinished_line(path)
        assert path.read_bytes() == whole
    append_jsonl(path, {"iteration": 3})
    assert [line["iteration"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_new_run_folder_is_empty_but_readable(tmp_path: Path) -> None:
    run = read_run(tmp_path)
    assert (run.metrics, run.summary, run.config, run.environment) == ([], {}, {}, {})


def test_a_whole_run_folder_is_read(tmp_path: Path) -> None:
    run = read_run(fakes_run.build_run(tmp_path / "run", num_iterations=3))
    assert [line["iteration"] for line in run.metrics] == [1, 2, 3]
    assert run.summary["status"] == "finished"
    assert run.config["run"]["name"] == "fake"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"format_version": 1}\n{"format_version": 1\n')
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 2 is not JSON"):
        read_jsonl(path)
    path.write_text('{"format_version": 1}\n[]\n')
    with pytest.raises(ValueError, match="line 2 holds list"):
        read_jsonl(path)
    path.write_text('{"format_version": 2}\n')
    with pytest.raises(ValueError, match="format_version 2; this flowcredit reads 1"):
        read_jsonl(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_json(path)
    with pytest.raises(FileNotFoundError, match="run folder"):
        read_run(tmp_path / "nowhere")


def test_numbers_that_are_not_finite_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "summary.json", {"reward": float("nan")})
    assert list(tmp_path.iterdir()) == []
