"""The walls between packages, read off the source: import arrows, library doors, sizes, names.

A rule takes a source file and yields (line, what is wrong there). Each is also shown a snippet
that breaks it and one that does not, so that no rule can pass by never looking.
"""

import ast
import fnmatch
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rollout", "learner", "rewards", "cluster")

MAY_IMPORT = {
    "rollout": ("rollout",),
    "rewards": ("rewards",),
    "learner": (
        "learner",
        "rollout.flow",
        "rollout.families",
        "rollout.trajectory",
        "rollout.registry",
        "rollout.config",  # a family is opened with a ModelConfig
    ),
    "cluster": PACKAGES,
}
"""Which of our modules a package may import; so nobody but cluster imports cluster."""

DOORS = {
    "ray": ("cluster/actors*",),
    "deepspeed": ("learner/engine.py",),
    "diffusers": ("rollout/families/*",),
    "pyarrow": ("rollout/trajectory.py", "cluster/buffer.py"),
    "prometheus_client": ("cluster/metrics.py",),
    "fsspec": ("cluster/remote_path.py",),
    "matplotlib": ("cluster/report*", "cluster/curves.py"),
}
"""The only files that may import a library (fnmatch patterns; * also matches folders)."""

TORCH_FREE = ("*/config.py", "*/stats.py", "*/records.py")
HEAVY = ("torch", "diffusers", "transformers", "deepspeed", "peft", "ray")
PICKLES = ("pickle", "cloudpickle", "dill")
BOUNDARY = "# supervision boundary:"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAY_BE_LONG: dict[str, str] = {}
"""Reason by "path" or "path:function"; an entry that is no longer needed fails too."""


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root, with slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    def is_one_of(self, patterns: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatch(self.path, pattern) for pattern in patterns)


Offence = tuple[int, str]
Rule = Callable[[Source], Iterator[Offence]]


def sources() -> list[Source]:
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text("utf-8")) for file in files]


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that is imported; `from a import b` is a.b, dots are resolved."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folders = source.path.split("/")[: -node.level] if node.level else []
            base = ".".join([*folders, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def starts_with(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def import_arrows(source: Source) -> Iterator[Offence]:
    for line, name in imports(source):
        if starts_with(name, PACKAGES) and not starts_with(name, MAY_IMPORT[source.package]):
            yield line, f"{source.package} may not import {name}"


def library_doors(source: Source) -> Iterator[Offence]:
    for line, name in imports(source):
        library = name.split(".")[0]
        if library in DOORS and not source.is_one_of(DOORS[library]):
            yield line, f"{library} is imported only by {', '.join(DOORS[library])}"


def plain_records_and_configs(source: Source) -> Iterator[Offence]:
    if source.is_one_of(TORCH_FREE):
        for line, name in imports(source):
            if starts_with(name, HEAVY):
                yield line, f"{name}: a config, stats or records file must import without torch"


def no_pickle(source: Source) -> Iterator[Offence]:
    for line, name in imports(source):
        if starts_with(name, PICKLES):
            yield line, f"{name}: nothing of ours is pickled"


def bound_names(node: ast.AST) -> Iterator[tuple[int, str | None]]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            yield node.lineno, name
        case ast.arg(arg=name) | ast.ExceptHandler(name=name):
            yield node.lineno, name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            yield from ((node.lineno, alias.asname or alias.name) for alias in aliases)


def package_names_stay_packages(source: Source) -> Iterator[Offence]:
    """A variable of that name would hide the package; a class's field, reached by a dot, cannot."""
    fields = {
        name
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign | ast.Assign)
        for name in ast.walk(statement)
    }
    for node in ast.walk(source.tree):
        if node in fields:
            continue
        for line, name in bound_names(node):
            if name in PACKAGES:
                yield line, f"{name} is a package; bind another name, import objects"


def narrow_excepts(source: Source) -> Iterator[Offence]:
    lines = source.text.splitlines()
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            yield node.lineno, "bare except"
            continue
        caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)}
        broad = sorted(caught & {"Exception", "BaseException"})
        if broad and BOUNDARY not in lines[node.lineno - 1]:
            yield node.lineno, f"except {broad[0]} without '{BOUNDARY} why' on its line"


def lengths(source: Source) -> Iterator[tuple[int, str, int, int]]:
    """(line, key in MAY_BE_LONG, length, limit) of the file and of each function."""
    yield 1, source.path, len(source.text.splitlines()), MAX_FILE_LINES
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            yield node.lineno, f"{source.path}:{node.name}", length, MAX_FUNCTION_LINES


def sizes(source: Source) -> Iterator[Offence]:
    for line, key, length, limit in lengths(source):
        if length > limit and key not in MAY_BE_LONG:
            yield line, f"{length} lines, at most {limit}; split it (or see MAY_BE_LONG)"
        if length <= limit and key in MAY_BE_LONG:
            yield line, f"{key} is short enough by now: remove it from MAY_BE_LONG"


def docstrings(source: Source) -> Iterator[Offence]:
    """Modules, and their public functions and classes (a method's name may say it all)."""
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield 1, "the module has no docstring"
    for node in source.tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        overload = any(ast.unparse(name).endswith("overload") for name in node.decorator_list)
        if not (node.name.startswith("_") or overload or ast.get_docstring(node)):
            yield node.lineno, f"{node.name} has no docstring"


def ascii_only(source: Source) -> Iterator[Offence]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if not line.isascii():
            yield number, "not ASCII"


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        import_arrows,
        library_doors,
        plain_records_and_configs,
        no_pickle,
        package_names_stay_packages,
        narrow_excepts,
        sizes,
        docstrings,
        ascii_only,
    )
}


