"""The wheel holds the four packages and nothing else, and works from there."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("rollout", "learner", "rewards", "cluster")
LEFT_OUT = ("tests", "configs", "docs", "benchmarks", "dashboards")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """A wheel of this working tree, built in a copy so that no leftover can slip in or stay."""
    root = Path(__file__).resolve().parents[1]
    tree = tmp_path_factory.mktemp("wheel") / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tree)
    for name in PACKAGES:
        shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in LEFT_OUT:
        (tree / name).mkdir()
        (tree / name / "__init__.py").touch()
    (tree / "rollout_old").mkdir()
    (tree / "rollout_old" / "__init__.py").touch()
    out = tree / "out"
    run = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, tree],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = out.glob("flowcredit-*.whl")
    return zipfile.Path(built)


@pytest.mark.slow
def test_wheel_holds_exactly_the_four_packages(wheel: zipfile.Path, repo_root: Path) -> None:
    held = set(wheel.root.namelist())
    folders = {name.split("/")[0] for name in held}
    assert folders == {*PACKAGES, "flowcredit-0.1.0.dist-info"}
    for package in PACKAGES:
        assert f"{package}/py.typed" in held
        for file in (repo_root / package).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert file.relative_to(repo_root).as_posix() in held


@pytest.mark.slow
def test_wheel_says_what_it_is(wheel: zipfile.Path) -> None:
    info = wheel / "flowcredit-0.1.0.dist-info"
    metadata = (info / "METADATA").read_text("utf-8")
    assert "Classifier: Private :: Do Not Upload" in metadata
    assert "Requires-Python: >=3.11" in metadata
    scripts = (info / "entry_points.txt").read_text("utf-8")
    assert scripts.split("\n")[:2] == ["[console_scripts]", "flowcredit = cluster.cli:main"]


@pytest.mark.slow
def test_wheel_imports_from_where_it_is_installed(wheel: zipfile.Path, tmp_path: Path) -> None:
    wheel.root.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        f"for name in {PACKAGES}:\n"
        "    print(__import__(name + '.config', fromlist=['_']).__file__)"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", code, tmp_path], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(tmp_path / name / "config.py") for name in PACKAGES]


def test_every_requirement_is_pinned_and_no_pin_names_a_place(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pins = dict(
        line.split("==")
        for line in (repo_root / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    for requirement in wanted:
        name = re.split(r"[\[<>=]", requirement)[0]
        assert name in pins, f"constraints.txt does not pin {name}"
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in pins.values())
    assert pins["torch"] == "2.13.0"
