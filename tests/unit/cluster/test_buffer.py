"""The buffer's invariant: every position is consumed once, in order, at most k versions stale."""

import random

import pytest

from cluster.buffer import REPLACEMENT_STRIDE, TrajectoryBuffer


def drain_admissions(buffer):
    admissions = []
    while (admission := buffer.admit()) is not None:
        admissions.append(admission)
    return admissions


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_admission_stops_at_capacity_and_names_the_version_by_arithmetic(lag):
    buffer = TrajectoryBuffer(groups_per_batch=4, max_policy_lag=lag, num_batches=6)
    admissions = drain_admissions(buffer)
    assert [a.position for a in admissions] == list(range(4 * (lag + 1)))
    assert [a.policy_version for a in admissions] == [
        max(0, a.position // 4 - lag) for a in admissions
    ]
    assert buffer.num_open == buffer.capacity == 4 * (lag + 1)


def test_a_batch_is_ready_only_whole_and_comes_out_in_order_of_position():
    buffer = TrajectoryBuffer(groups_per_batch=3, max_policy_lag=1, num_batches=2)
    drain_admissions(buffer)
    for group_id in (5, 3, 2, 0):
        buffer.seal(group_id, f"group {group_id}")
        assert not buffer.batch_ready()
    buffer.seal(1, "group 1")
    assert buffer.batch_ready()
    assert buffer.consume() == ["group 0", "group 1", "group 2"]
    assert not buffer.batch_ready()
    assert buffer.num_sealed == 2


def test_a_dropped_position_is_admitted_again_first_with_a_deterministic_replacement_id():
    buffer = TrajectoryBuffer(groups_per_batch=2, max_policy_lag=0, num_batches=2)
    first, _ = drain_admissions(buffer)
    buffer.drop(first.group_id)
    again = buffer.admit()
    assert (again.position, again.group_id) == (0, REPLACEMENT_STRIDE)
    buffer.drop(again.group_id)
    third = buffer.admit()
    assert (third.position, third.group_id, third.policy_version) == (0, 2 * REPLACEMENT_STRIDE, 0)
    assert buffer.num_dropped == 2


def test_a_late_answer_of_a_dropped_group_is_our_own_mistake():
    buffer = TrajectoryBuffer(groups_per_batch=1, max_policy_lag=0, num_batches=1)
    admission = buffer.admit()
    buffer.drop(admission.group_id)
    buffer.admit()
    with pytest.raises(AssertionError, match="group 0 is not open"):
        buffer.seal(0, "stale")


def test_a_resumed_buffer_goes_on_where_the_batches_ended():
    buffer = TrajectoryBuffer(groups_per_batch=2, max_policy_lag=0, num_batches=5, consumed=3)
    admissions = drain_admissions(buffer)
    assert [(a.position, a.policy_version) for a in admissions] == [(6, 3), (7, 3)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_any_order_of_sealing_and_dropping_consumes_every_position_once_within_the_bound(seed, lag):
    rng = random.Random(seed)
    buffer = TrajectoryBuffer(groups_per_batch=3, max_policy_lag=lag, num_batches=7)
    open_, consumed = [], []
    while buffer.num_consumed < 7:
        while (admission := buffer.admit()) is not None:
            open_.append(admission)
        assert buffer.num_open + buffer.num_sealed <= buffer.capacity
        if open_ and not (buffer.batch_ready() and rng.random() < 0.5):
            admission = open_.pop(rng.randrange(len(open_)))
            if rng.random() < 0.2:
                buffer.drop(admission.group_id)
            else:
                buffer.seal(admission.group_id, admission)
        elif buffer.batch_ready():
            batch, items = buffer.num_consumed, buffer.consume()
            assert all(0 <= batch - item.policy_version <= lag for item in items)
            consumed += [item.position for item in items]
    assert consumed == list(range(21))
