"""What a run knows of itself, beside the learner's weights: the state in a checkpoint's manifest."""

from dataclasses import dataclass, field

COUNTS = ("images", "transitions", "network_calls", "reward_calls")


@dataclass(slots=True, kw_only=True)
class RunState:
    """What a checkpoint holds beside the learner's own: counts of the surviving history, and where it stands."""

    consumed: int = 0
    incarnation: int = 0
    attempts: dict[str, int] = field(default_factory=dict)
    """How often the group of a position under way was dropped, by position."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    seconds: dict[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0
    rollbacks: int = 0

    def begun_anew(self) -> "RunState":
        """Return the state of a run that goes back to its beginning, keeping the evaluation before it."""
        kept = {name: s for name, s in self.seconds.items() if name == "evaluation_before"}
        return RunState(incarnation=self.incarnation + 1, rollbacks=self.rollbacks, seconds=kept)
