"""report.html: its numbers, that it needs nothing else, and its empty states."""

import base64
import io
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from cluster.report import before_after_png, write_report
from cluster.run_folder import read_run
from tests import fakes_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes_run.build_run(tmp_path_factory.mktemp("runs") / "run", num_iterations=12)


@pytest.fixture(scope="module")
def html(run_dir: Path) -> str:
    return write_report(run_dir).read_text()


def test_the_headline_is_the_paired_difference(run_dir: Path, html: str) -> None:
    section = read_run(run_dir).summary["evaluation"]
    for score in ("strict", "graded"):
        change = section["paired_difference"][score]
        assert re.search(rf'class="big good">\+{change["mean"]:.3f}<', html)
        assert f"difference: {change['low']:+.3f} to {change['high']:+.3f}" in html
        for part in ("before", "after"):
            assert f"<b>{section[part][score]['mean']:.3f}</b>" in html
    assert "60 images of 30 prompts" in html


def test_every_category_counts_and_seconds_are_shown(run_dir: Path, html: str) -> None:
    for tag, numbers in (
        read_run(run_dir).summary["evaluation"]["after"]["graded"]["categories"].items()
    ):
        assert f"<td>{tag.replace('_', ' ')}</td>" in html
        assert f"[{numbers['low']:.3f}, {numbers['high']:.3f}]" in html
    assert "<td>network calls</td><td>144</td>" in html
    assert "<td>learn</td><td>15.6</td>" in html
    assert "<td>evaluation before</td><td>6.0</td>" in html
    assert "seed 0" in html
    assert "name = &#34;fake&#34;" in html
    assert "2.13.0+cpu" in html


def test_it_refers_to_nothing_outside_itself(html: str) -> None:
    assert not re.search(r"https?://|//[a-z]+\.", html.replace("base64,//", "base64,"))
    assert "<script" not in html
    assert "<link" not in html
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    assert len(sources) == 8 * 2 + 12 * 2 + 1
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    for source in sources:
        Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))).verify()


def test_it_reads_on_dark_pages_and_on_phones(html: str) -> None:
    assert html.count('media="(prefers-color-scheme: dark)"') == 8
    assert 'name="viewport"' in html


def test_prompts_are_escaped(run_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "run"))
    (copy / "metrics.jsonl").unlink()
    for name in ("before", "after"):
        path = copy / "evaluation" / f"{name}.jsonl"
        path.write_text(path.read_text().replace("a photo of a red", "<script>red"))
    assert "<script" not in write_report(copy).read_text()


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    html = write_report(tmp_path).read_text()
    assert "nothing has been trained yet" in html
    assert "no evaluation before and after" in html
    assert "No pictures of both evaluations" in html
    assert "neither config.toml nor environment.json" in html
    assert before_after_png(tmp_path) is None


def test_a_run_without_summary_counts_what_it_has(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.report.CHARTS", ())  # other tests draw them
    (tmp_path / "metrics.jsonl").write_text((run_dir / "metrics.jsonl").read_text())
    html = write_report(tmp_path).read_text()
    assert "after iteration 12: there is no summary.json" in html
    assert "<td>images</td><td>3,072</td>" in html
    assert "<td>sample</td><td>28.8</td>" in html
    assert "seconds of the run" not in html


def test_a_worse_score_is_marked(tmp_path: Path) -> None:
    run_dir = fakes_run.build_run(tmp_path / "run", num_iterations=0, lift=-0.1)
    assert 'class="big bad">-' in write_report(run_dir).read_text()


def test_the_pictures_of_both_evaluations_become_one(run_dir: Path) -> None:
    path = before_after_png(run_dir)
    assert path is not None
    with Image.open(path) as page:
        assert page.width == 4 * (2 * 128 + 2 + 8) + 8
