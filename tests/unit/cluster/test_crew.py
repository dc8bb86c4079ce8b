"""Members that are lost before they have done anything, one by one or all at once, and deadlines of all kinds."""

from collections import Counter

import pytest

from cluster.backend import PartLost
from cluster.crew import CrewLost
from cluster.learner_start import start_learner
from tests.unit.cluster.fleets import controller_of, run_with_roll_backs

LEDGER = [[(4 * b + i, b) for i in range(4)] for b in range(4)]


def slow_once(backend, kind, at=1, when=lambda: True):
    """Have the `at`-th call of a kind take for ever; the list that is returned holds the virtual time then."""
    usual, number, hung = backend.seconds, Counter(), []

    def seconds(asked):
        number[asked] += asked == kind and when()
        if asked == kind and number[asked] == at and not hung:
            hung.append(backend.time_s)
            return 1e9
        return usual(asked)

    backend.seconds = seconds
    return hung


@pytest.mark.parametrize("moment", ["fresh", "at work"])
def test_a_node_that_takes_all_workers_at_once_is_one_loss(tmp_path, moment):
    controller, backend, _ = controller_of(tmp_path, num_workers=12)
    killed = []

    def all_at_once(part, kind):
        due = kind == "load" if moment == "fresh" else backend.version == 2
        if killed or not due or part[0] != "worker":
            return False
        killed.extend(backend.loaded)
        for worker in list(backend.loaded):
            backend.kill(("worker", worker))
        return True

    backend.dying = all_at_once
    controller.run()
    assert len(killed) == 12
    assert backend.trained == LEDGER
    assert controller.fleet.status()["lost"]["rollout_workers"] == 12


def test_a_worker_that_dies_of_each_push_is_not_replaced_for_ever(tmp_path):
    controller, backend, _ = controller_of(tmp_path, num_workers=1)
    backend.dying = lambda part, kind: kind == "load"
    with pytest.raises(CrewLost, match=r"10 of the rollout workers were lost in a row.*killed"):
        controller.run()
    assert controller.fleet.status()["lost"]["rollout_workers"] == 10
    assert backend.time_s > 60, "its replacements came later and later"


def test_one_place_where_workers_die_does_not_end_a_run_in_which_others_work(tmp_path):
    """All but the first worker and its successors die of their first push, as on a machine with a broken GPU."""
    controller, backend, _ = controller_of(
        tmp_path, "run.num_iterations=40", "faults.losses_in_a_row=3"
    )
    backend.dying = lambda part, kind: kind == "load" and part != ("worker", 0)
    controller.run()
    lost = controller.fleet.status()["lost"]["rollout_workers"]
    assert 3 < lost < 20, "with pauses between"
    assert len(backend.trained) == 40


def test_a_push_that_is_never_answered_costs_its_worker(tmp_path):
    controller, backend, _ = controller_of(tmp_path, "faults.call_timeout_s=30", num_workers=1)
    hung = slow_once(backend, "load")
    controller.run()
    assert hung
    assert backend.trained == LEDGER
    assert controller.fleet.status()["lost"]["rollout_workers"] == 1
    assert backend.time_s < 100


def test_a_worker_that_never_gets_ready_is_asked_for_again(tmp_path):
    hung = []
    controller, backend, _ = controller_of(
        tmp_path,
        "faults.start_timeout_s=30",
        num_workers=1,
        before=lambda backend: hung.append(slow_once(backend, "start")),
    )
    controller.run()
    assert hung
    assert backend.trained == LEDGER
    assert controller.fleet.status()["lost"]["rollout_workers"] == 1


@pytest.mark.parametrize("kind", ["learn", "weights", "save"])
def test_a_learner_that_hangs_is_lost_and_the_run_goes_back(tmp_path, kind):
    controller, backend, _ = controller_of(tmp_path, "faults.learner_timeout_s=30")
    hung = slow_once(backend, kind, at=2)
    ledger, controller = run_with_roll_backs(controller, backend)
    assert hung
    assert ledger == LEDGER
    assert controller.incarnation == 1
    assert backend.time_s < hung[0] + 100


def test_a_learner_without_room_is_said_to_wait_and_asked_for_again(tmp_path):
    controller, backend, _ = controller_of(tmp_path, "faults.start_timeout_s=150")
    slow_once(backend, "start")
    notes, events = [], controller.events
    started = start_learner(events, backend, controller.config.faults, notes.append)
    events.until(lambda: bool(started))
    assert notes == [
        f"the learner is not ready after {n} s; `ray status` says whether it waits for room"
        for n in (60, 120)
    ]
    events.until(lambda: backend.time_s > 400 or events.after(50, lambda: None))
    assert len(notes) == 2, "nothing more is said once it is there"


def test_what_nobody_waits_for_any_more_is_forgotten_by_the_backend(tmp_path):
    controller, backend, _ = controller_of(tmp_path)
    forgotten = []
    usual = backend.forget
    backend.forget = lambda future: (forgotten.append(future), usual(future))
    backend.dying = lambda part, kind: kind == "learn"
    with pytest.raises(PartLost):
        controller.run()
    controller.events.expect(backend.start_learner(), lambda facts: None)
    controller.fleet.abandon()
    assert len(forgotten) == 1
