"""What the system costs: images/s of one worker under Ray against a bare loop in one process, measured in one run.

    python -m benchmarks.overhead configs/quickstart.toml [--iterations 6] [--repeats 3] [section.key=value ...]

Both do the same work with the same threads: sample, score, seal, learn, load the new weights. The bare loop calls the
plain classes one after another; the system overlaps scoring with sampling, and pays for processes, object store and
handshakes. Repeats alternate between the two, so that a machine that slows down slows both. With --docs docs the
figures are written to docs/overhead.md; what people wrote into the document stays.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.marked_section import write_marked
from cluster.config import RunConfig, load

ONE_THREAD = ("rollout.threads_per_worker=1", "learner.threads_per_rank=1")
ONE_OF_EACH = ("run.max_policy_lag=0", "rollout.workers=1", "learner.num_ranks=1")
"""What the bare loop is; no override changes it."""
WANTED = 0.85
"""The ratio that the system has to reach."""

Side = Callable[[RunConfig, int, str], list[float]]
"""(config, iterations, folder for dumps) -> seconds of every iteration."""
Rates = dict[str, list[float]]
"""Side -> images/s of each repeat."""


class BareLoop:
    """One run's plain classes in this process, called one after another. Imports torch only when made."""

    def __init__(self, config: RunConfig, folder: str):
        from cluster.actors import adapter_spec
        from learner.credit import make_credit
        from learner.worker import LearnerWorker
        from rewards.registry import make_reward
        from rollout.prompts import PromptSource
        from rollout.worker import RolloutWorker

        self.config = config
        self.prompts = PromptSource(config.prompts.path, config.prompts.shuffle, config.run.seed)
        self.rewards = [make_reward(component) for component in config.rewards.components]
        self.weights = {
            reward.name: component.weight
            for reward, component in zip(self.rewards, config.rewards.components, strict=True)
        }
        self.worker = RolloutWorker(
            config.model,
            config.sampling,
            config.rollout,
            adapter_spec(config),
            run_seed=config.run.seed,
            credit_scored_states=make_credit(config.credit).scored_states,
        )
        self.learner = LearnerWorker(
            config.model,
            config.learner,
            config.credit,
            config.objective,
            guidance_scale=config.sampling.guidance_scale,
            run_seed=config.run.seed,
            dump_dir=folder,
        )
        self.publish()

    def publish(self) -> None:
        """Take the weights from the learner to the worker; both compute the checksum, as in the system."""
        version, tensors, _ = self.learner.weights("raw")
        self.worker.load_weights(version, tensors)

    def iteration(self) -> list[Any]:
        """One batch from prompts to new weights; returns its sealed groups."""
        batch = self.sealed_batch()
        self.learner.step(batch)
        self.publish()
        return batch

    def sealed_batch(self) -> list[Any]:
        """Sample and score the next batch, in calls of the system's shape."""
        from cluster.assembly import OpenGroup, seal

        settings, shared = self.config.rollout, self.config.sampling.shared_initial_noise
        requests = self.requests(self.learner.version)
        groups = {
            request.group.group_id: OpenGroup(request.group, settings.slices_per_group)
            for request in requests
        }
        for first in range(0, len(requests), settings.slices_per_call):
            call = requests[first : first + settings.slices_per_call]
            sampled = self.worker.sample(call)
            for request, slice_ in zip(call, sampled.slices, strict=True):
                answers = self.scores(sampled.previews, request)
                groups[request.group.group_id].add(request, slice_, answers)
        num_states = len(self.worker.plan.times)
        return [seal(group, self.weights, num_states, shared) for group in groups.values()]

    def requests(self, version: int) -> list[Any]:
        """The slices of batch `version`: on-policy, each batch publishes one version."""
        from cluster.assembly import split_group
        from rollout.records import GroupRequest

        settings, shared = self.config.rollout, self.config.sampling.shared_initial_noise
        slices = []
        for place in range(settings.groups_per_batch):
            group_id = version * settings.groups_per_batch + place
            prompt, metadata = self.prompts.at(group_id)
            group = GroupRequest(
                group_id=group_id,
                prompt=prompt,
                metadata=metadata,
                num_samples=settings.samples_per_group,
                run_seed=self.config.run.seed,
                policy_version=version,
            )
            keep = settings.preview_samples if place < settings.preview_groups else 0
            slices += split_group(group, settings.slice_size, shared, keep)
        return slices

    def scores(self, previews: Any, request: Any) -> list[Any]:
        """Every reward's values for one slice, as a reward server would answer."""
        from cluster.assembly import reward_call
        from cluster.backend import ScoreAnswer
        from rewards.base import RewardFailure, evaluate_checked

        call = reward_call(previews, request)
        answers = []
        for reward in self.rewards:
            outcome = evaluate_checked(reward, call)
            if isinstance(outcome, RewardFailure):
                raise RuntimeError(str(outcome))
            answers.append(ScoreAnswer(samples=call.samples, states=call.states, outcome=outcome))
        return answers


