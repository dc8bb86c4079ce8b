"""The plans, and the page that is made of what came of them."""

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.campaign import Strike
from tests.chaos.ledger import Ledger
from tests.chaos.marks import PHASES
from tests.chaos.plan import FRACTIONS, HANG, KINDS, MOST_SKIPPED, long_plan, short_plan
from tests.chaos.report import document, shortfalls, write_report
from tests.chaos.suite import Judged, read_results, write_results


@pytest.mark.parametrize("seed", [0, 7])
def test_the_long_form_has_kills_enough_of_each_kind_and_phase(seed: int) -> None:
    aims = [aim for leg in long_plan(seed) for aim in leg.aims]
    kinds, phases = Counter(aim.kind for aim in aims), Counter(aim.phase for aim in aims)
    assert len(aims) >= 100
    assert kinds.keys() == set(KINDS)
    assert phases.keys() == set(PHASES)
    assert min(kinds.values()) >= 10
    assert min(phases.values()) >= 10
    assert {(aim.kind, aim.phase) for aim in aims} == {(k, p) for k in KINDS for p in PHASES}
    assert all(FRACTIONS[0] <= aim.fraction <= FRACTIONS[1] for aim in aims)
    assert all(0 <= aim.skip <= MOST_SKIPPED for aim in aims)


def test_a_plan_follows_from_its_seed() -> None:
    assert long_plan(0) == long_plan(0)
    assert long_plan(0) != long_plan(1)


def test_the_short_form_has_one_of_each_kind_and_a_hang() -> None:
    (leg,) = short_plan()
    assert Counter(aim.kind for aim in leg.aims) == Counter([*KINDS, HANG])


def strike(kind: str = "worker", phase: str = "sample", hit: bool = True, recovery_s: float = 2.0):
    return Strike(kind=kind, phase=phase, iteration=3, hit=hit, recovery_s=recovery_s)


def judged(*strikes: Strike, leg: str = "synchronous", wrong: tuple[str, ...] = (), lost=()):
    ledger = Ledger(lost=list(lost), doubled=[], wrong=list(wrong))
    return Judged(leg=leg, num_iterations=9, strikes=list(strikes), ledger=ledger)


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    runs = [judged(strike(), strike(hit=False), wrong=("a",)), judged(leg="b", lost=[4])]
    write_results(tmp_path / "judged.json", runs)
    assert read_results(tmp_path / "judged.json") == runs


def test_the_page_counts_hits_and_says_what_was_missed_and_wrong(tmp_path: Path) -> None:
    runs = [
        judged(strike(recovery_s=2.0), strike(recovery_s=5.0), strike(recovery_s=99.0, hit=False)),
        judged(strike("node", "train", recovery_s=8.0), leg="lag of 1", wrong=("b",), lost=[4]),
    ]
    text = document(runs, 12.4)
    assert "3 kills inside their phase in 2 runs, 12 minutes in all. 1 more missed" in text
    assert "1 of 2 runs have exact books" in text
    assert "| worker | sample | 2 | 3.5 | 5.0 | 0 | 0 |" in text
    assert "| node | train | 1 | 8.0 | 8.0 | 1 | 0 |" in text
    assert "| all | train | 1 | 8.0 | 8.0 | 1 | 0 |" in text
    assert "| lag of 1 | 1 | 9 | 1 | 1 | 0 | 1 |" in text
    assert "- lag of 1: b" in text
    page = tmp_path / "chaos.md"
    write_report(page, runs, 1.0)
    page.write_text(page.read_text() + "\nby hand\n")
    write_report(page, runs[:1], 1.0)
    assert "by hand" in page.read_text()
    assert "lag of 1" not in page.read_text()


def test_what_falls_short_is_named() -> None:
    assert shortfalls([judged(strike())], kills=1, each=0) == []
    few = shortfalls([judged(strike(), strike(hit=False))], kills=2, each=1)
    assert few[0] == "1 kills, not 2"
    assert "0 kills of kind driver, not 1" in few
    assert "0 kills of phase seal, not 1" in few
    assert shortfalls([judged(lost=[4], wrong=("b",))], kills=0, each=0) == [
        "synchronous: lost [4], doubled [], ['b']"
    ]
