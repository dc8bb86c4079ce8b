"""Contract suites: what every plug-in of a kind must keep, inherited by declaring a few parameters.

    from tests.contracts.kernel import KernelContract

    class TestMine(KernelContract):
        name = "my.module:Mine"

A suite is a plain class whose own name doesn't start with "Test", so that pytest collects only
subclasses. The docstring of a suite lists its parameters.
"""

from collections.abc import Iterable

import pytest

KINDS = ("reward", "kernel", "credit_rule", "normaliser", "objective", "family")
pytest.register_assert_rewrite(*(f"{__name__}.{kind}" for kind in KINDS))


def uncovered(contract: type, registry: Iterable[str]) -> set[str]:
    """Registered names that no subclass of `contract` which pytest collects has as its `name`."""
    found: set[str] = set()
    pending = [contract]
    while pending:
        suite = pending.pop()
        pending += suite.__subclasses__()
        if suite.__name__.startswith("Test"):
            found.add(suite.name)
    return set(registry) - found