def bare_loop(config: RunConfig, iterations: int, folder: str) -> list[float]:
    """Run the plain classes in this process; return the seconds of every iteration."""
    loop = BareLoop(config, folder)
    seconds = []
    for _ in range(iterations):
        began = time.perf_counter()
        loop.iteration()
        seconds.append(time.perf_counter() - began)
    return seconds


def system(config: RunConfig, iterations: int, folder: str) -> list[float]:
    """Run the whole system without its evaluations; return the seconds of every iteration."""
    import ray

    from cluster.actors_backend import RayBackend
    from cluster.actors_cluster import connect
    from cluster.controller import Controller
    from cluster.costs import step_plan
    from cluster.fleet import make_fleet, start_fleet
    from rollout.prompts import PromptSource

    assert iterations == config.run.num_iterations
    connect(config, None)
    try:
        plan, rule = step_plan(config)
        backend = RayBackend(config, rule.scored_states, folder)
        fleet = make_fleet(config, backend)
        learner = backend.start_learner()
        start_fleet(config, fleet)
        fleet.events.answer(learner)
        prompts = PromptSource(config.prompts.path, config.prompts.shuffle, config.run.seed)
        seconds: list[float] = []
        Controller(
            config, plan, fleet, prompts, lambda record: seconds.append(record.seconds["total"])
        ).run()
        backend.close()
        return seconds
    finally:
        ray.shutdown()


SIDES: dict[str, Side] = {"bare": bare_loop, "system": system}


def measure(side: Side, config: RunConfig, iterations: int) -> float:
    """Run one side in a fresh process; return its images/s, the first iteration left out.

    What the process raises is raised here; BrokenProcessPool when it dies.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=spawn) as pool:
        seconds = pool.submit(side, config, iterations, folder).result()
    images = config.rollout.groups_per_batch * config.rollout.samples_per_group
    return images / statistics.median(seconds[1:])


def measure_both(config: RunConfig, repeats: int) -> Rates:
    """Both sides in turn, `repeats` times."""
    rates: Rates = {name: [] for name in SIDES}
    for repeat in range(repeats):
        for name, side in SIDES.items():
            rates[name].append(measure(side, config, config.run.num_iterations))
            print(f"repeat {repeat + 1}  {name:6s}  {rates[name][-1]:.2f} images/s", flush=True)
    return rates


def ratio_of(rates: Rates) -> float:
    """The system's median over the bare loop's."""
    return statistics.median(rates["system"]) / statistics.median(rates["bare"])


SKELETON = """# What the system costs

{generated}

## Reading

