"""Checks that stop a run before it wastes a night: each raises a GateError that says what it saw and what to do.

The on-policy ratio gate is the learner's (`learner.checks`), the weight handshake's is in `cluster.pool`, the
canaries' in `rewards.canaries`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cluster.buffer import TrajectoryBuffer
from rewards.base import RewardFailure
from rollout.trajectory import GroupTrajectories, read_group

MAX_DROPPED_FRAC = 0.25
"""Of the groups admitted so far: more drops than that mean a broken reward, not bad luck."""


class GateError(RuntimeError):
    """A run that must not go on."""


def check_noise(batches: Sequence[Any], shared_initial_noise: bool) -> None:
    """Check that no two trajectories share noise unless the plan says so.

    Initial states must be equal within a group when shared_initial_noise, and differ otherwise; no two final
    latents may be equal, as those of trajectories with a common x_T would be if they shared their step noise.
    """
    groups = [read_group(batch) for batch in batches]
    initial = [_digests(group, 0) for group in groups]
    for group, digests in zip(groups, initial, strict=True):
        distinct = len(set(digests))
        if distinct != (1 if shared_initial_noise else len(digests)):
            raise GateError(
                f"group {group.group_id}: {distinct} different initial noises for {len(digests)} trajectories with "
                f"sampling.shared_initial_noise = {str(shared_initial_noise).lower()}; the noise seeds are broken"
            )
    firsts = [digests[0] for digests in initial]
    if len(set(firsts)) != len(firsts):
        raise GateError(
            "two groups began from the same initial noise; the noise seeds do not depend on group_id"
        )
    finals = [digest for group in groups for digest in _digests(group, -1)]
    if len(set(finals)) != len(finals):
        raise GateError(
            f"{len(finals) - len(set(finals))} of {len(finals)} trajectories ended in the same latents as another: "
            "they share their step noise. Is every transition deterministic (sampling.eta = 0)?"
        )


def _digests(group: GroupTrajectories, state: int) -> list[bytes]:
    return [np.ascontiguousarray(row).tobytes() for row in group.states[:, state]]


def check_rewards_vary(batches: Sequence[Any]) -> None:
    """Check that in at least one group of the batch the images' rewards differ: else there is nothing to learn."""
    finals = [read_group(batch).rewards[:, -1] for batch in batches]
    if all(np.ptp(values) == 0 for values in finals):
        raise GateError(
            f"the reward is the same for every image of each of the first {len(finals)} groups (the first group "
            f"has {finals[0][0]:g}), so every advantage is 0. Is the reward the right one for these prompts, and "
            "is it graded finely enough to tell the images apart?"
        )


def check_drops(num_dropped: int, buffer: TrajectoryBuffer[Any], failure: RewardFailure) -> None:
    """Stop when more than a quarter of the groups admitted since the process began, and more than 4, were dropped."""
    admitted = buffer.num_admitted
    if num_dropped > max(4, MAX_DROPPED_FRAC * admitted):
        raise GateError(
            f"{num_dropped} groups were dropped because reward {failure.reward!r} failed, of {admitted} so "
            f"far. The last failure ({failure.kind}): {failure.message}"
        )
