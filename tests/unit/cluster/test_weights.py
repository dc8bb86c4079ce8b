"""Versions kept, and the handshake that proves a worker holds one."""

import pytest

from cluster.backend import WeightsAnswer
from cluster.weights import WeightsNeverArrived, WeightStore, WorkerTable
from rollout.records import WeightReport


def version(number, checksum="sum"):
    return WeightsAnswer(tensors={}, version=number, checksum=checksum, num_bytes=4)


def report(number, checksum="sum"):
    return WeightReport(version=number, num_tensors=1, checksum=checksum)


@pytest.mark.parametrize("lag", [0, 2])
def test_the_store_keeps_the_last_k_plus_one_versions(lag):
    store = WeightStore(lag)
    for number in range(6):
        store.publish(version(number))
        assert store.latest == number
    assert [number for number in range(6) if store.has(number)] == list(range(5 - lag, 6))
    assert store.get(5).version == 5


def test_a_resumed_store_begins_at_any_version_but_skips_none():
    store = WeightStore(1)
    store.publish(version(7))
    with pytest.raises(AssertionError):
        store.publish(version(9))


def test_a_worker_takes_no_call_while_it_loads_and_proves_its_version():
    table = WorkerTable([0, 1])
    table.sent(0)
    assert table.version[0] is None
    assert 0 in table.loading
    assert table.answered(0, report(3), version(3))
    assert table.version[0] == 3
    assert 0 not in table.loading


@pytest.mark.parametrize("answer", [report(3, "other"), report(2)], ids=["checksum", "version"])
def test_a_second_mismatch_quarantines_and_a_good_answer_in_between_forgives(answer):
    table = WorkerTable([0, 1])
    assert not table.answered(0, answer, version(3))
    assert table.answered(0, report(3), version(3))
    assert not table.answered(0, answer, version(3))
    assert table.usable() == [0, 1]
    assert not table.answered(0, answer, version(3))
    assert table.usable() == [1]


def test_the_run_stops_when_the_last_worker_is_quarantined():
    table = WorkerTable([0])
    assert not table.answered(0, report(3, "other"), version(3))
    with pytest.raises(
        WeightsNeverArrived, match=r"no rollout worker holds policy version 3.*learner.lora_targets"
    ):
        table.answered(0, report(3, "other"), version(3))


def test_the_least_busy_worker_comes_first():
    table = WorkerTable([0, 1, 2])
    table.calls = {0: 2, 1: 0, 2: 1}
    assert table.usable() == [1, 2, 0]
