"""What a finished run says of itself: the content of summary.json, which `docs/formats.md` documents."""

from pathlib import Path
from typing import Any

from cluster.config import RunConfig
from cluster.evaluation_table import build_section, read_jsonl
from cluster.looks import AFTER, BEFORE, Looks
from cluster.run_folder import evaluation_lines
from cluster.run_state import RunState


def build_summary(
    folder: Path, config: RunConfig, state: RunState, looks: Looks, elapsed_s: float
) -> dict[str, Any]:
    """Compare the evaluations before and after, and add up what the run took; `elapsed_s` is all of its time."""
    before, after = (read_jsonl(evaluation_lines(folder, name)) for name in (BEFORE, AFTER))
    return {
        "status": "finished",
        "iterations": state.consumed,
        "weights": config.evaluation.weights,
        "evaluation": build_section(before, after, looks.columns),
        "counts": state.counts,
        "evaluation_counts": looks.counts(),
        "seconds": {**state.seconds, "total": elapsed_s},
        "rollbacks": state.rollbacks,
    }
