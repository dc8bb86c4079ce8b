"""What the system costs: images/s of one worker under Ray against a bare loop in one process, measured in one run.

    python -m benchmarks.overhead configs/quickstart.toml [--iterations 6] [--repeats 3] [section.key=value ...]

Both do the same work with the same threads: sample, score, seal, learn, load the new weights. The bare loop calls the
plain classes one after another; the system overlaps scoring with sampling, and pays for processes, object store and
handshakes. Repeats alternate between the two, so that a machine that slows down slows both.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from cluster.config import RunConfig, load

SAME_THREADS = [
    "rollout.num_workers=1",
    "rollout.threads_per_worker=1",
    "learner.threads_per_rank=1",
]


def bare_loop(config: RunConfig, iterations: int, folder: str, answers: Any) -> None:
    """Run the plain classes in this process; put the seconds of every iteration."""
    from cluster.actors import adapter_spec
    from cluster.assembly import OpenGroup, seal, split_group
    from cluster.backend import ScoreAnswer
    from learner.credit import make_credit
    from learner.worker import LearnerWorker
    from rewards.base import RewardCall, evaluate_checked
    from rewards.registry import make_reward
    from rollout.prompts import PromptSource
    from rollout.records import GroupRequest
    from rollout.worker import RolloutWorker

    rule = make_credit(config.credit)
    worker = RolloutWorker(
        config.model,
        config.sampling,
        config.rollout,
        adapter_spec(config),
        run_seed=config.run.seed,
        credit_scored_states=rule.scored_states,
    )
    trainer = LearnerWorker(
        config.model,
        config.learner,
        config.credit,
        config.objective,
        guidance_scale=config.sampling.guidance_scale,
        run_seed=config.run.seed,
        dump_dir=folder,
    )
    reward = make_reward(config.rewards.components[0])
    prompts = PromptSource(config.prompts.path, config.prompts.shuffle, config.run.seed)
    settings, shared = config.rollout, config.sampling.shared_initial_noise
    weights = {item.name: item.weight for item in config.rewards.components}
    version, tensors, _ = trainer.weights("raw")
    worker.load_weights(version, tensors)
    seconds = []
    for batch in range(iterations):
        began = time.perf_counter()
        requests = []
        for group_id in range(
            batch * settings.groups_per_batch, (batch + 1) * settings.groups_per_batch
        ):
            prompt, metadata = prompts.at(group_id)
            group = GroupRequest(
                group_id=group_id,
                prompt=prompt,
                metadata=metadata,
                num_samples=settings.samples_per_group,
                run_seed=config.run.seed,
                policy_version=version,
            )
            requests += split_group(group, settings.slice_size, shared, 0)
        open_groups = {
            r.group.group_id: OpenGroup(r.group, settings.slices_per_group) for r in requests
        }
        for first in range(0, len(requests), settings.slices_per_call):
            call = requests[first : first + settings.slices_per_call]
            answer = worker.sample(call)
            p = answer.previews
            for request, slice_ in zip(call, answer.slices, strict=True):
                rows = (p.group_ids == request.group.group_id).nonzero()[0]
                scored = RewardCall(
                    images=p.images[rows],
                    prompts=[p.prompts[row] for row in rows],
                    metadata=[p.metadata[row] for row in rows],
                    group_ids=p.group_ids[rows],
                    samples=p.samples[rows],
                    states=p.states[rows],
                )
                outcome = evaluate_checked(reward, scored)
                open_groups[request.group.group_id].add(
                    slice_,
                    [ScoreAnswer(samples=scored.samples, states=scored.states, outcome=outcome)],
                )
        sealed = [
            seal(group, weights, len(worker.plan.times), shared) for group in open_groups.values()
        ]
        trainer.step(sealed)
        version, tensors, _ = trainer.weights("raw")
        worker.load_weights(version, tensors)
        seconds.append(time.perf_counter() - began)
    answers.put(seconds)


def system(config: RunConfig, iterations: int, folder: str, answers: Any) -> None:
    """Run the whole system without its evaluations; put the seconds of every iteration."""
    import ray

    from cluster.actors import RayBackend, connect
    from cluster.controller import Controller
    from cluster.costs import step_plan
    from rollout.prompts import PromptSource

    connect(config, None)
    plan, rule = step_plan(config)
    backend = RayBackend(config, rule.scored_states, folder)
    prompts = PromptSource(config.prompts.path, config.prompts.shuffle, config.run.seed)
    records: list[Any] = []
    Controller(config, plan, backend, prompts, records.append).run()
    answers.put([record.seconds["total"] for record in records])
    ray.shutdown()


def measure(target: Any, config: RunConfig, iterations: int) -> float:
    """Run one side in a fresh process; return its images/s, the first iteration left out."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=target, args=(config, iterations, folder, answers))
        process.start()
        seconds = answers.get()
        process.join()
    images = config.rollout.groups_per_batch * config.rollout.samples_per_group
    return images / statistics.median(seconds[1:])


def main() -> None:
    """Measure both sides in turn and print the ratio of their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/quickstart.toml"))
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args()
    extra = [*SAME_THREADS, f"run.num_iterations={args.iterations}", *args.overrides]
    config = load(args.config, extra)
    rates: dict[str, list[float]] = {"bare": [], "system": []}
    for repeat in range(args.repeats):
        for name, target in (("bare", bare_loop), ("system", system)):
            rates[name].append(measure(target, config, args.iterations))
            print(f"repeat {repeat + 1}  {name:6s}  {rates[name][-1]:.2f} images/s", flush=True)
    ratio = statistics.median(rates["system"]) / statistics.median(rates["bare"])
    print(f"system / bare = {ratio:.3f} (medians of {args.repeats}; asked for: at least 0.85)")
    if args.out:
        args.out.write_text(json.dumps({"images_per_s": rates, "ratio": ratio}, indent=2) + "\n")


if __name__ == "__main__":
    main()
