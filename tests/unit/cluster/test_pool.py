"""The handshake: what a worker answers to a push decides whether it gets calls."""

from collections import deque

import pytest

from cluster.backend import WeightsAnswer
from cluster.pool import Call, WeightsNeverArrived
from rollout.records import WeightReport
from tests.unit.cluster.fleets import controller_of

WANTED = WeightsAnswer(tensors={}, version=3, checksum="sum", num_bytes=4)
GOOD = WeightReport(version=3, num_tensors=1, checksum="sum")


def pool_that_answers(tmp_path, answers, num_workers=2):
    """A pool with a call for version 3; worker 0 answers pushes with `answers`, the others well."""
    controller, backend, _ = controller_of(tmp_path, num_workers=num_workers)
    left, used = deque(answers), []

    def load(worker, version, tensors):
        return backend._later(
            ("worker", worker), "load", lambda: left.popleft() if worker == 0 and left else GOOD
        )

    def start(worker):
        used.append(worker)
        return backend._later(("worker", worker), "sample", lambda: None)

    backend.load_weights = load
    calls = [Call(name="a call", weights=WANTED, start=start, on_answer=lambda call, _: None)]
    return controller.pool, calls, used


@pytest.mark.parametrize(
    "bad",
    [
        WeightReport(version=3, num_tensors=1, checksum="other"),
        WeightReport(version=2, num_tensors=1, checksum="sum"),
    ],
    ids=["checksum", "version"],
)
@pytest.mark.parametrize("num_bad", [1, 2])
def test_one_mismatch_is_forgiven_and_a_second_one_quarantines(tmp_path, bad, num_bad):
    pool, calls, _ = pool_that_answers(tmp_path, [bad] * num_bad)
    pool.submit(calls)
    pool.events.until(lambda: calls[0].done)
    pool.submit(
        [Call(name="b", weights=WANTED, start=calls[0].start, on_answer=lambda call, _: None)]
    )
    pool.events.until(lambda: not pool.num_calls and all(w.holds for w in pool.crew.ready))
    assert pool.crew.num_quarantined == (num_bad == 2)
    assert (0 in pool.crew.members) == (num_bad == 1)


def test_the_run_stops_when_the_last_worker_does_not_take_up_weights(tmp_path):
    bad = WeightReport(version=3, num_tensors=1, checksum="other")
    pool, calls, used = pool_that_answers(tmp_path, [bad, bad], num_workers=1)
    pool.submit(calls)
    with pytest.raises(
        WeightsNeverArrived, match=r"no rollout worker holds policy version 3.*learner.lora_targets"
    ):
        pool.events.until(lambda: calls[0].done)
    assert used == []
