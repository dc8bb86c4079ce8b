"""The Ray actors of one run, as the controller sees them; what each method answers: `cluster.backend.Backend`."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors import (
    LearnerActor,
    RewardActor,
    RolloutActor,
    adapter_spec,
    code_digest,
)
from cluster.backend import PartLost, SampleAnswer, WeightsAnswer
from cluster.config import RunConfig
from learner.credit.base import ScoredStates
from rollout.records import AdapterSpec, SliceRequest

RANK_LOSS_S = 30.0
"""How long after a rank's error another rank may turn out to be gone, and so to be its reason."""
GONE = (
    RayActorError,
    WorkerCrashedError,
    NodeDiedError,
    OutOfMemoryError,
    ActorPlacementGroupRemoved,
)
"""What Ray raises when a call's actor, or its process or node, is gone."""


class RayBackend:
    """Starts, calls and ends actors. Ids of workers and replicas are the caller's."""

    def __init__(
        self,
        config: RunConfig,
        scored_states: ScoredStates,
        run_dir: str,
        *,
        adapter: AdapterSpec | None = None,
        control: Any = None,
        folder_token: str = "",
    ):
        """`adapter` is what the workers train on their network; none takes the config's.

        `control` is the run's control actor (`cluster.actors_control`), for a run that takes commands. `run_dir` is the
        run folder, a path or URL; with `folder_token` every learner rank must find that token in it, or it does not
        start.
        """
        self.config, self.scored_states, self.run_dir = config, scored_states, run_dir
        self.adapter = adapter or adapter_spec(config)
        self.workers: dict[int, Any] = {}
        self.replicas: dict[tuple[str, int], Any] = {}
        self.ranks: list[Any] = []
        self._group: PlacementGroup | None = None
        """The learner ranks' placement group."""
        self._control = control
        self._folder_token = folder_token
        self._rewards = {reward.name: reward for reward in config.rewards.components}
        self._as_answer: dict[Any, Callable[[Any], Any]] = {}
        """Future -> what makes the protocol's answer of the actor's."""
        self._joint: dict[Any, list[Any]] = {}
        """Future of rank 0 -> the other ranks' futures of the same collective call."""
        self._code = code_digest()

    def now(self) -> float:
        return time.monotonic()

    def busy_clock(self) -> float:
        return time.monotonic()

    # actors

    def add_worker(self, worker: int) -> Any:
        settings = self.config.rollout
        actor = RolloutActor.options(
            num_cpus=settings.threads_per_worker,
            num_gpus=settings.gpus_per_worker,
            resources=settings.resources or None,
        ).remote(self.config, self.scored_states, self.adapter)
        self.workers[worker] = actor
        return self._started(actor.start.remote())

    def remove_worker(self, worker: int) -> None:
        ray.kill(self.workers.pop(worker))

    def add_replica(self, reward: str, replica: int) -> Any:
        settings = self._rewards[reward]
        actor = RewardActor.options(
            num_cpus=settings.threads,
            num_gpus=settings.gpus,
            resources=settings.resources or None,
            max_concurrency=1000,
        ).remote(settings)
        self.replicas[reward, replica] = actor
        return self._started(actor.start.remote())

    def remove_replica(self, reward: str, replica: int) -> None:
        ray.kill(self.replicas.pop((reward, replica)))

    def start_learner(self) -> Any:
        self._end_learner()
        settings = self.config.learner
        amounts = {"num_cpus": settings.threads_per_rank, "num_gpus": settings.gpus_per_rank}
        options: dict[str, Any] = {**amounts, "resources": settings.resources or None}
        if settings.num_ranks > 1:
            bundle = {"CPU": amounts["num_cpus"], "GPU": amounts["num_gpus"], **settings.resources}
            bundle = {name: amount for name, amount in bundle.items() if amount}
            self._group = placement_group([bundle] * settings.num_ranks, strategy="PACK")
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group)
        self.ranks = [
            LearnerActor.options(**options).remote(
                self.config, rank, self.run_dir, self._folder_token
            )
            for rank in range(settings.num_ranks)
        ]
        return self._started(self._all_ranks("start", self.ranks[0].address.remote()))

    def _started(self, future: Any) -> Any:
        """Have the code compared that an actor runs and this process."""

        def compare(facts: dict[str, Any]) -> dict[str, Any]:
            if facts["code"] != self._code:
                raise ValueError(
                    f"node {facts['node']} runs other code than the driver; submit with --working-dir, or install "
                    "the same release on every node"
                )
            return facts

        self._as_answer[future] = compare
        return future

    def _end_learner(self) -> None:
        """Kill the ranks at once: a collective's timeout may be half an hour away."""
        for rank in self.ranks:
            ray.kill(rank)
        if self._group is not None:
            remove_placement_group(self._group)
        self.ranks, self._group = [], None

    def close(self) -> None:
        """End all actors."""
        for actor in [*self.workers.values(), *self.replicas.values()]:
            ray.kill(actor)
        self._end_learner()
        self.workers, self.replicas = {}, {}

    # commands from outside

    def next_command(self) -> Any:
        return self._control.next.remote()

    def report(self, status: dict[str, Any]) -> None:
        self._control.report.remote(status)

    # work

    def sample(self, worker: int, requests: Sequence[SliceRequest]) -> Any:
        refs: Any = self.workers[worker].sample.remote(list(requests))
        slices, previews, stats = refs
        self._as_answer[stats] = lambda answer: SampleAnswer(
            slices=slices, previews=previews, stats=answer
        )
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

    def score(self, reward: str, replica: int, previews: Any, request: SliceRequest | None) -> Any:
        return self.replicas[reward, replica].score.remote(previews, request)

    def learn(self, groups: Sequence[Any]) -> Any:
        return self._all_ranks("step", list(groups))

    def weights(self, kind: str) -> Any:
        pairs: list[Any] = [rank.weights.remote(kind) for rank in self.ranks]
        (facts, tensors), *others = pairs
        self._joint[facts] = [ref for ref, _ in others]
        self._as_answer[facts] = lambda answer: _weights(tensors, *answer)
        return facts

    def save_checkpoint(
        self, folder: str, state: dict[str, Any], older: Sequence[WeightsAnswer]
    ) -> Any:
        versions, tensors = [a.version for a in older], [a.tensors for a in older]
        return self._all_ranks("save_checkpoint", folder, state, versions, tensors)

    def load_checkpoint(self, folder: str) -> Any:
        future = self._all_ranks("load_checkpoint", folder)
        self._as_answer[future] = self._loaded
        return future

    def _loaded(self, answer: Any) -> tuple[dict[str, Any], list[WeightsAnswer]]:
        state, kept = answer
        return state, [
            _weights(ray.put(tensors), version, checksum, num_bytes)
            for version, tensors, checksum, num_bytes in kept
        ]

    def export(self, folder: str, kind: str) -> Any:
        return self._all_ranks("export", folder, kind)

    def _all_ranks(self, method: str, *args: Any) -> Any:
        """Call every rank; the future is rank 0's, the others' errors surface with it."""
        first, *others = [getattr(rank, method).remote(*args) for rank in self.ranks]
        self._joint[first] = others
        return first

    # futures

    def wait(self, futures: Sequence[Any], timeout_s: float) -> list[Any]:
        if not futures:
            time.sleep(timeout_s)
            return []
        owner = {other: future for future in futures for other in self._joint.get(future, [])}
        watched = [*futures, *owner]
        done, _ = ray.wait(watched, num_returns=1, timeout=timeout_s, fetch_local=False)
        if not done:
            return []
        done, _ = ray.wait(watched, num_returns=len(watched), timeout=0, fetch_local=False)
        ended = [
            owner.get(ref, ref) for ref in done if ref not in owner or self._failed(ref, owner[ref])
        ]
        return list(dict.fromkeys(ended))

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
        as_answer = self._as_answer.pop(future, lambda answer: answer)
        return as_answer(_joint_answer(future, others) if others else _get(future))

    def forget(self, future: Any) -> None:
        self._joint.pop(future, None)
        self._as_answer.pop(future, None)

    def fetch(self, handle: Any) -> Any:
        return _get(handle)

    def store(self, data: Any) -> Any:
        return ray.put(data)


