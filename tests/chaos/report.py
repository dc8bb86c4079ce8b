"""The generated part of docs/chaos.md."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.marked_section import write_marked
from tests.chaos.campaign import Strike
from tests.chaos.marks import PHASES
from tests.chaos.plan import KINDS
from tests.chaos.suite import Judged

SCRIPT = "tests/chaos/report.py"
SKELETON = "# Killed at will\n\n{generated}\n"


def write_report(page: Path, judged: Sequence[Judged], minutes: float) -> None:
    """Put the tables into the page; what people wrote around them stays."""
    write_marked(page, SCRIPT, document(judged, minutes), SKELETON)


def document(judged: Sequence[Judged], minutes: float) -> str:
    """Return the text of the generated part."""
    hits = [strike for run in judged for strike in run.strikes if strike.hit]
    missed = sum(len(run.strikes) for run in judged) - len(hits)
    exact = sum(run.ledger.is_exact for run in judged)
    opening = (
        f"{len(hits)} kills inside their phase in {len(judged)} runs, {minutes:.0f} minutes in all. {missed} more "
        "missed their phase: they were done again, and are not counted, but the runs had to bear them too. "
        f"{exact} of {len(judged)} runs have exact books and end with the bits of the undisturbed run."
    )
    tables = [opening, "## By run", legs_table(judged), "## By kind and phase", kills_table(judged)]
    wrong = [f"- {run.leg}: {text}" for run in judged for text in run.ledger.wrong]
    if wrong:
        tables += ["## What was wrong", "\n".join(wrong)]
    return "\n\n".join(tables)


def legs_table(judged: Sequence[Judged]) -> str:
    """A line for each leg: what it ran, and what its books say."""
    lines = [
        "| runs of | runs | iterations | kills | lost groups | doubled groups | other differences |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for leg in dict.fromkeys(run.leg for run in judged):
        runs = [run for run in judged if run.leg == leg]
        numbers = [
            len(runs),
            sum(run.num_iterations for run in runs),
            sum(strike.hit for run in runs for strike in run.strikes),
            sum(len(run.ledger.lost) for run in runs),
            sum(len(run.ledger.doubled) for run in runs),
            sum(len(run.ledger.wrong) for run in runs),
        ]
        lines.append(f"| {leg} | " + " | ".join(str(number) for number in numbers) + " |")
    return "\n".join(lines)


def kills_table(judged: Sequence[Judged]) -> str:
    """A line for each kind and phase, and one for each kind and each phase alone."""
    lines = [
        "| kind | phase | kills | recovery s, median | worst | lost | doubled |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    pairs = [(kind, phase) for kind in KINDS for phase in PHASES]
    alone = [*((kind, "all") for kind in KINDS), *(("all", phase) for phase in PHASES)]
    for kind, phase in [*pairs, *alone]:
        lines.append(_line(judged, kind, phase))
    return "\n".join(line for line in lines if line)


def _line(judged: Sequence[Judged], kind: str, phase: str) -> str:
    def belongs(strike: Strike) -> bool:
        return strike.hit and kind in ("all", strike.kind) and phase in ("all", strike.phase)

    runs = [run for run in judged if any(belongs(strike) for strike in run.strikes)]
    seconds = [s.recovery_s for run in runs for s in run.strikes if belongs(s)]
    if not seconds:
        return ""
    lost = sum(len(run.ledger.lost) for run in runs)
    doubled = sum(len(run.ledger.doubled) for run in runs)
    return (
        f"| {kind} | {phase} | {len(seconds)} | {median(seconds):.1f} | {max(seconds):.1f} | "
        f"{lost} | {doubled} |"
    )


def shortfalls(judged: Sequence[Judged], kills: int = 100, each: int = 10) -> list[str]:
    """Say what the long form promises and these runs do not keep."""
    hits = [strike for run in judged for strike in run.strikes if strike.hit]
    found = [] if len(hits) >= kills else [f"{len(hits)} kills, not {kills}"]
    for name, values in (("kind", KINDS), ("phase", PHASES)):
        for value in values:
            count = sum(getattr(strike, name) == value for strike in hits)
            if count < each:
                found.append(f"{count} kills of {name} {value}, not {each}")
    for run in judged:
        ledger = run.ledger
        if not ledger.is_exact:
            found.append(f"{run.leg}: lost {ledger.lost}, doubled {ledger.doubled}, {ledger.wrong}")
    return found
