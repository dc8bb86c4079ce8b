"""What publishing a policy version costs, against bare scripts that do the same work; all measured in one run.

    python -m benchmarks.publish [--gb 1.0] [--workers 4] [--repeats 3] [--docs docs]

One object, and workers on one node that get it, copy it into their tensors and checksum them. Ours: copies and their
checksum as return values of an actor, `RolloutWorker.load_weights` in each worker, the handshake here. Bare: plain Ray
actors with arrays, and processes with shared memory. Repeats alternate between the sides, each time in fresh processes.
With --docs docs the figures are written to docs/publish.md; what people wrote into the document stays.
"""

import argparse
import json
import logging
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.marked_section import write_marked
from benchmarks.sleeping import BULK_CHUNK
from cluster.tensor_arrays import TensorBytes, as_arrays, as_tensors
from rollout.config import ModelConfig, RolloutConfig, SamplingConfig
from rollout.families.registry import load_family
from rollout.families.trainable import checksum, trainable_tensors
from rollout.records import AdapterSpec, WeightReport
from rollout.worker import RolloutWorker, prepare_network

WANTED = 1.5
"""The ratio that publishing may reach."""
VERSIONS = 3
"""Versions that a repeat times, after one that it doesn't: first touches of memory are start-up."""
FULL = AdapterSpec(adapter="full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every side does."""

    numel: int
    """float32 numbers of a version."""
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """One published version."""

    make: float
    """Until the object is there; ours has a checksum by then."""
    load: float
    """From then until the last worker's checksum."""

    @property
    def total(self) -> float:
        return self.make + self.load


Side = Callable[[Job], list[Seconds]]
Times = dict[str, list[Seconds]]
"""Side -> the middle one of each repeat."""


# ours


def sleeping_model(numel: int) -> ModelConfig:
    """A model with so many weights, and a few more."""
    return ModelConfig(family="benchmarks.sleeping:SleepingFamily", path=f"sleep:numel={numel}")


class Publisher:
    """Gives out versions as a learner rank does: copies of the trainable tensors, and their checksum."""

    def __init__(self, numel: int) -> None:
        family = load_family(sleeping_model(numel), torch.device("cpu"), ("network",))
        prepare_network(family, FULL, seed=0)
        self.live, self.version = trainable_tensors(family.network), 0

    def weights(self) -> tuple[tuple[int, str], dict[str, TensorBytes]]:
        """((version, checksum), arrays); each version has other numbers, so that an old one can't pass for it."""
        self.version += 1
        copies = {name: tensor.detach().clone() for name, tensor in self.live.items()}
        for tensor in copies.values():
            tensor.view(-1)[0] = self.version
        return (self.version, checksum(copies)), as_arrays(copies)


class Receiver(RolloutWorker):
    """A worker that takes weights as its actor does."""

    def load_arrays(self, version: int, arrays: dict[str, TensorBytes]) -> WeightReport:
        """Load and prove a version."""
        return self.load_weights(version, as_tensors(arrays))


def make_worker_arguments(numel: int) -> tuple[Any, ...]:
    """What a RolloutWorker is made with."""
    return sleeping_model(numel), SamplingConfig(), RolloutConfig(), FULL, 0


def ours(job: Job) -> list[Seconds]:
    """Real workers under Ray. RuntimeError when one holds something else than what was published."""
    import ray

    publisher: Any = ray.remote(Publisher).remote(job.numel)
    make_worker: Any = ray.remote(Receiver)
    workers = [make_worker.remote(*make_worker_arguments(job.numel)) for _ in range(job.workers)]

    def publish() -> Seconds:
        began = time.perf_counter()
        facts, arrays = publisher.weights.options(num_returns=2).remote()
        version, wanted = ray.get(facts)
        made = time.perf_counter()
        reports = ray.get([worker.load_arrays.remote(version, arrays) for worker in workers])
        ended = time.perf_counter()
        for report in reports:
            if (report.version, report.checksum) != (version, wanted):
                raise RuntimeError(f"a worker holds {report}, published was {version} {wanted}")
        return Seconds(make=made - began, load=ended - made)

    try:
        return [publish() for _ in range(1 + VERSIONS)][1:]
    finally:
        for actor in [publisher, *workers]:
            ray.kill(actor)


# bare


class BareReceiver:
    """Tensors of the same sizes, and nothing of ours."""

    def __init__(self, numel: int) -> None:
        starts = range(0, numel, BULK_CHUNK)
        self.tensors = [torch.ones(min(BULK_CHUNK, numel - start)) for start in starts]

    def load(self, weights: np.ndarray) -> str:
        """Copy float32 [numel] into the tensors; return the checksum of what they hold."""
        digest, start = blake2b(digest_size=16), 0
        for tensor in self.tensors:
            live = tensor.numpy()
            live[...] = weights[start : start + len(live)]
            start += len(live)
        for tensor in self.tensors:
            digest.update(tensor.numpy().data)
        return digest.hexdigest()


class BareSender:
    """Weights as one array."""

    def __init__(self, numel: int) -> None:
        self.weights, self.version = np.random.default_rng(0).random(numel, np.float32), 0

    def make(self) -> np.ndarray:
        self.version += 1
        self.weights[0] = self.version
        return self.weights


def agree(digests: Sequence[str]) -> None:
    """RuntimeError when the workers hold different numbers."""
    if len(set(digests)) != 1:
        raise RuntimeError(f"the workers' checksums differ: {digests}")


def bare_ray(job: Job) -> list[Seconds]:
    """Plain actors: one array that all of them read where it lies."""
    import ray

    sender: Any = ray.remote(BareSender).remote(job.numel)
    make_receiver: Any = ray.remote(BareReceiver)
    receivers = [make_receiver.remote(job.numel) for _ in range(job.workers)]

    def publish() -> Seconds:
        began = time.perf_counter()
        weights = sender.make.remote()
        ray.wait([weights], fetch_local=False)
        made = time.perf_counter()
        agree(ray.get([receiver.load.remote(weights) for receiver in receivers]))
        return Seconds(make=made - began, load=time.perf_counter() - made)

    try:
        return [publish() for _ in range(1 + VERSIONS)][1:]
    finally:
        for actor in [sender, *receivers]:
            ray.kill(actor)


def serve(shared: Any, numel: int, pipe: Connection) -> None:
    """A process: load what `shared` holds whenever the pipe says True, until it says False."""
    receiver, weights = BareReceiver(numel), np.frombuffer(shared, np.float32)
    pipe.send("ready")
    while pipe.recv():
        pipe.send(receiver.load(weights))


def shared_memory(job: Job) -> list[Seconds]:
    """No Ray: processes that map the same memory."""
    spawn = multiprocessing.get_context("spawn")
    shared, sender = spawn.RawArray("f", job.numel), BareSender(job.numel)
    mapped, ends, processes = np.frombuffer(shared, np.float32), [], []
    for _ in range(job.workers):
        end, other = spawn.Pipe()
        process = spawn.Process(target=serve, args=(shared, job.numel, other), daemon=True)
        process.start()
        other.close()  # so that a process that dies is told here as EOFError
        ends.append(end)
        processes.append(process)

    def publish() -> Seconds:
        began = time.perf_counter()
        mapped[...] = sender.make()
        made = time.perf_counter()
        for end in ends:
            end.send(True)
        agree([end.recv() for end in ends])
        return Seconds(make=made - began, load=time.perf_counter() - made)

    try:
        assert [end.recv() for end in ends] == ["ready"] * job.workers
        seconds = [publish() for _ in range(1 + VERSIONS)][1:]
        for end in ends:
            end.send(False)
        return seconds
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()


SIDES: dict[str, Side] = {"ours": ours, "bare Ray": bare_ray, "shared memory": shared_memory}


# the run and its page


def measure(job: Job, repeats: int) -> Times:
    """All sides in turn, `repeats` times. Needs a running Ray."""
    times: Times = {name: [] for name in SIDES}
    for repeat in range(repeats):
        for name, side in SIDES.items():
            middle = sorted(side(job), key=lambda seconds: seconds.total)[VERSIONS // 2]
            times[name].append(middle)
            print(
                f"repeat {repeat + 1}  {name:13s}  {middle.make:.3f} + {middle.load:.3f} s",
                flush=True,
            )
    return times


def ratios(times: Times) -> dict[str, float]:
    """Our median seconds over each bare side's."""
    medians = {name: statistics.median(s.total for s in each) for name, each in times.items()}
    return {name: medians["ours"] / median for name, median in medians.items() if name != "ours"}


def seconds_table(times: Times) -> str:
    """Medians over the repeats, and each repeat's total."""
    rows = [
        "| side | object made, s | loaded everywhere, s | together, s | each repeat | ours / this |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    found = ratios(times)
    for name, each in times.items():
        make, load, total = (
            statistics.median(getattr(seconds, part) for seconds in each)
            for part in ("make", "load", "total")
        )
        repeats = ", ".join(f"{seconds.total:.2f}" for seconds in each)
        ratio = f"{found[name]:.2f}" if name in found else ""
        rows.append(f"| {name} | {make:.2f} | {load:.2f} | {total:.2f} | {repeats} | {ratio} |")
    return "\n".join(rows)


SKELETON = """# What publishing costs

{generated}

## Reading

Not written yet. (This section is written by hand; running the benchmark again leaves it alone.)
"""


def document(times: Times, job: Job, command: Sequence[str]) -> str:
    """The generated part of docs/publish.md."""
    found = ratios(times)
    return "\n\n".join(
        [
            f"Publishing {4 * job.numel / 2**30:.3g} GB to {job.workers} workers on one node takes "
            f"**{found['bare Ray']:.2f}** times as long as a bare script with Ray, and {found['shared memory']:.2f} "
            f"times as long as one with shared memory (asked for: at most {WANTED}).",
            seconds_table(times),
            f"`{shlex.join(command)}`, on {os.cpu_count()} cores ({platform.machine()}, Python "
            f"{platform.python_version()}). Repeats: {len(times['ours'])}, the sides in turn, each time in fresh "
            f"processes with one thread; a repeat publishes {1 + VERSIONS} versions, leaves the first one out, and "
            f"counts as the middle one of the others. Ratios are of the medians over the repeats.",
            "- **All sides**: one object, workers that get it, copy it into tensors of at most "
            f"{4 * BULK_CHUNK / 2**20:.0f} MB, and checksum these (blake2b).",
            "- **Ours**: dict of tensors, copied and checksummed by the publisher before they are sent, as a learner "
            "rank does; `RolloutWorker.load_weights` checks names and shapes; every worker's version and checksum is "
            "compared.",
            "- **Bare Ray**: one numpy array, read where it lies in the object store. The sender neither copies nor "
            "checksums; the workers' checksums are only compared with each other.",
            "- **Shared memory**: the same without Ray; the sender writes straight into memory that the workers map.",
        ]
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gb", type=float, default=1.0, help="size of a version in GB of 2^30")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON")
    parser.add_argument("--docs", type=Path, help="also write publish.md into this folder")
    args = parser.parse_args(argv)
    if not 1e-6 <= args.gb <= 1000 or args.workers < 1 or args.repeats < 1:
        parser.error("--gb must be in 1e-6 .. 1000, --workers and --repeats at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sides in turn, print the ratios, write what was asked for."""
    import ray

    argv = list(sys.argv[1:] if argv is None else argv)
    args = parse(argv)
    job = Job(numel=int(args.gb * 2**28), workers=args.workers)
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by all processes
    ray.init(
        address="local",
        num_cpus=args.workers + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=3 * 4 * job.numel + 2**28,
    )
    try:
        times = measure(job, args.repeats)
    finally:
        ray.shutdown()
    for name, ratio in ratios(times).items():
        print(f"ours / {name} = {ratio:.2f} (asked for: at most {WANTED})")
    if args.out:
        seconds = {name: [asdict(one) for one in each] for name, each in times.items()}
        figures = {"seconds": seconds, "ratios": ratios(times)}
        args.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if args.docs:
        text = document(times, job, ["python", "-m", "benchmarks.publish", *argv])
        write_marked(args.docs / "publish.md", "benchmarks/publish.py", text, SKELETON)
    return 0


if __name__ == "__main__":
    sys.exit(main())
