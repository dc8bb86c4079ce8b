"""Ray actors around the plain classes of the other packages, and the backend that the controller talks to.

Ownership (docs/design.md): groups and weights travel as return values of actor methods, so the controller's process
owns them, and a dying actor takes nothing with it. Workers and learner never `ray.put`.
"""

import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.assembly import reward_call
from cluster.backend import SampleAnswer, ScoreAnswer, WeightsAnswer
from cluster.config import ConfigError, RunConfig
from learner.credit.base import ScoredStates
from rewards.config import RewardConfig
from rollout.records import AdapterSpec, EvaluationImages, Previews, SliceRequest
from rollout.stats import RolloutStats


@ray.remote
class RolloutActor:
    """A rollout worker in its own process. Calls run one after another, in the order they were submitted."""

    def __init__(self, config: RunConfig, scored_states: ScoredStates, adapter: AdapterSpec):
        self.config, self.adapter = config, adapter
        self.scored_states: ScoredStates = scored_states
        self.worker: Any = None

    def start(self) -> None:
        """Load the model; apart from __init__, so that a mistake arrives as itself and not as a dead actor."""
        from rollout.worker import RolloutWorker

        config = self.config
        self.worker = RolloutWorker(
            config.model,
            config.sampling,
            config.rollout,
            self.adapter,
            run_seed=config.run.seed,
            credit_scored_states=self.scored_states,
        )

    @ray.method(num_returns=3)
    def sample(self, requests: list[SliceRequest]) -> tuple[Any, Any, Any]:
        """Three objects, so that the controller can read the stats and leave the data where it is."""
        answer = self.worker.sample(requests)
        return answer.slices, answer.previews, answer.stats

    def load_weights(self, version: int, tensors: dict[str, Any]) -> Any:
        return self.worker.load_weights(version, tensors)

    def sample_images(self, *args: Any) -> EvaluationImages:
        return self.worker.evaluate(*args)


@ray.remote
class RewardActor:
    """One reward's server: calls of many workers at once, merged into batches off the event loop."""

    def __init__(self, config: RewardConfig):
        self.config = config
        self.reward: Any = None
        self.batcher: Any = None

    async def start(self) -> str:
        """Make the reward, and its batcher inside the running event loop; return the column that it trains on."""
        from rewards.registry import make_reward
        from rewards.server import MicroBatcher

        self.reward = make_reward(self.config)
        self.batcher = MicroBatcher(
            self.reward,
            max_batch=self.config.max_batch,
            max_wait_s=self.config.max_wait_s,
            timeout_s=self.config.timeout_s,
        )
        return self.reward.name

    async def check(self) -> str:
        """Score the reward's canaries through the server itself; CanaryError if they are out of order."""
        from rewards.base import HasCanaries
        from rewards.canaries import canary_call, judge_canaries, raise_for_canaries

        reward: Any = self.reward
        canaries = reward.canaries() if isinstance(reward, HasCanaries) else None
        answer = None if canaries is None else await self.batcher.submit(canary_call(canaries))
        result = judge_canaries(self.batcher.reward.name, canaries, answer)
        raise_for_canaries(result)
        return str(result)

    async def score(self, previews: Previews, request: SliceRequest | None) -> ScoreAnswer:
        call = reward_call(previews, request)
        outcome = await self.batcher.submit(call)
        return ScoreAnswer(samples=call.samples, states=call.states, outcome=outcome)


@ray.remote
class LearnerActor:
    """One learner rank."""

    def __init__(self, config: RunConfig, rank: int, dump_dir: str):
        self.config, self.rank, self.dump_dir = config, rank, dump_dir
        self.worker: Any = None

    def address(self) -> tuple[str, int]:
        """Where the ranks shall meet: this node and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(self, address: str, port: int) -> None:
        from learner.worker import LearnerWorker

        config = self.config
        self.worker = LearnerWorker(
            config.model,
            config.learner,
            config.credit,
            config.objective,
            guidance_scale=config.sampling.guidance_scale,
            run_seed=config.run.seed,
            rank=self.rank,
            world_size=config.learner.num_ranks,
            master_addr=address,
            master_port=port,
            dump_dir=self.dump_dir,
        )

    def step(self, groups: list[Any]) -> Any:
        return self.worker.step(ray.get(groups))

    @ray.method(num_returns=2)
    def weights(self, kind: str) -> tuple[Any, Any]:
        """Every rank must be asked (the gather is collective); rank 0's answer is the one to use."""
        version, tensors, checksum = self.worker.weights(kind)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return (version, checksum, num_bytes), tensors

    def save_checkpoint(self, folder: str, state: dict[str, Any]) -> None:
        self.worker.save_checkpoint(folder, state)

    def load_checkpoint(self, folder: str) -> dict[str, Any]:
        return self.worker.load_checkpoint(folder)

    def export(self, folder: str, kind: str) -> None:
        self.worker.export(folder, kind)


