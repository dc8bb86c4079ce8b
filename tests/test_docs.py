"""What README.md, docs/ and the packages' comments name exists; what the README tells a reader to run, runs.

Before a fenced block of the README, an HTML comment on a line of its own may say how to treat it:
    <!-- test: slow -->           run it only in 'make test-long'
    <!-- test: skip: REASON -->   never run it (it needs a cluster, it runs this suite, ...)
Every block runs in a fresh copy of the working tree, with this environment's packages as its .venv.
Paths that start with my_ are the reader's own and are not looked for.
"""

import ast
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
PLANS = {"design.md"}
"""Pages that say what is to be built, and so name what is not there yet."""
DOCS = sorted(
    path
    for path in [
        *ROOT.glob("README.md"),
        *ROOT.glob("CONTRIBUTING.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    if path.name not in PLANS
)
FOLDERS = "rollout learner rewards cluster configs tests docs dashboards benchmarks .ci".split()
SUFFIXES = "py|toml|md|json|jsonl|yaml|yml|txt|png|svg|html|safetensors"
NAMED_FILE = re.compile(rf"(?<![\w./*{{<-])[\w./-]+\.(?:{SUFFIXES})\b(?![\w*/])")
RUN_FILES = {"config.toml"}  # in every run folder, see docs/formats.md
PACKAGES = ("rollout", "learner", "rewards", "cluster")
SOURCES = sorted(path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))


@dataclass(frozen=True)
class Block:
    """A fenced block: where its first line is, its language, its text, its `test:` comment."""

    path: str
    line: int
    language: str
    text: str
    treatment: str

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


FENCE = re.compile(
    r"(?:^<!-- test: (?P<treatment>.*?) -->\n+)?^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(path: str, text: str) -> list[Block]:
    return [
        Block(
            path,
            text.count("\n", 0, match.start("text")) + 1,
            match["language"],
            match["text"],
            match["treatment"] or "",
        )
        for match in FENCE.finditer(text)
    ]


def code_of(path: str, text: str) -> Iterator[tuple[str, str]]:
    """(where, code) of each fenced block and of each `inline span`."""
    for block in blocks(path, text):
        yield block.where, block.text
    prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(prose.splitlines(), 1):
        yield from ((f"{path}:{number}", span) for span in re.findall(r"`([^`]+)`", line))


def exists(name: str) -> bool:
    """Whether a file is there; a bare x.py or x.toml may lie in any of our folders."""
    if Path(name).name.startswith("my_") or name in RUN_FILES or (ROOT / name).exists():
        return True
    if "/" not in name and name.endswith((".py", ".toml")):
        return any(True for folder in FOLDERS for _ in (ROOT / folder).rglob(name))
    return name.split("/")[0] not in FOLDERS


def missing_paths(path: str, text: str) -> Iterator[str]:
    """Files named in code (path.py, or anything under one of our folders), and targets of links."""
    for where, code in code_of(path, text):
        for name in NAMED_FILE.findall(code):
            if not exists(name.removeprefix("./")):
                yield f"{where}: {name.removeprefix('./')} does not exist"
        for name in re.findall(r"(?<![\w./-])((?:rollout|learner|rewards|cluster)/[\w/]*)", code):
            if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists():
                if not re.search(rf"{re.escape(name)}[.*{{<-]", code):
                    yield f"{where}: {name} does not exist"
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target and not target.startswith("mailto:"):
            if not ((ROOT / path).parent / target).exists():
                yield f"{path}: link to {target}, which does not exist"


def shell_lines(code: str) -> Iterator[str]:
    for line in code.replace("\\\n", " ").splitlines():
        yield re.sub(r"^\s*(\$ )?([A-Z_]+=\S* )*", "", line)


def subcommands() -> set[str]:
    choices = [action.choices for action in build_parser()._actions if action.choices]
    return {name for names in choices for name in names}


def wrong_commands(path: str, text: str) -> Iterator[str]:
    """`flowcredit X` and `make X` that are not there; whole command lines also have to parse."""
    rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for where, code in code_of(path, text):
        for name in re.findall(r"(?:\bflowcredit|-m cluster) ([a-z][\w-]*)", code):
            if name not in subcommands():
                yield f"{where}: flowcredit has no command {name}"
        for line in shell_lines(code):
            match = re.match(r"make ((?:[\w-]+(?!\S*=)\s*)+)", line)
            for name in match[1].split() if match else []:
                if name not in rules:
                    yield f"{where}: the Makefile has no target {name}"
    for block in blocks(path, text):
        for line in shell_lines(block.text):
            match = re.match(r"(?:\.venv/bin/)?(?:flowcredit|python -m cluster) (\w.*)", line)
            if match and not parses(match[1]):
                yield f"{block.where}: flowcredit does not understand: {match[1]}"


def parses(arguments: str) -> bool:
    command = re.split(r"[|&;>]", arguments)[0]
    try:
        build_parser().parse_args(shlex.split(command, comments=True))
    except SystemExit as ending:
        return ending.code == 0
    return True


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_what_a_document_names_exists(document: Path) -> None:
    path, text = document.relative_to(ROOT).as_posix(), document.read_text("utf-8")
    found = [*missing_paths(path, text), *wrong_commands(path, text)]
    assert not found, "\n" + "\n".join(found)


def runnable_blocks() -> list[Block]:
    return [
        block
        for block in blocks("README.md", (ROOT / "README.md").read_text("utf-8"))
        if block.language in ("bash", "python") and not block.treatment.startswith("skip:")
    ]


def runnable() -> Iterator[object]:
    for block in runnable_blocks():
        mark = pytest.mark.long if block.treatment == "slow" else pytest.mark.slow
        yield pytest.param(block, marks=mark, id=block.where)


def unfit_to_run(block: Block) -> Iterator[str]:
    """Lines that must not run in a test: they start this suite again, or change its environment."""
    for line in shell_lines(block.text):
        again = re.match(r"make\b.*\stest(-long)?\b|.*\bpytest\b|\.ci/run\b", line)
        changes = re.match(r".*\bpip3? install\b|.*-m venv\b", line)
        if again or changes:
            what = "starts this suite again" if again else "changes the environment it runs in"
            yield f"{block.where}: {line!r} {what}; put <!-- test: skip: REASON --> before the block"


def copy_of_the_repo(folder: Path) -> Path:
    """The working tree without what git ignores, with the .venv that `make` would build there."""
    listing = "git -c safe.directory=* ls-files -z --cached --others --exclude-standard"
    names = subprocess.run(listing.split(), cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    borrow_environment(folder / ".venv")
    return folder


def borrow_environment(venv: Path) -> None:
    """Links to this environment's files, a `flowcredit` of its own, and the stamp that `make` looks for."""
    here = Path(sys.prefix)
    (venv / "bin").mkdir(parents=True)
    for entry in (*here.iterdir(), *Path(sys.executable).parent.iterdir()):
        link = venv / "bin" / entry.name if entry.parent != here else venv / entry.name
        if entry.name not in ("bin", ".installed", "flowcredit"):
            link.symlink_to(entry)
    command = venv / "bin" / "flowcredit"
    command.write_text(f'#!/bin/sh\nexec {venv}/bin/python -m cluster "$@"\n')
    command.chmod(0o755)
    (venv / ".installed").touch()


def environment_of(folder: Path) -> dict[str, str]:
    """This process's, for a reader who stands in `folder`: its code, no coverage, no make around it."""
    around = re.compile(r"COV_|COVERAGE_|MAKE|MFLAGS$|ARGS$|SEED$|BENCH$")
    kept = {name: value for name, value in os.environ.items() if not around.match(name)}
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize("block", list(runnable()))
def test_what_the_readme_tells_to_run_runs(block: Block, tmp_path: Path) -> None:
    assert not list(unfit_to_run(block))
    folder = copy_of_the_repo(tmp_path)
    program = ["bash", "-euo", "pipefail"] if block.language == "bash" else ["python"]
    run = subprocess.run(
        [*program, "-c", block.text],
        cwd=folder,
        env=environment_of(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{block.where}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"


@pytest.mark.slow
def test_a_copy_of_the_repo_imports_its_own_code_and_is_ready_for_make(tmp_path: Path) -> None:
    folder = copy_of_the_repo(tmp_path)
    asked = "import cluster, numpy, sys; print(cluster.__file__); print(sys.prefix)"
    commands = (["python", "-c", asked], ["flowcredit", "--help"], ["make", "-n", "quickstart"])
    module, command, make = (
        subprocess.run(
            words,
            cwd=folder,
            env=environment_of(folder),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for words in commands
    )
    assert module.split() == [str(folder / "cluster" / "__init__.py"), str(folder / ".venv")]
    assert "train" in command
    assert make.strip() == ".venv/bin/flowcredit train configs/quickstart.toml"
    assert not (folder / "runs").exists()


def remarks(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment and every line of a string that stands by itself, docstrings too."""
    text = path.read_text("utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from enumerate(str(node.value.value).splitlines(), node.value.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def missing_in_remarks(path: Path) -> Iterator[str]:
    """Files named in comments and docstrings that are not there."""
    for number, remark in remarks(path):
        names = NAMED_FILE.findall(remark) + re.findall(r"(?<![\w./-])docs/[\w./-]*\w", remark)
        for name in dict.fromkeys(names):
            if not exists(name.removeprefix("./")):
                yield f"{path}:{number}: {name} does not exist"


def outside_names(text: str) -> Iterator[str]:
    """Pages that lie outside the repository. docs/papers.md and docs/design.md are ours."""
    for number, line in enumerate(text.splitlines(), 1):
        for name in re.findall(r"[\w./-]*\b(?:design|field|style|papers)\.md\b", line):
            if name not in ("docs/papers.md", "docs/design.md"):
                yield f"{number}: {name} is not in the repository"


def test_what_comments_and_docstrings_name_exists() -> None:
    found = [complaint for path in SOURCES for complaint in missing_in_remarks(path)]
    assert not found, "\n" + "\n".join(found)


def test_the_source_names_no_page_outside_the_repository() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{complaint}"
        for path in (*SOURCES, *(ROOT / "benchmarks").rglob("*.py"))
        for complaint in outside_names(path.read_text("utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


def test_comments_before_blocks_are_known() -> None:
    for document in DOCS:
        for block in blocks(document.name, document.read_text("utf-8")):
            assert re.fullmatch(r"|slow|skip: .+", block.treatment), block.where


def test_no_block_that_runs_starts_this_suite_or_changes_its_environment() -> None:
    (*found,) = (complaint for block in runnable_blocks() for complaint in unfit_to_run(block))
    assert not found, "\n" + "\n".join(found)


def test_the_readme_is_there_and_names_both_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert "make quickstart" in text
    assert "make test" in text


SAMPLE = """Words, `cluster/cli.py`.

<!-- test: slow -->
```bash
make quickstart SEED=1
flowcredit train configs/quickstart.toml
```
```python
x = 1
```
"""


def test_blocks_carry_language_line_and_treatment() -> None:
    first, second = blocks("a.md", SAMPLE)
    assert (first.language, first.line, first.treatment) == ("bash", 5, "slow")
    assert first.text.splitlines()[0] == "make quickstart SEED=1"
    assert (second.language, second.line, second.treatment) == ("python", 9, "")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("see `cluster/gone.py`", "a.md:1: cluster/gone.py does not exist"),
        ("see `gone_module.py`", "a.md:1: gone_module.py does not exist"),
        ("see `rollout/gone`", "a.md:1: rollout/gone does not exist"),
        ("\n```bash\ncat configs/gone.toml\n```\n", "a.md:3: configs/gone.toml does not exist"),
        ("[x](docs/gone.md)", "a.md: link to docs/gone.md, which does not exist"),
    ],
)
def test_a_path_that_is_not_there_is_seen(text: str, complaint: str) -> None:
    assert list(missing_paths("a.md", text)) == [complaint]


@pytest.mark.parametrize(
    "text",
    [
        "`rollout/config.py`, `config.py`, `rollout/`, `rollout/families`, `rewards/config`",
        "`my_reward.py`, `runs/x/summary.json`, `learner/{engine,checkpoint}.py`, `rollout/*.py`",
        "[x](pyproject.toml), [y](https://example.org/z.md), [z](#words)",
    ],
)
def test_a_path_that_is_there_or_elsewhere_passes(text: str) -> None:
    assert list(missing_paths("a.md", text)) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("`flowcredit dance`", "flowcredit has no command dance"),
        ("```bash\npython -m cluster dance\n```\n", "flowcredit has no command dance"),
        ("```bash\nflowcredit train --gone\n```\n", "does not understand: train --gone"),
        ("`make dance`", "the Makefile has no target dance"),
    ],
)
def test_a_command_that_is_not_there_is_seen(text: str, complaint: str) -> None:
    assert any(complaint in found for found in wrong_commands("a.md", text))


def test_commands_that_are_there_pass() -> None:
    assert list(wrong_commands("a.md", SAMPLE + "`make test`, `flowcredit plan`")) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("make test", "starts this suite again"),
        ("$ make quickstart test-long", "starts this suite again"),
        (".venv/bin/python -m pytest tests", "starts this suite again"),
        ("python3 -m venv .venv", "changes the environment"),
        (".venv/bin/pip install torch==2.13.0", "changes the environment"),
    ],
)
def test_a_block_that_must_not_run_is_seen(line: str, complaint: str) -> None:
    (block,) = blocks("a.md", f"```bash\n{line}\n```\n")
    (found,) = unfit_to_run(block)
    assert found.startswith("a.md:2: ")
    assert complaint in found


def test_a_block_of_ordinary_commands_may_run() -> None:
    assert list(unfit_to_run(blocks("a.md", SAMPLE)[0])) == []


def test_a_skipped_block_keeps_its_reason() -> None:
    (block,) = blocks("a.md", "<!-- test: skip: it runs this suite -->\n```bash\nmake test\n```\n")
    assert block.treatment == "skip: it runs this suite"


REMARKS = '''"""See docs/papers.md, gone_module.py and
cluster/gone.py."""
x = "cluster/only_a_string.py"  # as configs/gone.toml says, config.toml does not
'''


def test_a_remark_about_a_file_that_is_not_there_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(REMARKS)
    assert list(missing_in_remarks(path)) == [
        f"{path}:1: gone_module.py does not exist",
        f"{path}:2: cluster/gone.py does not exist",
        f"{path}:3: configs/gone.toml does not exist",
    ]


def test_a_page_outside_the_repository_is_seen() -> None:
    text = "docs/papers.md docs/design.md\npapers.md (field.md)\n../shared/design.md docs/style.md"
    assert list(outside_names(text)) == [
        "2: papers.md is not in the repository",
        "2: field.md is not in the repository",
        "3: ../shared/design.md is not in the repository",
        "3: docs/style.md is not in the repository",
    ]


def test_sections_of_the_papers_page_that_sources_name_exist() -> None:
    page = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^## (\d+) ", page, re.MULTILINE))
    named = {
        (path.relative_to(ROOT).as_posix(), number)
        for folder in ("rollout", "learner", "rewards", "cluster", "tests", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for numbers in re.findall(
            r"papers\.md\s+sections?\s+(\w+(?: \(\w\))?(?:(?:,| and)(?: section)? \d+\w*)*)",
            path.read_text(encoding="utf-8"),
        )
        for number in re.findall(r"\d+\w*", numbers)
    }
    assert len(named) > 20
    assert {name for name in named if name[1] not in known} == set()