Not written yet. (This section is written by hand; running the benchmark again leaves it alone.)
"""


def document(rates: Rates, config: RunConfig, command: Sequence[str]) -> str:
    """The generated part of docs/overhead.md."""
    settings = config.rollout
    images = settings.groups_per_batch * settings.samples_per_group
    repeats, iterations = len(rates["bare"]), config.run.num_iterations
    parts = [
        f"Images per second of the whole system with one rollout worker, divided by those of a bare loop over the "
        f"same classes in one process: **{ratio_of(rates):.3f}** (asked for: at least {WANTED}).",
        rates_table(rates, images),
        f"`{shlex.join(command)}`, on {os.cpu_count()} cores ({platform.machine()}, Python "
        f"{platform.python_version()}). {repeats} repeats, the two sides in turn, each time in fresh processes. A "
        f"repeat runs {iterations} iterations of {images} images, leaves the first one out, and counts as the median "
        f"of the other {iterations - 1}; the ratio is that of the medians over the repeats.",
        "## The same on both sides",
        f"- **Work**: the same prompts, seeds, slices and network calls. Of each batch: {settings.groups_per_batch} "
        f"groups of {settings.samples_per_group} trajectories, {settings.slices_per_call} slices a call; every scored "
        f"state decoded, and scored by every reward ({', '.join(config.reward_names)}); PNG previews "
        f"kept of {settings.preview_groups} x {settings.preview_samples} trajectories; groups sealed as Arrow record "
        f"batches; credit, loss and optimizer step; new weights checksummed, loaded, and checksummed again.",
        "- **Threads** of each part:",
        threads_table(config),
        "- **Left out**: start-up, evaluations, checkpoints, the run folder.",
        "## What differs",
        "- The bare loop is one process that does one thing after another: it never uses more cores than its threads.",
        f"- The system's {1 + len(config.reward_names) + 1} actors (rollout worker, reward servers, learner) and its "
        "controller are processes of their own that overlap on the cores: one call is scored while the worker samples "
        "the next. So it may be the faster one where a core is free.",
        "- Only the system pays for Ray: serialising previews, groups and weights, the object store, the time that a "
        "micro-batch waits for more images, and the handshakes.",
    ]
    return "\n\n".join(part.strip() for part in parts)


def rates_table(rates: Rates, images: int) -> str:
    """Both sides' figures."""
    rows = [
        "| side | images/s, median | seconds an iteration | each repeat |",
        "| --- | --: | --: | --: |",
    ]
    for name, title in {"bare": "bare loop", "system": "system"}.items():
        median = statistics.median(rates[name])
        each = ", ".join(f"{rate:.2f}" for rate in rates[name])
        rows.append(f"| {title} | {median:.2f} | {images / median:.2f} | {each} |")
    each = ", ".join(f"{s / b:.3f}" for s, b in zip(rates["system"], rates["bare"], strict=True))
    return "\n".join([*rows, f"| system / bare | {ratio_of(rates):.3f} | | {each} |"])


def threads_table(config: RunConfig) -> str:
    """Threads of each part, by its setting."""
    rewards = [
        (f"reward {item.name}", "rewards.components threads", item.threads)
        for item in config.rewards.components
    ]
    parts = [
        ("rollout worker", "rollout.threads_per_worker", config.rollout.threads_per_worker),
        *rewards,
        ("learner", "learner.threads_per_rank", config.learner.threads_per_rank),
    ]
    rows = [f"| {part} | {count} | `{key}` |" for part, key, count in parts]
    return "\n".join(["| part | threads | setting |", "| --- | --: | --- |", *rows])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. At least two iterations: the first one is left out."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/quickstart.toml"))
    parser.add_argument("--iterations", type=int, default=6, help="of one repeat, at least 2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--docs", type=Path, help="also write overhead.md into this folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    if args.iterations < 2 or args.repeats < 1:
        parser.error("--iterations must be at least 2 and --repeats at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both sides in turn, print the ratio of their medians, write what was asked for."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    length = f"run.num_iterations={args.iterations}"
    config = load(args.config, [*ONE_THREAD, *args.overrides, *ONE_OF_EACH, length])
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited: numpy's and scipy's pools, on both sides
    rates = measure_both(config, args.repeats)
    ratio = ratio_of(rates)
    print(f"system / bare = {ratio:.3f} (medians of {args.repeats}; asked for: at least {WANTED})")
    if args.out:
        args.out.write_text(json.dumps({"images_per_s": rates, "ratio": ratio}, indent=2) + "\n")
    if args.docs:
        text = document(rates, config, ["python", "-m", "benchmarks.overhead", *argv])
        write_marked(args.docs / "overhead.md", "benchmarks/overhead.py", text, SKELETON)
    return 0


if __name__ == "__main__":
    sys.exit(main())