@pytest.mark.parametrize("rule", list(RULES.values()), ids=list(RULES))
def test_the_source_keeps(rule: Rule) -> None:
    found = [f"{src.path}:{line}: {text}" for src in sources() for line, text in rule(src)]
    assert not found, "\n" + "\n".join(found)


DOC = '"""Doc."""\n'
LONG_FUNCTION = "def f():\n" + "    a = 1\n" * MAX_FUNCTION_LINES

BAD = [
    (import_arrows, "rollout/x.py", "from rewards.base import Reward"),
    (import_arrows, "rewards/x.py", "import rollout.flow"),
    (import_arrows, "learner/x.py", "from rollout import worker"),
    (import_arrows, "learner/credit/x.py", "from rollout.sampler import sample"),
    (import_arrows, "learner/x.py", "def f():\n    from cluster.config import RunConfig"),
    (library_doors, "cluster/controller.py", "import ray"),
    (library_doors, "learner/worker.py", "from deepspeed import zero"),
    (library_doors, "rollout/sampler.py", "import diffusers.models"),
    (library_doors, "learner/worker.py", "import pyarrow as pa"),
    (library_doors, "cluster/report.py", "from prometheus_client import Counter"),
    (library_doors, "rewards/x.py", "import matplotlib.pyplot as plt"),
    (plain_records_and_configs, "learner/config.py", "from torch import Tensor"),
    (plain_records_and_configs, "rollout/stats.py", "def f():\n    import torch"),
    (no_pickle, "learner/x.py", "from pickle import dumps"),
    (package_names_stay_packages, "cluster/x.py", "rollout = 1"),
    (package_names_stay_packages, "cluster/x.py", "def f(rewards): ..."),
    (package_names_stay_packages, "cluster/x.py", "for learner, b in []: ..."),
    (package_names_stay_packages, "cluster/x.py", "with a as cluster: ..."),
    (package_names_stay_packages, "cluster/x.py", "import numpy as rewards"),
    (package_names_stay_packages, "cluster/x.py", "import rollout"),
    (
        package_names_stay_packages,
        "cluster/x.py",
        "class A:\n    def f(self):\n        learner = 1",
    ),
    (narrow_excepts, "cluster/x.py", "try: ...\nexcept: ..."),
    (narrow_excepts, "cluster/x.py", "try: ...\nexcept Exception: ...  # whatever"),
    (narrow_excepts, "cluster/x.py", "try: ...\nexcept (OSError, BaseException) as e: ..."),
    (sizes, "cluster/x.py", "a = 1\n" * (MAX_FILE_LINES + 1)),
    (sizes, "cluster/x.py", LONG_FUNCTION),
    (docstrings, "cluster/x.py", "a = 1"),
    (docstrings, "cluster/x.py", DOC + "def f(): ..."),
    (docstrings, "cluster/x.py", DOC + "class A: ..."),
    (ascii_only, "cluster/x.py", "a = 1\nb = '\u03c3'"),
]

GOOD = [
    (import_arrows, "rollout/x.py", "from .flow import noise\nimport rewards_of_others"),
    (import_arrows, "learner/x.py", "from rollout.flow import noise\nfrom learner.engine import E"),
    (import_arrows, "cluster/x.py", "from rewards.base import Reward\nimport learner.config"),
    (library_doors, "cluster/actors/pool.py", "import ray"),
    (library_doors, "rollout/families/sd3.py", "from diffusers import AutoencoderKL"),
    (plain_records_and_configs, "learner/worker.py", "import torch"),
    (no_pickle, "learner/x.py", "from safetensors.torch import save_file"),
    (package_names_stay_packages, "cluster/config.py", "class R:\n    learner: int = 1"),
    (
        package_names_stay_packages,
        "cluster/x.py",
        "a.learner = f(rollout=1)\nfrom learner import config",
    ),
    (narrow_excepts, "cluster/x.py", f"try: ...\nexcept Exception: ...  {BOUNDARY} reports it"),
    (narrow_excepts, "cluster/x.py", "try: ...\nexcept (OSError, ValueError): ..."),
    (sizes, "cluster/x.py", "a = 1\n" * MAX_FILE_LINES),
    (
        docstrings,
        "cluster/x.py",
        DOC + "def _f(): ...\nclass A:\n    " + DOC + "    def f(self): ...",
    ),
    (ascii_only, "cluster/x.py", "a = '\\u03c3'"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_a_rule_sees_the_offence(rule: Rule, path: str, text: str) -> None:
    offences = list(rule(Source(path, text)))
    assert offences
    assert all(1 <= line <= len(text.splitlines()) and message for line, message in offences)


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_a_rule_lets_good_code_pass(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text))) == []


def test_every_rule_was_seen_to_fail_and_to_pass() -> None:
    assert {rule for rule, *_ in BAD} == {rule for rule, *_ in GOOD} == set(RULES.values())


def test_exceptions_from_size_limits_are_all_in_use() -> None:
    keys = {key for source in sources() for _, key, _, _ in lengths(source)}
    assert set(MAY_BE_LONG) <= keys, "MAY_BE_LONG names what is gone"


def modules(patterns: tuple[str, ...]) -> list[str]:
    return [src.path[:-3].replace("/", ".") for src in sources() if src.is_one_of(patterns)]


def test_configs_stats_and_records_import_without_torch() -> None:
    names = modules(TORCH_FREE)
    assert "rollout.config" in names
    code = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        f"    loaded = sorted(set({HEAVY!r}) & set(sys.modules))\n"
        "    assert not loaded, f'{name} loads {loaded}'"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
