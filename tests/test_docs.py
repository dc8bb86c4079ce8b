"""What README.md and docs/ name exists, and what the README tells a reader to run, runs.

Before a fenced block, an HTML comment on a line of its own may say how to treat it:
    <!-- test: slow -->           run it only in 'make test-long'
    <!-- test: skip: REASON -->   never run it (it needs a cluster, it runs this suite, ...)
Paths that start with my_ are the reader's own and are not looked for.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(
    [*ROOT.glob("README.md"), *ROOT.glob("CONTRIBUTING.md"), *(ROOT / "docs").rglob("*.md")]
)
FOLDERS = "rollout learner rewards cluster configs tests docs dashboards benchmarks .ci".split()
SUFFIXES = "py|toml|md|json|jsonl|yaml|yml|txt|png|svg|html|safetensors"


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


def missing_paths(path: str, text: str) -> Iterator[str]:
    """Files named in code (path.py, or anything under one of our folders), and targets of links."""
    for where, code in code_of(path, text):
        for name in re.findall(rf"(?<![\w./*{{<-])[\w./-]+\.(?:{SUFFIXES})\b(?![\w*/])", code):
            name = name.removeprefix("./")
            if Path(name).name.startswith("my_"):
                continue
            if "/" not in name and name.endswith(".py"):
                found = any(True for folder in FOLDERS for _ in (ROOT / folder).rglob(name))
            else:
                found = name.split("/")[0] not in FOLDERS or (ROOT / name).exists()
            if not found:
                yield f"{where}: {name} does not exist"
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


def runnable() -> Iterator[object]:
    for document in ROOT.glob("README.md"):
        for block in blocks(document.name, document.read_text("utf-8")):
            if block.language in ("bash", "python") and not block.treatment.startswith("skip:"):
                mark = pytest.mark.long if block.treatment == "slow" else pytest.mark.slow
                yield pytest.param(block, marks=mark, id=block.where)


@pytest.mark.parametrize("block", list(runnable()))
def test_what_the_readme_tells_to_run_runs(block: Block) -> None:
    program = (
        ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        [*program, block.text],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{block.where}\n{run.stdout[-2000:]}\n{run.stderr[-4000:]}"


def test_comments_before_blocks_are_known() -> None:
    for document in DOCS:
        for block in blocks(document.name, document.read_text("utf-8")):
            assert re.fullmatch(r"|slow|skip: .+", block.treatment), block.where


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
