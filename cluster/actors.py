"""The Ray actors: thin wrappers around the plain classes of the other packages.

Ownership (docs/design.md): groups and weights travel as return values of actor methods, so the controller's process
owns them, and a dying actor takes nothing with it. Workers and learner never `ray.put`.
"""

import asyncio
import os
import socket
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ray

from cluster.assembly import reward_call
from cluster.backend import ScaleCommand, ScoreAnswer
from cluster.config import RunConfig
from cluster.folder_probe import complaint, node_name, refusal
from cluster.remote_folder import fetched, move, scratch_name, written
from cluster.remote_path import is_url, place_at
from cluster.tensor_arrays import TensorBytes, as_arrays, as_tensors
from learner.credit.base import ScoredStates
from rewards.config import RewardConfig
from rollout.families.trainable import num_bytes
from rollout.records import AdapterSpec, EvaluationImages, Previews, SliceRequest


@ray.remote
class RolloutActor:
    """A rollout worker in its own process. Calls run one after another, in the order they were submitted."""

    def __init__(self, config: RunConfig, scored_states: ScoredStates, adapter: AdapterSpec):
        self.config, self.adapter = config, adapter
        self.scored_states: ScoredStates = scored_states
        self.worker: Any = None

    def start(self) -> dict[str, Any]:
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
        return facts()

    @ray.method(num_returns=3)
    def sample(self, requests: list[SliceRequest]) -> tuple[Any, Any, Any]:
        """Three objects, so that the controller can read the stats and leave the data where it is."""
        answer = self.worker.sample(requests)
        return answer.slices, answer.previews, answer.stats

    def load_weights(self, version: int, arrays: dict[str, TensorBytes]) -> Any:
        return self.worker.load_weights(version, as_tensors(arrays))

    def sample_images(self, *args: Any) -> EvaluationImages:
        return self.worker.evaluate(*args)


@ray.remote
class RewardActor:
    """One reward's server: calls of many workers at once, merged into batches off the event loop."""

    def __init__(self, config: RewardConfig):
        self.config = config
        self.reward: Any = None
        self.batcher: Any = None

    async def start(self) -> dict[str, Any]:
        """Make the reward, and its batcher inside the running event loop; check its canaries through the batcher.

        The facts name the column that it trains on, and say what the canaries showed. CanaryError if they are out of
        order.
        """
        from rewards.base import HasCanaries
        from rewards.canaries import canary_call, judge_canaries, raise_for_canaries
        from rewards.registry import make_reward
        from rewards.server import MicroBatcher

        self.reward = reward = make_reward(self.config)
        self.batcher = MicroBatcher(
            reward,
            max_batch=self.config.max_batch,
            max_wait_s=self.config.max_wait_s,
            timeout_s=self.config.timeout_s,
        )
        canaries = reward.canaries() if isinstance(reward, HasCanaries) else None
        answer = None if canaries is None else await self.batcher.submit(canary_call(canaries))
        result = judge_canaries(reward.name, canaries, answer)
        raise_for_canaries(result)
        return {**facts(), "column": reward.name, "canaries": str(result)}

    async def score(self, previews: Previews, request: SliceRequest | None) -> ScoreAnswer:
        call = reward_call(previews, request)
        outcome = await self.batcher.submit(call)
        return ScoreAnswer(samples=call.samples, states=call.states, outcome=outcome)


