"""Parts that die, hang, crash or lose data at any moment: every group is still trained on once, in order."""

import random
from collections import Counter

import pytest

from cluster.backend import PartLost
from cluster.controller import StartPoint
from cluster.crew import CrewLost
from tests.unit.cluster.fleets import controller_of, run_with_roll_backs

LEDGERS = {
    lag: [[(4 * b + i, max(0, b - lag)) for i in range(4)] for b in range(4)] for lag in (0, 1, 2)
}
"""What is trained on whatever happens, by max_policy_lag."""


def counts(records):
    return [
        (r.rollout_stats.num_images, r.num_scored, r.num_dropped, sum(r.failures.values()))
        for r in records
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_workers_and_servers_killed_at_random_cost_nothing_and_double_nothing(tmp_path, lag, seed):
    def kill_at_random(backend):
        dice = random.Random(seed)
        odds = {"sample": 0.2, "load": 0.2, "score": 0.02}
        backend.dying = lambda part, kind: dice.random() < odds.get(kind, 0)

    controller, backend, records = controller_of(
        tmp_path,
        f"run.max_policy_lag={lag}",
        "rollout.samples_per_slice=2",
        "faults.call_attempts=20",
        "faults.losses_in_a_row=50",
        num_workers=3,
        seed=seed,
        before=kill_at_random,
    )
    controller.run()
    lost = controller.fleet.status()["lost"]
    assert lost["rollout_workers"] + lost["reward_servers"] > 0
    assert backend.trained == LEDGERS[lag]
    assert backend.sampled_shapes == {2}, "a call made again has the shape that it had"
    calm, _, undisturbed = controller_of(
        tmp_path, f"run.max_policy_lag={lag}", "rollout.samples_per_slice=2", num_workers=3
    )
    calm.run()
    assert counts(records) == counts(undisturbed)


@pytest.mark.parametrize("seed", range(6))
def test_data_that_went_away_with_its_node_is_made_again_and_counted_once(tmp_path, seed):
    controller, backend, records = controller_of(tmp_path, "faults.call_attempts=9", seed=seed)
    make, dice, kept = backend._sample, random.Random(seed), []

    def sample(requests):
        answer = make(requests)
        kept.append(answer)  # so that no other object gets its id
        if dice.random() < 0.3:
            backend.lost_data |= {id(answer.previews)}
        elif dice.random() < 0.3:
            backend.lost_data |= {id(answer.slices)}
        return answer

    backend._sample = sample
    controller.run()
    assert backend.lost_data
    assert backend.trained == LEDGERS[0]
    assert [images for images, *_ in counts(records)] == [16] * 4
    assert [scored for _, scored, *_ in counts(records)] == [4 * (3 * 4 + 1)] * 4


def test_a_call_that_always_raises_ends_the_run_with_its_own_error(tmp_path):
    controller, backend, _ = controller_of(tmp_path, num_workers=4)
    backend.crashing = lambda worker, groups: 6 in groups
    with pytest.raises(RuntimeError, match="CUDA error"):
        controller.run()
    assert backend.trained == LEDGERS[0][:1]


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_whose_calls_keep_raising_is_quarantined_and_replaced(tmp_path, seed):
    controller, backend, _ = controller_of(
        tmp_path, "rollout.slices_per_call=1", num_workers=2, seed=seed
    )
    backend.crashing = lambda worker, groups: worker == 0
    controller.run()
    assert backend.trained == LEDGERS[0]
    assert controller.pool.crew.num_quarantined == 1
    assert 0 not in backend.loaded


def test_what_hangs_is_ended_and_its_work_done_by_others(tmp_path):
    def hang(backend):
        usual, number = backend.seconds, Counter()

        def seconds(kind):
            number[kind] += 1
            return 1e9 if number[kind] == 3 and kind in ("sample", "score") else usual(kind)

        backend.seconds = seconds

    controller, backend, _ = controller_of(
        tmp_path,
        "faults.call_timeout_s=30",
        "faults.score_timeout_s=30",
        "faults.straggler_factor=1e6",
        before=hang,
    )
    controller.run()
    assert backend.trained == LEDGERS[0]
    assert controller.fleet.status()["lost"] == {"rollout_workers": 1, "reward_servers": 1}


def test_a_straggler_s_call_is_given_to_a_worker_that_idles_and_counts_once(tmp_path):
    def slow(backend):
        usual, number = backend.seconds, Counter()

        def seconds(kind):
            number[kind] += 1
            return 500.0 if number[kind] == 8 and kind == "sample" else usual(kind)

        backend.seconds = seconds

    controller, backend, records = controller_of(
        tmp_path, "rollout.slices_per_call=1", num_workers=3, before=slow
    )
    controller.run()
    assert backend.trained == LEDGERS[0]
    assert controller.fleet.status()["slow_calls"] == 1
    assert backend.time_s < 100
    assert [images for images, *_ in counts(records)] == [16] * 4


def test_previews_that_take_their_server_down_each_time_become_a_typed_failure(tmp_path):
    controller, backend, records = controller_of(tmp_path)
    score = backend.score

    def deadly(reward, replica, previews, request):
        future = score(reward, replica, previews, request)
        if request.group.group_id == 5:
            backend.kill(("replica", replica))
        return future

    backend.score = deadly
    controller.run()
    assert [group % 2**40 for group, _ in backend.trained[1]] == [4, 5, 6, 7]
    assert sum(record.failures.get("server_lost", 0) for record in records) == 1
    assert sum(record.num_dropped for record in records) == 1


def test_workers_that_never_start_end_the_run_with_the_reason(tmp_path):
    def never(backend):
        backend.dying = lambda part, kind: part[0] == "worker" and kind == "start"

    with pytest.raises(CrewLost, match=r"10 of the rollout workers were lost in a row.*killed"):
        controller_of(tmp_path, before=never)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_lost_learner_goes_back_to_the_checkpoint_and_trains_the_same(tmp_path, lag, seed):
    """The controller ends with PartLost; a new one from the checkpoint gets the learner where it would have been."""
    dice = random.Random(seed)
    settings = [f"run.max_policy_lag={lag}", "run.num_iterations=6"]
    controller, backend, _ = controller_of(tmp_path, *settings, seed=seed)
    deadly, asked = set(dice.sample(range(1, 14), 3)), 0

    def die(part, kind):
        nonlocal asked
        if kind not in ("learn", "weights", "save") or backend.learner_is_dead:
            return False
        asked += 1
        return asked in deadly

    backend.dying = die
    ledger, controller = run_with_roll_backs(controller, backend)
    assert ledger == [[(4 * b + i, max(0, b - lag)) for i in range(4)] for b in range(6)]
    assert controller.incarnation >= 1


@pytest.mark.parametrize("num_lost", [1, 2])
def test_weights_that_go_away_during_their_push_send_the_run_back_once(tmp_path, num_lost):
    """The node that made them dies while one worker loads them, or while both do; later all workers are used again."""
    controller, backend, _ = controller_of(tmp_path)
    workers = controller.pool.crew.members.values()
    load_weights, lost = backend.load_weights, []

    def gone():
        raise PartLost("the node is gone", is_data=True)

    def push(worker, version, tensors):
        if version == 2 and len(lost) < num_lost:
            lost.append(worker)
            return backend._later(("worker", worker), "load", gone)
        return load_weights(worker, version, tensors)

    backend.load_weights = push
    ledger, controller = run_with_roll_backs(controller, backend)
    assert ledger == LEDGERS[0]
    assert controller.incarnation == 1
    assert len(workers) == 2
    assert not any(worker.loading for worker in workers)


@pytest.mark.parametrize("seed", range(6))
def test_workers_come_and_go_while_it_trains(tmp_path, seed):
    sizes = [3, 1, 4, 2]

    def on_iteration(record):
        controller.pool.crew.resize(sizes[record.iteration - 1])

    controller, backend, _ = controller_of(
        tmp_path, num_workers=1, on_iteration=on_iteration, seed=seed
    )
    controller.run()
    controller.events.until(lambda: len(controller.pool.crew.members) == 2)
    assert backend.trained == LEDGERS[0]
    assert controller.pool.crew.num_lost == 0
    assert len(backend.loaded) == 2


def test_a_dropped_group_keeps_its_replacement_over_a_checkpoint(tmp_path):
    start = StartPoint(consumed=1, attempts={5: 2})
    controller, backend, records = controller_of(tmp_path, start=start)
    controller.run()
    assert [group for group, _ in backend.trained[0]] == [4, 5 + 2 * (1 << 40), 6, 7]
    assert backend.sampled_shapes == {1, 2}, (
        "the dropped one fills its place, the replacement is alone"
    )
    assert [images for images, *_ in counts(records)] == [16 + 4, 16, 16]
