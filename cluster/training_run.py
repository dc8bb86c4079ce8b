"""One run from start to report: evaluate, train, evaluate, export; back to a checkpoint when the learner is lost."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from cluster.actors_backend import RayBackend
from cluster.backend import Backend, PartLost, ScaleCommand, WeightsAnswer
from cluster.config import ConfigError, RunConfig, resolve_paths
from cluster.controller import Controller, StartPoint
from cluster.costs import step_plan
from cluster.curves import curves_png
from cluster.evaluation import held_out
from cluster.fleet import make_fleet, start_fleet
from cluster.iteration import IterationRecord
from cluster.learner_start import RunGivenUp, start_learner
from cluster.looks import AFTER, BEFORE, Looks
from cluster.metrics_row import metrics_row
from cluster.open_run import write_start
from cluster.pictures import write_trajectory_picture
from cluster.progress import Progress
from cluster.remote_folder import RunPlace
from cluster.remote_path import Place
from cluster.report import write_report
from cluster.run_checkpoints import RunCheckpoints, weights_in
from cluster.run_folder import (
    BEST,
    METRICS,
    SUMMARY,
    TRAJECTORIES,
    WEIGHTS,
    append_jsonl,
    cut_unfinished_line,
    evaluation_lines,
    write_json,
)
from cluster.run_state import COUNTS, RunState
from cluster.summary import build_summary
from learner.checkpoint import CheckpointError, described
from learner.credit.base import ScoredStates
from rollout.prompts import PromptSource
from rollout.trajectory import write_ipc

log = logging.getLogger(__name__)


class TrainingRun:
    """One training run in its folder; `cluster.train` drives it."""

    def __init__(self, config: RunConfig, place: RunPlace, continued: bool):
        self.place, self.folder, self.continued = place, place.folder, continued
        self.config = resolve_paths(config, str(place.where))
        self.checkpoints = RunCheckpoints(
            place.where, place.folder, self.config.run.keep_checkpoints
        )
        self.state = RunState()
        self._before_s, self._sitting_began = 0.0, time.monotonic()
        self.plan, rule = step_plan(self.config)
        self._scored_states: ScoredStates = rule.scored_states
        prompts, looks = self.config.prompts, self.config.evaluation
        self.prompts = PromptSource(prompts.path, prompts.shuffle, self.config.run.seed)
        self.held_out = held_out(looks.path, looks.num_prompts, looks.seed)
        self.progress = Progress(self.config.run.num_iterations)
        self.controller: Controller | None = None
        self._older: list[WeightsAnswer] = []
        self._rolled_back_to: list[int] = []

    @property
    def consumed(self) -> int:
        """Iterations done."""
        return self.state.consumed

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the run, and say that it goes on."""
        self.progress.phase(name)
        began = time.monotonic()
        yield
        self._add_seconds(name, time.monotonic() - began)

    def _add_seconds(self, name: str, seconds: float) -> None:
        self.state.seconds[name] = self.state.seconds.get(name, 0.0) + seconds

    @property
    def elapsed_s(self) -> float:
        """Wall-clock seconds of this run, earlier sittings up to their last checkpoint included."""
        return self._before_s + time.monotonic() - self._sitting_began

    # start

    def begin(self) -> None:
        """Write what is run, and on what; a run that is continued does so when it is clear that it can be."""
        write_start(self.folder, self.config)
        self.place.push()

    def open(self, backend: Backend | None = None, *, control: Any = None, token: str = "") -> None:
        """Make the parts' handles; nothing starts yet. `backend`: other machines than Ray's.

        `control` is the run's control actor; `token` is what every learner rank must find in the run folder.
        """
        self.backend = backend or RayBackend(
            self.config,
            self._scored_states,
            str(self.place.where),
            control=control,
            folder_token=token,
        )
        self.fleet = make_fleet(self.config, self.backend)
        self.looks = Looks(self.config, self.folder, self.held_out, self.fleet)

    def start(self) -> None:
        """Start the actors, canaries checked; load the last checkpoint if there is one."""
        with self.phase("startup"):
            started = self._start_learner()
            start_fleet(self.config, self.fleet)
            self.fleet.events.until(lambda: bool(started))
            for crew in self.fleet.scorer.crews.values():
                self.progress.note(crew.ready[0].facts["canaries"])
        self._listen()
        if self.continued:
            cut_unfinished_line(self.folder / METRICS)
            try:
                self._load()
            except PartLost as lost:
                self._roll_back(lost)
            self._before_s = self.state.elapsed_s
            if self.consumed < self.config.run.num_iterations:
                (self.folder / SUMMARY).unlink(missing_ok=True)  # the run has not ended any more
            self.begin()

    def _start_learner(self) -> list[Any]:
        events, note = self.fleet.events, self.progress.note
        return start_learner(events, self.backend, self.config.faults, note)

    def _load(self) -> None:
        """Go on from the last whole checkpoint; before the first was written, forget what was begun.

        CheckpointError when there are checkpoints and none is whole.
        """
        found = self.checkpoints.newest()
        if found is None:
            self.progress.note("no checkpoint yet: beginning anew")
            for name in (METRICS, BEST):
                (self.folder / name).unlink(missing_ok=True)
            self.state = self.state.begun_anew()
            self._older = []
        else:
            answer = self.fleet.events.answer(self.backend.load_checkpoint(str(found)))
            self._adopt(found, *answer)
        self.checkpoints.saved_at = self.consumed
        self.looks.restart(self.consumed)

    def _adopt(self, found: Place, state: dict[str, Any], older: list[WeightsAnswer]) -> None:
        before = self.state
        self.state, self._older = RunState(**state), older
        self.state.incarnation = max(self.state.incarnation, before.incarnation) + 1
        self.state.rollbacks = max(self.state.rollbacks, before.rollbacks)
        if self.consumed > self.config.run.num_iterations:
            raise ConfigError(
                f"run.num_iterations = {self.config.run.num_iterations}, but {described(found)} is "
                f"{self.consumed} iterations in; set it higher"
            )
        if not evaluation_lines(self.folder, BEFORE).exists():
            raise ConfigError(
                f"{self.place.where} has lost its evaluation/before.jsonl, which can't be made again now"
            )
        self.progress.note(f"continuing after iteration {self.consumed} from {described(found)}")

    def _listen(self) -> None:
        """Do what `flowcredit scale` asks, whenever it does."""

        def obey(command: ScaleCommand) -> None:
            self.progress.note(f"scaling: {command}")
            self.fleet.scale(command)
            self._report()
            self._listen()

        self.fleet.events.expect(
            self.backend.next_command(), obey, lambda lost: self._listen(), background=True
        )
        self._report()

    def _report(self) -> None:
        run = self.config.run
        self.backend.report(
            {
                "iteration": self.consumed,
                "num_iterations": run.num_iterations,
                "incarnation": self.state.incarnation,
                "rollbacks": self.state.rollbacks,
                **self.fleet.status(),
            }
        )

    # go

    def go(self) -> dict[str, Any]:
        """Run to the end, back to the last checkpoint whenever the learner is lost; return the summary."""
        while True:
            try:
                return self._go()
            except PartLost as lost:
                self._roll_back(lost)

    def _go(self) -> dict[str, Any]:
        if self.consumed == 0 and not evaluation_lines(self.folder, BEFORE).exists():
            self._evaluate(BEFORE, "raw")
        self._train()
        self._evaluate(AFTER, self.config.evaluation.weights)
        return self._finish()

    def _roll_back(self, lost: PartLost) -> None:
        """Start the learner anew from the last checkpoint, under a new incarnation; workers and servers stay."""
        log.warning("the learner is lost: %s", lost.reason)
        self.progress.note(f"the learner is lost, going back to the last checkpoint ({lost})")
        self.fleet.abandon()
        self.looks.abandon()
        self.controller = None
        self.state.rollbacks += 1
        saved_at, bound = self.checkpoints.saved_at, self.config.faults.rollbacks_in_a_row
        self._rolled_back_to.append(saved_at)
        if self._rolled_back_to[-bound:] == [saved_at] * bound:
            raise RunGivenUp(
                f"the learner was lost {bound} times after iteration {saved_at}; the last time: {lost}"
            ) from lost
        with self.phase("recovery"):
            started = self._start_learner()
            self.fleet.events.until(lambda: bool(started))
            try:
                self._load()
            except PartLost as again:
                self._roll_back(again)

    def _evaluate(self, name: str, kind: str) -> None:
        """Evaluate with the learner's weights of that kind, and keep lines and pictures under `name`."""
        with self.phase(f"evaluation_{name}"):
            self.looks.begin(name, kind)
            self.looks.start(name, self.fleet.events.answer(self.backend.weights(kind)))
            self.looks.wait()
            self.place.push()

    def _look_again(self) -> None:
        """Take the looks in between that an earlier process, or incarnation, did not live to see the end of."""
        unfinished = self.looks.unfinished()
        if not unfinished:
            return
        with self.phase("evaluation_between"):
            for iteration, name, kind in unfinished:
                place = self.checkpoints.path(iteration)
                try:
                    weights = weights_in(place, kind, self.config, self.backend)
                except CheckpointError as error:
                    self.progress.note(f"evaluation {name} can't be done again: {error}")
                    self.looks.forget(name)
                else:
                    self.looks.start(name, weights)
            self.looks.wait()
            self.place.push()

    def _train(self) -> None:
        """Run the controller to the last iteration."""
        self._look_again()
        self.progress.phase("training")
        attempts = {int(position): n for position, n in self.state.attempts.items()}
        start = StartPoint(
            consumed=self.consumed,
            incarnation=self.state.incarnation,
            attempts=attempts,
            older=self._older,
        )
        self.controller = Controller(
            self.config, self.plan, self.fleet, self.prompts, self._on_iteration, start
        )
        self._older = []
        self.controller.run()
        self.looks.wait()
        self.controller = None

    def stop(self) -> None:
        """End in good order: let the learner finish its step, write a checkpoint unless the last one is as new."""
        self.progress.note("stopping: after this step")
        if self.controller is None:
            return
        try:
            self.controller.finish_step()
            if self.checkpoints.saved_at < self.consumed:
                self.fleet.events.answer(self._save_checkpoint())
        except PartLost as lost:
            self.progress.note(f"no checkpoint at the stop, the one before is valid ({lost})")

    def _on_iteration(self, record: IterationRecord) -> Any:
        """Write the iteration's row; return the future of a checkpoint when one is due."""
        lag = record.iteration - 1 - record.learner_stats.policy_version
        row = metrics_row(record, lag, self.elapsed_s)
        row |= {"incarnation": self.state.incarnation, "parts": self.fleet.status()}
        append_jsonl(self.folder / METRICS, row)
        self.state.consumed = record.iteration
        self._add_seconds("training", record.seconds["total"])
        for name in COUNTS:
            self.state.counts[name] += row["counts"][name]
        self.progress.iteration(row)
        self._report()
        if self.config.run.record_trajectories:
            path = self.folder / TRAJECTORIES / f"batch_{record.iteration:06d}.arrow"
            path.parent.mkdir(exist_ok=True)
            write_ipc(path, list(record.batches))
        looks = self._look_if_due()
        last = record.iteration == self.config.run.num_iterations
        if record.iteration % self.config.run.checkpoint_every and not last and not looks:
            return None
        write_trajectory_picture(self.folder, record.iteration, record.batches[0])
        return self._save_checkpoint()

    def _look_if_due(self) -> bool:
        """Look at the held-out prompts in between. Without a lag nobody samples meanwhile; no iteration is timed."""
        kinds = self.looks.due(self.consumed)
        if not kinds:
            return False
        controller, began = self.controller, time.monotonic()
        assert controller is not None
        if controller.stopping:
            for name, kind in kinds.items():
                self.looks.begin(name, kind)  # taken when the run goes on
            return True
        controller.held = not self.config.run.max_policy_lag
        waiting = set(kinds)

        def go_on() -> None:
            if waiting or not self.looks.done:
                return
            self.place.push()
            if controller.held:
                self._add_seconds("evaluation_between", time.monotonic() - began)
                controller.release()

        self.looks.on_end = go_on
        for name, kind in kinds.items():
            self.looks.begin(name, kind)

            def start(weights: WeightsAnswer, name: str = name) -> None:
                waiting.discard(name)
                self.looks.start(name, weights)

            self.fleet.events.expect(self.backend.weights(kind), start)
        return True

    def _save_checkpoint(self) -> Any:
        assert self.controller is not None
        self.state.attempts = {str(p): n for p, n in self.controller.buffer.attempts.items()}
        state = asdict(self.state) | {"elapsed_s": self.elapsed_s}
        self._prune()
        self.place.push()  # first: a checkpoint finds the metrics that lead to it
        folder, older = self.checkpoints.path(self.consumed), self.controller.store.older()
        self.checkpoints.saved_at = self.consumed
        return self.backend.save_checkpoint(str(folder), state, older)

    def _prune(self) -> None:
        self.checkpoints.prune([iteration for iteration, *_ in self.looks.unfinished()])

    # finish

    def _finish(self) -> dict[str, Any]:
        """Export the trained weights, write summary, curves and report; return the summary."""
        kind = self.config.evaluation.weights
        with self.phase("export"):
            self.fleet.events.answer(self.backend.export(str(self.place.where / WEIGHTS), kind))
            self._prune()
        summary = build_summary(self.folder, self.config, self.state, self.looks, self.elapsed_s)
        write_json(self.folder / SUMMARY, summary)
        curves_png(self.folder)
        write_report(self.folder)
        self.place.push()
        return summary

    def close(self) -> None:
        """End all actors."""
        if hasattr(self, "backend"):
            self.backend.close()