def adapter_spec(config: RunConfig) -> AdapterSpec:
    """Return what a worker must know to hold the same trainable tensors as the learner."""
    return AdapterSpec(
        adapter=config.learner.adapter,
        rank=config.learner.lora_rank,
        alpha=config.learner.lora_alpha,
        targets=tuple(targets) if (targets := config.learner.lora_targets) else None,
    )


def num_cpus_wanted(config: RunConfig) -> int:
    """Return the CPU slots that the run's actors ask Ray for."""
    return (
        config.rollout.num_workers * config.rollout.threads_per_worker
        + config.learner.num_ranks * config.learner.threads_per_rank
        + sum(reward.threads for reward in config.rewards.components)
    )


def num_gpus_wanted(config: RunConfig) -> float:
    """Return the GPUs that the run's actors ask Ray for."""
    return (
        config.rollout.num_workers * config.rollout.gpus_per_worker
        + config.learner.num_ranks * config.learner.gpus_per_rank
        + sum(reward.gpus for reward in config.rewards.components)
    )


def connect(config: RunConfig, address: str | None) -> None:
    """Join the cluster at `address` (or RAY_ADDRESS), or start a local one with slots enough for this config.

    On one machine the parts take turns more than they overlap, so slots may outnumber the cores. Raises ConfigError
    when the cluster is too small for the config, whose actors would wait for ever.
    """
    if not ray.is_initialized():
        _connect(config, address)
    available = ray.cluster_resources()
    wanted = {"CPU": num_cpus_wanted(config), "GPU": num_gpus_wanted(config)}
    for kind, count in wanted.items():
        if count > available.get(kind, 0):
            raise ConfigError(
                f"the config's actors need {count:g} {kind} slots, the Ray cluster has {available.get(kind, 0):g}; "
                "lower rollout.num_workers, rollout.threads_per_worker (gpus_per_worker), learner.num_ranks, "
                "learner.threads_per_rank (gpus_per_rank), rewards.components threads or gpus, or add nodes"
            )


