"""benchmarks/scaling*.py without Ray: what the records say of a run, the climb in virtual time, the page."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling, scaling_elastic, scaling_lag, scaling_recovery, scaling_workers
from benchmarks.scaling_climb import (
    Answer,
    Log,
    Reading,
    Rung,
    climb,
    ledger,
    median_rate,
    publish_seconds,
    rate,
    rates,
)
from benchmarks.scaling_controller import measure_controller, seconds_of
from benchmarks.scaling_run import WatchedRun, ready_workers
from benchmarks.scaling_setup import Work, make_config
from cluster.costs import busiest_workers, step_plan
from tests.fake_backend import FakeBackend


def reading(at_s: float, **counters: Any) -> Reading:
    return Reading(at_s=at_s, **({"busy_s": 0.0, "cpu_s": 0.0, "answers": 0} | counters))


def rung(workers: int, begin_s: float, end_s: float) -> Rung:
    return Rung(workers=workers, begin=reading(begin_s), end=reading(end_s))


def answers(worker: int, *times_s: float, images: int = 2) -> list[Answer]:
    return [Answer(worker=worker, at_s=at_s, images=images) for at_s in times_s]


# rates


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.99])
def test_a_rate_does_not_depend_on_where_in_a_call_the_window_begins(offset: float) -> None:
    steady = answers(0, *(number + offset for number in range(40)))
    assert rate(steady, 10.0, 17.5) == pytest.approx(2.0)


def test_workers_rates_are_added_up_and_one_without_two_answers_adds_nothing() -> None:
    found = [*answers(0, 1, 2, 3), *answers(1, 1.5, 3.5), *answers(2, 2.0)]
    assert rate(found, 0.0, 4.0) == pytest.approx(2.0 + 1.0)


def test_what_came_before_and_after_the_window_is_left_out() -> None:
    log = Log(answers=answers(0, 0.1, 0.2, 0.3, 10, 11, 12, 13, 14, 15, 16, 19.1, 19.2, 19.3))
    assert median_rate(log, rung(1, 9.5, 16.5)) == pytest.approx(2.0)


def test_a_rung_s_rate_is_the_median_of_its_parts() -> None:
    log = Log(answers=answers(0, 1, 2, 3, 4, 6, 8, 9, 10, 11))
    assert rates(log, rung(1, 0.5, 12.5)) == pytest.approx([2.0, 1.0, 2.0])
    assert median_rate(log, rung(1, 0.5, 12.5)) == pytest.approx(2.0)


def test_a_stall_inside_a_window_counts() -> None:
    assert rate(answers(0, 1, 2, 6, 7), 0, 8) == pytest.approx(1.0)


def test_counters_grow_per_second_of_the_window() -> None:
    found = Rung(
        workers=1,
        begin=reading(10.0, busy_s=1.0, answers=5),
        end=reading(20.0, busy_s=3.0, answers=25),
    )
    assert (found.per_s("busy_s"), found.per_s("answers")) == (0.2, 2.0)


def test_efficiency_is_measured_by_the_first_rung() -> None:
    rungs = [{"workers": 2, "images_per_s": 4.0}, {"workers": 8, "images_per_s": 12.0}]
    assert scaling_workers.efficiency(rungs) == [1.0, 0.75]


# publishes, ledger


def test_a_publish_counts_when_all_workers_proved_it_before_the_next() -> None:
    log = Log(
        rows=[{"elapsed_s": at_s} for at_s in (1.0, 11.0, 20.0, 30.0, 40.0)],
        pushes=[1.5, 11.2, 11.7, 20.1, 30.3, 30.4, 40.1, 40.2],
    )
    assert publish_seconds(log, rung(2, 10.0, 40.0)) == pytest.approx([0.7, 0.4])


def test_the_ledger_names_what_is_missing_twice_or_strange() -> None:
    rows = [{"group_ids": [0, 1]}, {"group_ids": [2, 2]}, {"group_ids": [4, 9]}]
    assert ledger(rows[:1], 2) == {"groups": 2, "lost": 0, "doubled": 0, "unexpected": 0}
    assert ledger(rows, 2) == {"groups": 6, "lost": 2, "doubled": 1, "unexpected": 1}


# the climb, in virtual time


def virtual_climb(
    work: Work, counts: list[int], window_s: float, seconds: dict[str, float], **hooks: Any
) -> Log:
    config = make_config(work)
    backend = FakeBackend(step_plan(config)[0])
    backend.seconds = seconds.__getitem__
    for name, hook in hooks.items():
        setattr(backend, name, hook)
    return climb(config, backend, counts, settle_s=5.0, window_s=window_s)


QUICK = {"sample": 1.0, "score": 0.01, "load": 0.01, "learn": 0.1, "weights": 0.1, "start": 2.0}


def test_virtual_workers_scale_linearly_and_the_climb_ends() -> None:
    work = Work(call_s=1.0, calls=64)
    log = virtual_climb(work, [1, 8], 30.0, QUICK)
    assert [found.workers for found in log.rungs] == [1, 8]
    one, eight = (median_rate(log, found) for found in log.rungs)
    assert one == pytest.approx(2.0, rel=0.02)
    assert 0.9 <= eight / (8 * one) <= 1.0
    assert ledger(log.rows, work.calls) | {"groups": 0} == dict.fromkeys(
        ("groups", "lost", "doubled", "unexpected"), 0
    )
    first, second = log.rungs
    assert second.begin.at_s - first.end.at_s >= QUICK["start"] + 5.0, "starts are no steady state"


def test_without_a_lag_every_version_is_proved_by_all_workers() -> None:
    log = virtual_climb(Work(call_s=0.1, calls=8, lag=0), [1, 4], 10.0, QUICK | {"sample": 0.1})
    for found in log.rungs:
        seconds = publish_seconds(log, found)
        assert len(seconds) > 3
        assert seconds == pytest.approx([QUICK["load"]] * len(seconds))


def test_a_worker_lost_in_a_window_begins_it_anew() -> None:
    deaths = iter([False] * 10 + [True])

    def dying(part: Any, kind: str) -> bool:
        return (part[0], kind) == ("worker", "sample") and next(deaths, False)

    log = virtual_climb(Work(call_s=1.0, calls=8), [2], 20.0, QUICK, dying=dying)
    assert log.num_lost == 1
    inside = {answer.worker for answer in log.answers if log.rungs[0].has(answer.at_s)}
    assert inside == {0, 2}, "worker 1 died, worker 2 took its place before the window"


def test_a_run_that_ends_before_the_last_rung_is_no_measurement() -> None:
    config = make_config(Work(call_s=1.0, calls=2))
    short = config.model_copy(update={"run": config.run.model_copy(update={"num_iterations": 1})})
    backend = FakeBackend(step_plan(config)[0])
    with pytest.raises(RuntimeError, match="before the last rung"):
        climb(short, backend, [1], settle_s=100.0, window_s=100.0)


def test_the_controller_s_figures_come_from_a_virtual_run() -> None:
    figures = measure_controller([4, 8], settle_s=20.0, window_s=60.0)
    assert [found["workers"] for found in figures["rungs"]] == [4, 8]
    for found in figures["rungs"]:
        assert 0 < found["busy_frac"] <= found["process_frac"]
        assert found["answers_per_s"] >= 1.5 * found["workers"] / 20, "sampled, and scored"
    assert figures["ledger"]["doubled"] == figures["ledger"]["lost"] == 0
    assert seconds_of(1)("sample") == seconds_of(1)("sample")


# configs


def test_work_becomes_a_config_that_keeps_the_workers_busy() -> None:
    config = make_config(Work(call_s=1.0, calls=512, learn_s=2.0, workers=3))
    assert config.model.path.startswith("sleep:call_s=0.5,learn_call_s=0.5,")
    assert busiest_workers(config) == 1024
    assert config.rollout.workers.start == 3
    plan, _ = step_plan(config)
    assert (plan.trained, plan.scored) == ((True, False), (2,))
    assert config.learner.micro_batch * 4 == 512 * 2
    with pytest.raises(ValueError, match="calls = 3"):
        make_config(Work(call_s=1.0, calls=3, learn_s=1.0))


# lag


def seconds(total: float) -> dict[str, float]:
    return {"total": total, "rollout": total / 2, "learn": total / 2, "publish": 0.0}


LAG = {
    "phase_s": 6.0,
    "workers": 2,
    "lags": {
        "0": {"images_per_iteration": 24, "seconds": [seconds(s) for s in (90, 80, 12, 12, 13, 1)]},
        "1": {"images_per_iteration": 24, "seconds": [seconds(s) for s in (90, 80, 6, 7, 6, 1)]},
    },
}


def test_steady_iterations_leave_out_the_ends() -> None:
    totals = [one["total"] for one in scaling_lag.steady(LAG["lags"]["0"]["seconds"])]
    assert totals == [12, 12, 13]
    assert scaling_lag.gain(LAG) == 2.0
    with pytest.raises(ValueError, match="3 iterations leave none"):
        scaling_lag.steady([seconds(1.0)] * 3)


# runs watched from outside


def row(ready: int, images_per_s: float = 1.0, target: int | None = None, **more: Any) -> Any:
    parts = {
        "rollout_workers": {"ready": ready, "target": target or ready},
        "reward_servers": {"a": {"ready": 2, "target": 2}},
        "lost": {"rollout_workers": 0, "reward_servers": 0},
    }
    return {"images_per_s": images_per_s, "parts": parts, "incarnation": 0, **more}


def test_phases_leave_out_the_iterations_in_which_workers_come_and_go() -> None:
    rates_by_row = [(1, 9), (1, 2), (1, 2), (1, 9), (2, 9), (3, 9), (3, 6), (3, 5), (3, 9)]
    rows = [row(ready, speed) for ready, speed in [*rates_by_row, (1, 9), (1, 2), (1, 9)]]
    found = scaling_elastic.phases(rows)
    assert [(phase["workers"], phase["each"]) for phase in found] == [
        (1, [2, 2]),
        (3, [6, 5]),
        (1, [2]),
    ]
    assert scaling_elastic.gain(found) == 2.75


def test_a_missing_part_is_no_full_strength() -> None:
    assert scaling_recovery.at_full_strength(row(3))
    assert not scaling_recovery.at_full_strength(row(2, target=3))


class Ended:
    """A process that has ended by itself."""

    returncode = 3

    def poll(self) -> int:
        return self.returncode


def test_rows_are_read_whole_and_once_and_an_ended_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("out of luck")
    process: Any = Ended()
    run = WatchedRun(tmp_path, process, tmp_path / "log.txt")
    run.look()
    assert run.rows == []
    text = "".join(json.dumps(row(ready)) + "\n" for ready in (1, 2, 3))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(text[:-5])
    assert run.wait(lambda found: ready_workers(found) == 2, 0) == 1
    assert len(run.rows) == 2, "the third line is not whole yet"
    metrics.write_text(text)
    assert run.wait(lambda found: True, 2) == 2
    assert [ready_workers(found) for found in run.rows] == [1, 2, 3]
    assert run.seen_s == sorted(run.seen_s)
    with pytest.raises(RuntimeError, match=r"ended \(3\): out of luck"):
        run.wait(lambda found: True, 3)


# the page and the command line


EXACT = {"groups": 128, "lost": 0, "doubled": 0, "unexpected": 0}
FIGURES: dict[str, dict[str, Any]] = {
    "workers": {
        "call_s": 1.0,
        "calls_per_batch": 512,
        "window_s": 60.0,
        "private_mb": 321.4,
        "lost": 0,
        "ledger": EXACT,
        "rungs": [
            {
                "workers": workers,
                "images_per_s": speed,
                "each": [speed] * 3,
                "busy_frac": 0.1,
                "process_frac": 0.2,
                "answers_per_s": 3.0 * workers,
            }
            for workers, speed in ((1, 2.0), (64, 124.8))
        ],
    },
    "controller": {
        "call_s": 20.0,
        "calls_per_batch": 2000,
        "window_s": 60.0,
        "ledger": EXACT,
        "rungs": [
            {"workers": 1000, "busy_frac": 0.123, "process_frac": 0.3, "answers_per_s": 125.0}
        ],
    },
    "lag": LAG,
    "publish": {
        "mb": 4.0,
        "window_s": 60.0,
        "lost": 0,
        "ledger": EXACT,
        "rungs": [{"workers": 1, "seconds": [0.1, 0.2, 0.4]}, {"workers": 64, "seconds": []}],
    },
    "recovery": {
        "usual_s": 2.1,
        "ledger": EXACT,
        "kills": {
            part: [{"next_row_s": 3.0, "whole_s": 9.0}, {"next_row_s": 5.0, "whole_s": 11.0}]
            for part in scaling_recovery.PARTS
        },
    },
    "elastic": {
        "call_s": 0.5,
        "calls_per_batch": 18,
        "ledger": EXACT,
        "phases": [
            {"workers": workers, "images_per_s": speed, "each": [speed, speed]}
            for workers, speed in ((1, 4.0), (3, 11.6), (1, 4.0))
        ],
    },
}
HEADLINES = {
    "workers": "64 workers reach **0.975** of 64 times",
    "controller": "busy **0.12** of the time (asked for: at most 0.5), at 125 answers a second",
    "lag": "k = 1 has **2.00** times",
    "publish": "| 1 | 0.200 | 0.400 | 3 |",
    "recovery": "| learner | 4.0 | 5.0 | 10.0 | 11.0 | 2 |",
    "elastic": "**2.90** times the images/s of one",
}


def test_every_item_has_a_section_that_is_written_alone(tmp_path: Path) -> None:
    path, images = tmp_path / "scaling.md", tmp_path / "images"
    scaling.write_section(tmp_path, "lag", FIGURES["lag"], ["python", "-m", "a b"])
    page = path.read_text()
    assert HEADLINES["lag"] in page
    assert page.count("Not measured yet.") == len(scaling.ITEMS) - 1
    assert "`python -m 'a b'`, on " in page
    path.write_text(page.replace("Not written yet.", "It scales."))
    for name, figures in FIGURES.items():
        scaling.write_section(tmp_path, name, figures, ["x"])
    page = path.read_text()
    assert "Not measured yet." not in page
    assert "It scales." in page
    for name, item in scaling.ITEMS.items():
        assert HEADLINES[name] in page
        assert (f"(images/scaling_{name}.png)" in page) == (item.draw is not None)
    drawn = {name for name, item in scaling.ITEMS.items() if item.draw}
    assert {file.name for file in images.iterdir()} == {f"scaling_{name}.png" for name in drawn}
    assert all(file.stat().st_size > 2000 for file in images.iterdir())


def test_main_measures_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def item(name: str) -> scaling.Item:
        def measure(args: Namespace) -> dict[str, Any]:
            asked.append(name)
            return FIGURES[name]

        return scaling.Item(title=name, measure=measure, text=scaling.ITEMS[name].text)

    monkeypatch.setattr(scaling, "ITEMS", {name: item(name) for name in FIGURES})
    monkeypatch.setattr(scaling.os, "environ", {})
    out = tmp_path / "figures.json"
    words = ["--docs", str(tmp_path), "--out", str(out), "--only", "lag", "elastic"]
    assert scaling.main(words) == 0
    assert asked == ["lag", "elastic"] == list(json.loads(out.read_text()))
    assert "**2.90** times" in capsys.readouterr().out
    assert "**2.90** times" in (tmp_path / "scaling.md").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ["--workers", "2,1"],
        ["--workers", "0,1"],
        ["--iterations", "3"],
        ["--kills", "0"],
        ["--window-s", "0"],
        ["--only", "nothing"],
    ],
)
def test_impossible_numbers_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        scaling.parse(words)


def test_the_default_measures_everything() -> None:
    args = scaling.parse([])
    assert args.only == list(FIGURES)
    assert args.workers == [1, 2, 4, 8, 16, 32, 64]
    assert args.fakes[-1] == 1000
