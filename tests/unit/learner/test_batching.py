"""The invariants that learner/batching.py states, for many sizes."""

import itertools

import numpy as np
import pytest

from learner.batching import Update, plan_updates

# M, T, updates, ranks, micro_batch: even and uneven splits, one pair in all, more rows than pairs.
SIZES = [
    (16, 4, 1, 1, 16),
    (16, 4, 2, 2, 8),
    (16, 4, 4, 2, 5),
    (7, 3, 2, 3, 4),
    (5, 1, 1, 2, 64),
    (3, 6, 3, 2, 4),
    (1, 1, 1, 1, 1),
    (64, 9, 2, 4, 32),
]


def valid_pairs(num: int, num_steps: int) -> np.ndarray:
    """The first step of every trajectory and a random half of the others."""
    valid = np.random.default_rng(num * 100 + num_steps).random((num, num_steps)) < 0.5
    valid[:, 0] = True
    return valid


def all_ranks(size: tuple[int, ...], seed: int = 3) -> tuple[np.ndarray, list[list[Update]]]:
    num, num_steps, num_updates, num_ranks, micro_batch = size
    valid = valid_pairs(num, num_steps)
    plans = [
        plan_updates(
            valid,
            num_updates=num_updates,
            rank=rank,
            num_ranks=num_ranks,
            micro_batch=micro_batch,
            seed=seed,
        )
        for rank in range(num_ranks)
    ]
    return valid, plans


def counted(update: Update) -> list[tuple[int, int]]:
    return [
        (int(m), int(t))
        for micro in update.micro_batches
        for m, t, w in zip(micro.trajectories, micro.steps, micro.weights, strict=True)
        if w > 0
    ]


@pytest.mark.parametrize("size", SIZES)
def test_every_valid_pair_is_trained_exactly_once(size: tuple[int, ...]) -> None:
    valid, plans = all_ranks(size)
    pairs = [pair for plan in plans for update in plan for pair in counted(update)]
    assert sorted(pairs) == [(int(m), int(t)) for m, t in np.argwhere(valid)]


@pytest.mark.parametrize("size", SIZES)
def test_an_updates_weights_sum_to_one_over_the_ranks_and_are_all_equal(
    size: tuple[int, ...],
) -> None:
    _, plans = all_ranks(size)
    for updates in zip(*plans, strict=True):
        weights = np.concatenate([m.weights for u in updates for m in u.micro_batches])
        assert set(weights[weights > 0]) == {1 / updates[0].num_transitions}
        assert weights.sum() == pytest.approx(1, abs=1e-12)
        assert len({update.num_transitions for update in updates}) == 1


@pytest.mark.parametrize("size", SIZES)
def test_ranks_run_equally_many_micro_steps_of_one_shape(size: tuple[int, ...]) -> None:
    _, plans = all_ranks(size)
    for updates in zip(*plans, strict=True):
        assert len({len(update.micro_batches) for update in updates}) == 1
        for micro in (micro for update in updates for micro in update.micro_batches):
            assert micro.trajectories.shape == micro.steps.shape == (size[-1],)


@pytest.mark.parametrize("size", SIZES)
def test_rows_that_fill_up_are_valid_pairs(size: tuple[int, ...]) -> None:
    valid, plans = all_ranks(size)
    for micro in (micro for plan in plans for update in plan for micro in update.micro_batches):
        assert valid[micro.trajectories, micro.steps].all()


@pytest.mark.parametrize("size", SIZES)
def test_a_trajectory_stays_whole_on_one_rank_in_one_update(size: tuple[int, ...]) -> None:
    valid, plans = all_ranks(size)
    for update in (update for plan in plans for update in plan):
        pairs = counted(update)
        for trajectory in {m for m, _ in pairs}:
            assert sum(m == trajectory for m, _ in pairs) == valid[trajectory].sum()


def test_an_updates_pairs_do_not_depend_on_ranks_or_micro_batch() -> None:
    sets = []
    for num_ranks, micro_batch in itertools.product((1, 2, 4), (3, 16)):
        _, plans = all_ranks((16, 5, 4, num_ranks, micro_batch))
        sets.append(
            [
                sorted(pair for update in us for pair in counted(update))
                for us in zip(*plans, strict=True)
            ]
        )
    assert all(found == sets[0] for found in sets)


def test_the_seed_decides_which_trajectories_an_update_holds() -> None:
    first, again, other = (all_ranks((16, 5, 2, 1, 8), seed)[1][0][0] for seed in (1, 1, 2))
    assert counted(first) == counted(again)
    assert {m for m, _ in counted(first)} != {m for m, _ in counted(other)}


def test_more_updates_than_valid_pairs_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"update 2 of 3 has no valid transition: 2 trajectories with 2 valid"
    ):
        plan_updates(
            np.ones((2, 1), bool), num_updates=3, rank=0, num_ranks=1, micro_batch=4, seed=0
        )


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="micro_batch = 0 must be >= 1"):
        plan_updates(
            np.ones((2, 1), bool), num_updates=1, rank=0, num_ranks=1, micro_batch=0, seed=0
        )