def _connect(config: RunConfig, address: str | None) -> None:
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, log_to_driver=False)
        return
    # A cluster of this process's own, behind loopback: that tokens are on by default needs no warning.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(
        logging.ERROR
    )
    ray.init(
        address="local",
        num_cpus=max(num_cpus_wanted(config), os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


class RayBackend:
    """The Ray actors of one run. See `cluster.backend.Backend` for what each method answers."""

    def __init__(
        self,
        config: RunConfig,
        scored_states: ScoredStates,
        dump_dir: str,
        *,
        with_learner: bool = True,
        with_rewards: bool = True,
        adapter: AdapterSpec | None = None,
    ):
        """Start the actors and wait until each has loaded what it needs; leave out the parts that are False.

        `adapter` is what the workers train on their network; none takes the config's.
        """
        resources, adapter = config.rollout, adapter or adapter_spec(config)
        self.workers = [
            RolloutActor.options(
                num_cpus=resources.threads_per_worker, num_gpus=resources.gpus_per_worker
            ).remote(config, scored_states, adapter)
            for _ in range(resources.num_workers)
        ]
        self.rewards = {
            reward.name: RewardActor.options(
                num_cpus=reward.threads, num_gpus=reward.gpus, max_concurrency=1000
            ).remote(reward)
            for reward in (config.rewards.components if with_rewards else [])
        }
        self.ranks = [
            LearnerActor.options(
                num_cpus=config.learner.threads_per_rank, num_gpus=config.learner.gpus_per_rank
            ).remote(config, rank, dump_dir)
            for rank in range(config.learner.num_ranks if with_learner else 0)
        ]
        self._data_of: dict[Any, Any] = {}
        """Future -> refs of the data that came with it and stays in the object store."""
        self._joint: dict[Any, list[Any]] = {}
        """Future of rank 0 -> the other ranks' futures of the same collective call."""
        starting = [worker.start.remote() for worker in self.workers]
        if self.ranks:
            where = ray.get(self.ranks[0].address.remote())
            starting += [rank.start.remote(*where) for rank in self.ranks]
        columns = ray.get([reward.start.remote() for reward in self.rewards.values()])
        self._reward_columns = dict(zip(self.rewards, columns, strict=True))
        if len(set(columns)) != len(columns):
            raise ValueError(
                f"two rewards train on the same column: {self._reward_columns}; rename one"
            )
        ray.get(starting)

    def close(self) -> None:
        """End the actors."""
        for actor in [*self.workers, *self.rewards.values(), *self.ranks]:
            ray.kill(actor)

    def worker_ids(self) -> list[int]:
        return list(range(len(self.workers)))

    def reward_columns(self) -> dict[str, str]:
        return self._reward_columns

    def sample(self, worker: int, requests: Sequence[SliceRequest]) -> Any:
        refs: Any = self.workers[worker].sample.remote(list(requests))
        slices, previews, stats = refs
        self._data_of[stats] = (slices, previews)
        return stats

    def load_weights(self, worker: int, version: int, tensors: Any) -> Any:
        return self.workers[worker].load_weights.remote(version, tensors)

    def sample_images(
        self,
        worker: int,
        prompts: Sequence[str],
        noise_ids: Sequence[int],
        num_steps: int,
        guidance_scale: float,
        noise_seed: int,
    ) -> Any:
        return self.workers[worker].sample_images.remote(
            list(prompts), list(noise_ids), num_steps, guidance_scale, noise_seed
        )

    def score(self, reward: str, previews: Any, request: SliceRequest | None) -> Any:
        return self.rewards[reward].score.remote(previews, request)

    def check_reward(self, reward: str) -> Any:
        return self.rewards[reward].check.remote()

    def learn(self, groups: Sequence[Any]) -> Any:
        return self._all_ranks("step", list(groups))

    def weights(self, kind: str) -> Any:
        pairs: list[Any] = [rank.weights.remote(kind) for rank in self.ranks]
        (facts, tensors), *others = pairs
        self._joint[facts] = [ref for ref, _ in others]
        self._data_of[facts] = tensors
        return facts

    def save_checkpoint(self, folder: str, state: dict[str, Any]) -> Any:
        return self._all_ranks("save_checkpoint", folder, state)

    def load_checkpoint(self, folder: str) -> Any:
        return self._all_ranks("load_checkpoint", folder)

    def export(self, folder: str, kind: str) -> Any:
        return self._all_ranks("export", folder, kind)

    def _all_ranks(self, method: str, *args: Any) -> Any:
        """Call every rank; the future is rank 0's, the others' errors surface with it."""
        first, *others = [getattr(rank, method).remote(*args) for rank in self.ranks]
        self._joint[first] = others
        return first

    def wait(self, futures: Sequence[Any]) -> list[Any]:
        while True:
            owner = {other: future for future in futures for other in self._joint.get(future, [])}
            watched = [*futures, *owner]
            ray.wait(watched, num_returns=1)
            done, _ = ray.wait(watched, num_returns=len(watched), timeout=0)
            finished = [
                owner.get(ref, ref)
                for ref in done
                if ref not in owner or self._failed(ref, owner[ref])
            ]
            if finished:
                return list(dict.fromkeys(finished))

    def _failed(self, other: Any, future: Any) -> bool:
        """Whether another rank's part of a collective call failed, in which case rank 0 may wait for ever."""
        try:
            ray.get(other)
        except RayError:
            return True
        self._joint[future].remove(other)
        return False

    def result(self, future: Any) -> Any:
        others = self._joint.pop(future, [])
        ended, _ = ray.wait(others, num_returns=len(others), timeout=0) if others else ([], [])
        ray.get(ended)  # another rank's error first: rank 0 may be waiting for that rank
        answer, data = ray.get(future), self._data_of.pop(future, None)
        ray.get(others)
        if isinstance(answer, RolloutStats):
            slices, previews = data
            return SampleAnswer(slices=slices, previews=previews, stats=answer)
        if data is not None:
            version, checksum, num_bytes = answer
            return WeightsAnswer(
                tensors=data, version=version, checksum=checksum, num_bytes=num_bytes
            )
        return answer

    def fetch(self, handle: Any) -> Any:
        return ray.get(handle)

    def store(self, data: Any) -> Any:
        return ray.put(data)
