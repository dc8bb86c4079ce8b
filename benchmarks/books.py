"""Which of a run's groups its surviving history consumed: each once, if the books are right. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.buffer import REPLACEMENT_STRIDE


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Positions in the prompts' order, whatever attempt at them was consumed."""

    num_groups: int
    lost: list[int]
    """Consumed by no iteration."""
    doubled: list[int]
    """Consumed more than once."""
    strangers: list[int]
    """Beyond the run's end."""

    def counts(self) -> dict[str, int]:
        """How many of each, for a page."""
        return {
            "groups": self.num_groups,
            "lost": len(self.lost),
            "doubled": len(self.doubled),
            "unexpected": len(self.strangers),
        }


def check_books(rows: Sequence[Mapping[str, Any]], num_positions: int) -> Books:
    """Compare the `group_ids` of metrics.jsonl's rows with the first positions."""
    ids = [group for row in rows for group in row["group_ids"]]
    times = Counter(group % REPLACEMENT_STRIDE for group in ids)
    wanted = range(num_positions)
    return Books(
        num_groups=len(ids),
        lost=[position for position in wanted if not times[position]],
        doubled=sorted(position for position, count in times.items() if count > 1),
        strangers=sorted(times.keys() - set(wanted)),
    )