@ray.remote
class LearnerActor:
    """One learner rank; of all actors, the only kind that reads or writes the run folder, a path or URL."""

    def __init__(self, config: RunConfig, rank: int, run_dir: str, folder_token: str = ""):
        self.config, self.rank, self.run_dir = config, rank, run_dir
        self.folder_token = folder_token
        self.dump_dir = scratch_name() if is_url(run_dir) else run_dir
        """Where a batch that went wrong is written first; made when there is one."""
        self.worker: Any = None

    def address(self) -> tuple[str, int]:
        """Where the ranks shall meet: this node and a port that is free now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def start(self, where: tuple[str, int]) -> dict[str, Any]:
        """Load the model and meet the other ranks at `where`, rank 0's address.

        ValueError when the run folder, as it is seen from here, is not the driver's. The nodes of the run's start
        were asked before (`check_nodes`); this is for one that joined later, and is placed on in a roll-back.
        """
        from learner.worker import LearnerWorker

        self._check_folder()
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
            master_addr=where[0],
            master_port=where[1],
            dump_dir=self.dump_dir,
        )
        return facts()

    def _check_folder(self) -> None:
        if not self.folder_token:
            return
        seen = complaint(self.run_dir, self.folder_token, self.rank == 0)
        if seen is not None:
            node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
            raise ValueError(refusal(self.run_dir, {node_name(node, address): seen}))

    def step(self, groups: list[Any]) -> Any:
        from learner.checks import NonFiniteLoss

        try:
            return self.worker.step(ray.get(groups))
        except NonFiniteLoss as error:
            elsewhere = self.dump_dir != self.run_dir
            if elsewhere and self.rank == 0:
                move(Path(self.dump_dir), self.run_dir)
            # The first rank's error ends the run: none may leave while rank 0 still writes.
            self.worker.wait_for_ranks()
            if not elsewhere:
                raise
            raise NonFiniteLoss(str(error).replace(self.dump_dir, self.run_dir)) from error

    @ray.method(num_returns=2)
    def weights(self, kind: str) -> tuple[Any, Any]:
        """Every rank must be asked (the gather is collective); rank 0's answer is the one to use."""
        version, tensors, checksum = self.worker.weights(kind)
        return (version, checksum, num_bytes(tensors)), as_arrays(tensors)

    def save_checkpoint(
        self, folder: str, state: dict[str, Any], versions: list[int], arrays: list[Any]
    ) -> None:
        """`arrays` holds the references of older versions, which only rank 0 reads."""
        kept = {}
        if self.rank == 0:
            older = zip(versions, ray.get(arrays), strict=True)
            kept = {version: as_tensors(found) for version, found in older}
        with written(folder) as place:
            self.worker.save_checkpoint(place, state, kept)

    def load_checkpoint(self, folder: str) -> tuple[dict[str, Any], list[Any]]:
        """Return the caller's state, and rank 0's older versions: (version, tensors, checksum, bytes) each."""
        with fetched(place_at(folder)) as place:
            state = self.worker.load_checkpoint(str(place))
            kept = self.worker.kept_versions(str(place))
            return state, [one._replace(tensors=as_arrays(one.tensors)) for one in kept]

    def export(self, folder: str, kind: str) -> None:
        with written(folder) as place:
            self.worker.export(place, kind)


@ray.remote
class ControlActor:
    """Where a run can be found by name: takes commands from outside, tells how the run stands."""

    def __init__(self) -> None:
        self._commands: asyncio.Queue[ScaleCommand] = asyncio.Queue()
        self._status: dict[str, Any] = {}

    async def command(self, command: ScaleCommand) -> dict[str, Any]:
        """Pass a command to the controller; return how the run stood before it."""
        await self._commands.put(command)
        return self._status

    async def next(self) -> ScaleCommand:
        """Wait for the next command."""
        return await self._commands.get()

    async def report(self, status: dict[str, Any]) -> None:
        self._status = status

    async def status(self) -> dict[str, Any]:
        return self._status


def facts() -> dict[str, Any]:
    """Return where this actor runs, for `flowcredit scale` and for messages."""
    context = ray.get_runtime_context()
    return {
        "node": context.get_node_id(),
        "pid": os.getpid(),
        "accelerators": context.get_accelerator_ids(),
        "code": code_digest(),
    }


def code_digest() -> str:
    """Return a digest of our packages' source, as this process would import it."""
    root, digest = Path(__file__).resolve().parents[1], blake2b(digest_size=16)
    for package in ("cluster", "learner", "rewards", "rollout"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def adapter_spec(config: RunConfig) -> AdapterSpec:
    """Return what a worker must know to hold the same trainable tensors as the learner."""
    return AdapterSpec(
        adapter=config.learner.adapter,
        rank=config.learner.lora_rank,
        alpha=config.learner.lora_alpha,
        targets=tuple(targets) if (targets := config.learner.lora_targets) else None,
    )
