"""Which transitions go into which optimizer update, rank and micro-step. Pure; numpy alone.

Invariants (tests/unit/learner/test_batching.py):
  * every valid (trajectory, step) pair is in exactly one micro-batch of one update of one rank,
    with weight 1 / D, where D is the number of valid pairs of that update over ALL ranks; so an
    update's weights sum to 1;
  * which pairs an update holds depends on the seed and the number of updates, never on ranks or
    micro-batch size;
  * a trajectory stays whole: all of its steps are in one update on one rank, so a rank loads only
    its own latents;
  * in an update all ranks run equally many micro-steps, and every micro-batch has exactly
    `micro_batch` rows: rows that fill up have weight 0 and repeat a valid pair, one of the rank's
    own if it has any.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward and backward pass; B = micro_batch."""

    trajectories: NDArray[np.int64]
    """[B], in 0 .. M - 1."""
    steps: NDArray[np.int64]
    """[B], in 0 .. T - 1."""
    weights: NDArray[np.float64]
    """[B], 1 / D, or 0 for a row that only fills up."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step, as one rank sees it."""

    micro_batches: tuple[MicroBatch, ...]
    num_transitions: int
    """D, valid transitions over all ranks: the denominator."""


def plan_updates(
    valid: NDArray[np.bool_],
    *,
    num_updates: int,
    rank: int,
    num_ranks: int,
    micro_batch: int,
    seed: int,
) -> list[Update]:
    """Lay out a batch for one rank. valid: bool [M, T], the transitions that are trained, M
    trajectories.

    Trajectories are permuted by `seed`, cut into num_updates runs of (nearly) equal length, and
    dealt to the ranks in turn. Raises ValueError when a number isn't positive, or an update would
    hold no valid transition.
    """
    for name, value in {
        "num_updates": num_updates,
        "num_ranks": num_ranks,
        "micro_batch": micro_batch,
    }.items():
        if value < 1:
            raise ValueError(f"{name} = {value} must be >= 1")
    assert 0 <= rank < num_ranks, f"rank {rank} of {num_ranks}"
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(valid))
    updates: list[Update] = []
    for number, members in enumerate(np.array_split(order, num_updates)):
        denominator = int(valid[members].sum())
        if denominator == 0:
            raise ValueError(
                f"update {number} of {num_updates} has no valid transition: "
                f"{len(valid)} trajectories with {int(valid.sum())} valid transitions are too few"
            )
        most = max(int(valid[members[r::num_ranks]].sum()) for r in range(num_ranks))
        own = np.sort(members[rank::num_ranks])
        batches = _micro_batches(valid, own, -(-most // micro_batch), micro_batch, 1 / denominator)
        updates.append(Update(batches, denominator))
    return updates


def _micro_batches(
    valid: NDArray[np.bool_], own: NDArray[np.int64], count: int, micro_batch: int, weight: float
) -> tuple[MicroBatch, ...]:
    """`count` micro-batches over the valid pairs of the trajectories `own`, filled up with weight
    0."""
    rows, steps = np.nonzero(valid[own])
    trajectories = own[rows]
    fill = count * micro_batch - len(rows)
    spare = (trajectories[0], steps[0]) if len(rows) else np.argwhere(valid)[0]
    trajectories = np.concatenate([trajectories, np.full(fill, spare[0], np.int64)])
    steps = np.concatenate([steps, np.full(fill, spare[1], np.int64)])
    weights = np.repeat([weight, 0.0], [len(rows), fill])
    parts = [slice(i * micro_batch, (i + 1) * micro_batch) for i in range(count)]
    return tuple(MicroBatch(trajectories[part], steps[part], weights[part]) for part in parts)
