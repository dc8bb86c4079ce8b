"""Versions kept, and those that a checkpoint needs; the handshake is tested with the pool."""

import pytest

from cluster.backend import WeightsAnswer
from cluster.weights import WeightStore


def version(number, checksum="sum"):
    return WeightsAnswer(tensors={}, version=number, checksum=checksum, num_bytes=4)


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


def test_a_checkpoint_gets_every_kept_version_but_the_newest():
    store = WeightStore(2)
    assert store.latest == -1
    for number in range(5):
        store.publish(version(number))
    assert [answer.version for answer in store.older()] == [2, 3]
