"""The controller against a validating in-process backend: answers in any order, parts that die at any moment."""

import gc
import weakref

import pytest

from cluster.backend import WeightsAnswer
from cluster.buffer import REPLACEMENT_STRIDE
from cluster.controller import StartPoint
from cluster.events import RanDry
from cluster.gates import GateError
from cluster.pool import WeightsNeverArrived
from tests.fake_backend import LEARNER
from tests.unit.cluster.fleets import controller_of


class Weights(dict):
    """Tensors that can be watched."""


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("lag", "slice_size"), [(0, 4), (0, 2), (1, 2), (2, 4)])
def test_every_group_is_trained_on_once_in_order_with_its_version(tmp_path, seed, lag, slice_size):
    controller, backend, records = controller_of(
        tmp_path, f"run.max_policy_lag={lag}", f"rollout.samples_per_slice={slice_size}", seed=seed
    )
    controller.run()
    assert backend.trained == [[(4 * b + i, max(0, b - lag)) for i in range(4)] for b in range(4)]
    assert [record.iteration for record in records] == [1, 2, 3, 4]
    assert backend.sampled_shapes == {2}, "every call has the same shape"
    assert sum(record.rollout_stats.num_images for record in records) == 4 * 16


def test_the_shared_initial_preview_is_scored_once_and_stands_for_the_group(tmp_path):
    controller, _, records = controller_of(tmp_path)
    controller.run()
    # 3 states of 4 samples, and one shared x_T, for each of 4 groups
    assert [record.num_scored for record in records] == [4 * (3 * 4 + 1)] * 4


@pytest.mark.parametrize("seed", range(5))
def test_a_failed_scoring_is_tried_again_and_counted(tmp_path, seed):
    controller, backend, records = controller_of(tmp_path, seed=seed)
    backend.failing = lambda group_id, attempt: group_id == 5 and attempt == 0
    controller.run()
    assert [group_id for group_id, _ in backend.trained[1]] == [4, 5, 6, 7]
    assert sum(record.failures.get("exception", 0) for record in records) == 1
    assert sum(record.num_dropped for record in records) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_group_whose_scoring_keeps_failing_is_replaced_by_a_deterministic_one(tmp_path, seed):
    controller, backend, records = controller_of(tmp_path, "rollout.samples_per_slice=2", seed=seed)
    backend.failing = lambda group_id, attempt: group_id == 5
    controller.run()
    assert [group_id for group_id, _ in backend.trained[1]] == [4, 5 + REPLACEMENT_STRIDE, 6, 7]
    assert backend.sampled_shapes == {2}, (
        "two slices a group, two a call: a replacement is a call of its own"
    )
    assert sum(record.num_dropped for record in records) == 1


def test_a_reward_that_always_fails_stops_the_run_with_its_message(tmp_path):
    controller, backend, _ = controller_of(tmp_path)
    backend.failing = lambda group_id, attempt: True
    with pytest.raises(
        GateError, match=r"groups were dropped because reward 'shapes' failed.*boom"
    ):
        controller.run()


def test_a_worker_that_never_takes_up_weights_is_quarantined_and_the_others_go_on(tmp_path):
    controller, backend, _ = controller_of(tmp_path, num_workers=3)
    backend.broken_workers = {1}
    controller.run()
    assert controller.pool.crew.num_quarantined == 1
    assert 1 not in backend.loaded
    assert len(controller.pool.crew.ready) == 3, "it was replaced"
    assert len(backend.trained) == 4


def test_the_run_stops_when_weights_arrive_nowhere(tmp_path):
    controller, backend, _ = controller_of(tmp_path)
    backend.broken_workers = {0, 1}
    with pytest.raises(WeightsNeverArrived, match="no rollout worker holds policy version 0"):
        controller.run()


def test_a_resumed_run_trains_the_rest(tmp_path):
    controller, backend, records = controller_of(tmp_path, start=StartPoint(consumed=2))
    controller.run()
    assert backend.trained == [[(4 * b + i, b) for i in range(4)] for b in (2, 3)]
    assert [record.iteration for record in records] == [3, 4]


def test_a_loop_that_runs_dry_is_an_error_and_not_a_finished_run(tmp_path):
    # with a lag, batch 2 needs version 1, which a resumed store does not hold
    start = StartPoint(consumed=2)
    controller, _, _ = controller_of(tmp_path, "run.max_policy_lag=1", start=start)
    with pytest.raises(RanDry):
        controller.run()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_no_worker_idles_while_another_gets_its_second_call(tmp_path, num_workers, seed):
    settings = ["rollout.slices_per_call=1", "rollout.samples_per_slice=2"]
    controller, backend, _ = controller_of(tmp_path, *settings, num_workers=num_workers, seed=seed)
    controller.run()
    assert backend.idle_at_second_call == []
    assert sum(backend.calls.values()) == 0


def test_a_checkpoint_in_flight_is_awaited(tmp_path):
    def on_iteration(record):
        return backend.save_checkpoint(f"step {record.iteration}", {}, [])

    controller, backend, _ = controller_of(tmp_path, on_iteration=on_iteration)
    controller.run()
    assert sorted(backend.checkpoints) == [f"step {n}" for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_versions_that_nobody_needs_are_freed_at_once(tmp_path, lag):
    """No cycle of ours keeps a version's tensors, or a call's previews, until a full garbage collection."""
    made: list[weakref.ref[Weights]] = []

    def living(record):
        alive.append(sum(ref() is not None for ref in made))

    alive: list[int] = []
    controller, backend, _ = controller_of(
        tmp_path, f"run.max_policy_lag={lag}", "run.num_iterations=8", on_iteration=living
    )

    def weights(kind):
        def answer() -> WeightsAnswer:
            tensors = Weights()
            made.append(weakref.ref(tensors))
            checksum = f"sum {backend.version}"
            return WeightsAnswer(
                tensors=tensors, version=backend.version, checksum=checksum, num_bytes=4
            )

        return backend._later(LEARNER, "weights", answer)

    backend.weights = weights
    gc.collect()
    gc.disable()
    try:
        controller.run()
    finally:
        gc.enable()
    assert max(alive) <= lag + 2, "the last k + 1, and the one that workers are about to give up"
