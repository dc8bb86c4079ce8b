"""Start-up check of a reward: inputs with a known answer, before any update trusts it.

They go through the reward's server, under its timeout: `await batcher.submit(canary_call(canaries))`, then
`judge_canaries`, then `raise_for_canaries`.
"""

import logging
from dataclasses import dataclass

import numpy as np

from rewards.base import Canaries
from rewards.records import RewardCall, RewardFailure, RewardValues

logger = logging.getLogger(__name__)


class CanaryError(ValueError):
    """A reward does not give what it says itself that it gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """What the canaries of one reward showed."""

    reward: str
    """The reward's name."""
    num_canaries: int
    """0: the reward offers none, so nothing was checked."""
    problems: list[str]
    """One line per canary outside its interval, or the failure; empty when all is well."""

    def __str__(self) -> str:
        if self.num_canaries == 0:
            return f"reward {self.reward!r}: no canaries"
        if not self.problems:
            return f"reward {self.reward!r}: {self.num_canaries} canaries pass"
        lines = "\n  ".join(self.problems)
        return f"reward {self.reward!r}: {len(self.problems)} canary problems:\n  {lines}"


def raise_for_canaries(result: CanaryResult) -> None:
    """Raise CanaryError when there are problems; log the result otherwise."""
    if result.problems:
        raise CanaryError(
            f"{result}\nThe reward is broken, or its model, options or libraries are not those it "
            "was written for; a run would train on wrong numbers. Mend it, or its `canaries`."
        )
    log = logger.info if result.num_canaries else logger.warning
    log("%s", result)


def canary_call(canaries: Canaries) -> RewardCall:
    """The canaries as a call; group and state are -1, the sample is the canary's index."""
    num = len(canaries.images)
    return RewardCall(
        images=canaries.images,
        prompts=canaries.prompts,
        metadata=canaries.metadata,
        group_ids=np.full(num, -1, np.int64),
        samples=np.arange(num, dtype=np.int32),
        states=np.full(num, -1, np.int32),
    )


def judge_canaries(
    name: str, canaries: Canaries | None, answer: RewardValues | RewardFailure | None
) -> CanaryResult:
    """Compare the answer to `canary_call(canaries)` with the intervals.

    canaries = answer = None: the reward has no canaries.
    """
    if canaries is None:
        return CanaryResult(reward=name, num_canaries=0, problems=[])
    num = len(canaries.images)
    assert answer is not None, "canaries without an answer"
    if isinstance(answer, RewardFailure):
        problem = f"scoring the {num} canaries failed ({answer.kind}): {answer.message}"
        return CanaryResult(reward=name, num_canaries=num, problems=[problem])
    problems: list[str] = []
    for k, value in enumerate(answer.columns[name]):
        low, high = canaries.low[k], canaries.high[k]
        if not low <= value <= high:
            problems.append(
                f"canary {k} (prompt {canaries.prompts[k]!r}): value {value:.6g} lies outside "
                f"[{low:.6g}, {high:.6g}]"
            )
    return CanaryResult(reward=name, num_canaries=num, problems=problems)