def _weights(tensors: Any, version: int, checksum: str, num_bytes: int) -> WeightsAnswer:
    return WeightsAnswer(tensors=tensors, version=version, checksum=checksum, num_bytes=num_bytes)


def _joint_answer(first: Any, others: list[Any]) -> Any:
    """Return rank 0's answer to a call of all ranks, once all have answered.

    A rank that is gone makes the others' part of the call fail, too (gloo: "connection closed by peer"), and Ray may
    learn of its end later than of their errors. So PartLost comes before any other error.
    """
    ended, _ = ray.wait(others, num_returns=len(others), timeout=0)
    try:
        for ref in ended:  # another rank's error first: rank 0 may be waiting for that rank
            _get(ref)
        answer = _get(first)
        for ref in others:
            _get(ref)
    except PartLost:
        raise
    except Exception as error:  # supervision boundary: the reason may be another rank's end
        lost = _loss_among([first, *others])
        if lost is None:
            raise
        raise lost from error
    return answer


def _loss_among(refs: list[Any]) -> PartLost | None:
    """Return which rank's end made a call of all ranks fail, if any does within RANK_LOSS_S or until all have ended."""
    deadline, left = time.monotonic() + RANK_LOSS_S, refs
    while left:
        done, left = ray.wait(left, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            return None
        try:
            _get(done[0])
        except PartLost as lost:
            return lost
        except Exception:  # supervision boundary: errors without a loss are the caller's to raise
            continue
    return None


def _get(ref: Any) -> Any:
    """ray.get, with PartLost for what is gone."""
    try:
        return ray.get(ref)
    except ObjectLostError as error:
        raise PartLost(_first_line(error), is_data=True) from error
    except GONE as error:
        raise PartLost(_first_line(error)) from error
    except RayTaskError as error:
        cause: Any = getattr(error, "cause", None)
        if isinstance(cause, ObjectLostError):
            raise PartLost(_first_line(cause), is_data=True) from error
        raise


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
