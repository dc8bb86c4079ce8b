"""LearnerWorker: sealed groups in, a better policy out. One object per rank; no ray here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from learner import checkpoint
from learner.anchors import Ema, frozen_copy, reference_velocities
from learner.batching import Update, plan_updates
from learner.checkpoint import Checkpoint, CheckpointError
from learner.checks import (
    check_guidance,
    check_precision,
    check_ratio,
    dump_batch,
    find_device,
    is_on_policy,
    non_finite_loss,
)
from learner.config import CreditConfig, LearnerConfig, ObjectiveConfig
from learner.credit import make_credit
from learner.credit_batch import CreditBatch, read_batch
from learner.engine import Engine, init_distributed
from learner.loss import transition_loss
from learner.objective import make_objective
from learner.phases import Phases
from learner.stats import LearnerStats
from learner.totals import UpdateTotals, learner_stats
from learner.transitions import RankTransitions, negative_conditioning
from rollout.config import ModelConfig
from rollout.families.base import PolicyVelocity
from rollout.families.registry import load_family
from rollout.families.trainable import attach_lora, checksum, make_trainable_full, num_bytes
from rollout.flow.noise import stream_seed
from rollout.trajectory import RecordBatch

WeightKind = Literal["raw", "ema"]
Weights = tuple[int, dict[str, Tensor], str]
"""Policy version, CPU tensors by name, checksum."""


class KeptVersion(NamedTuple):
    """An older version of the weights, as `LearnerWorker.weights("raw")` gave it then."""

    version: int
    """Policy version."""
    tensors: dict[str, Tensor]
    """On the CPU, in the live tensors' dtypes."""
    checksum: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """One batch as this rank works on it."""

    batch: CreditBatch
    updates: list[Update]
    transitions: RankTransitions
    policy: PolicyVelocity
    references: list[list[Tensor]]
    """v_ref by update and micro-batch; empty without KL."""


class LearnerWorker:
    """One rank of the learner. Methods are collective: all ranks call them, with equal
    arguments."""

    def __init__(
        self,
        model: ModelConfig,
        config: LearnerConfig,
        credit: CreditConfig,
        objective: ObjectiveConfig,
        *,
        guidance_scale: float,
        run_seed: int,
        rank: int = 0,
        world_size: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int = 0,
        dump_dir: str = ".",
    ) -> None:
        """Load the network, attach what is trained, join the other ranks at master_addr:master_port
        (a lone rank needs none). dump_dir takes batches that went wrong.

        Raises ValueError when the model can't be loaded, a name in a config is unknown, the
        precision doesn't fit the model's dtype, or a GPU is asked for that isn't there.
        """
        torch.set_num_threads(config.threads_per_rank)
        check_precision(model, config)
        self.model, self.config, self.objective_config = model, config, objective
        self.guidance_scale, self.run_seed, self.rank = guidance_scale, run_seed, rank
        self._dump_dir = Path(dump_dir)
        self._credit, self._objective = make_credit(credit), make_objective(objective)
        device = find_device(config)
        self.family = load_family(model, device, parts=("network",))
        network = self.family.network
        self._frozen = None
        if config.adapter == "lora":
            targets = config.lora_targets or self.family.lora_targets
            attach_lora(network, config.lora_rank, config.lora_alpha, targets, run_seed)
        else:
            self._frozen = frozen_copy(network) if objective.kl_weight > 0 else None
            make_trainable_full(network)
        init_distributed(rank, world_size, master_addr, master_port, gpu=device.type == "cuda")
        self.engine = Engine(network, config, rank, world_size)
        self.version = 0
        """Policy version of the present weights: batches consumed."""
        self._ema: Ema | None = None
        if config.ema_decay > 0:
            self._ema = Ema(self.engine.full_tensors(), config.ema_decay)

    # training

    def step(self, groups: Sequence[RecordBatch], *, recorded: bool = False) -> LearnerStats:
        """Train on one batch of sealed groups; the policy version rises by one.

        recorded: the groups come from another run's files, so their policy versions say nothing
        about this learner's weights: never on-policy, any version is taken, no gate. Raises
        RatioGateError on an on-policy batch whose ratio isn't 1, NonFiniteLoss (the batch is dumped
        first), and ValueError when the groups don't fit together or this learner.
        """
        phases = Phases(self.engine.device)
        work = self._prepare(groups, self.config.updates_per_batch, phases)
        on_policy = not recorded and is_on_policy(work.batch, self.version)
        totals: list[UpdateTotals] = []
        norms: list[float] = []
        for number in range(len(work.updates)):
            with phases.timed("accumulate"):
                totals.append(self._accumulate(work, number))
            self._check_finite(groups, f"loss of update {number}", totals[-1].loss)
            if number == 0 and on_policy:
                self._check_ratio(work, totals[0])
            with phases.timed("optimizer"):
                norms.append(self.engine.step())
            self._check_finite(groups, f"gradient norm of update {number}", norms[-1])
            with phases.timed("ema"):
                if self._ema is not None:
                    self._ema.update(self.engine.full_tensors())
        self.version += 1
        return learner_stats(
            work.batch,
            work.updates,
            totals,
            on_policy=on_policy,
            grad_norm=norms,
            num_ranks=self.engine.world_size,
            num_network_calls=work.policy.num_network_calls,
            seconds=phases.seconds,
        )

    def gradient(self, groups: Sequence[RecordBatch]) -> dict[str, Tensor]:
        """Return the gradient of the whole batch, as one update, at the present weights and before
        clipping; step nothing. float32 on the CPU by name; {} on other ranks than 0. No gate."""
        work = self._prepare(groups, 1, Phases(self.engine.device))
        self._accumulate(work, 0)
        found = self.engine.gradients()
        self.engine.discard_gradients()
        return found

    def _prepare(self, groups: Sequence[RecordBatch], num_updates: int, phases: Phases) -> Work:
        """Credit from all groups, then this rank's latents, then the reference's velocities."""
        engine = self.engine
        with phases.timed("credit"):
            batch = read_batch(groups, self._credit)
            check_guidance(batch, self.guidance_scale)
            updates = plan_updates(
                batch.valid,
                num_updates=num_updates,
                rank=self.rank,
                num_ranks=engine.world_size,
                micro_batch=self.config.micro_batch,
                seed=stream_seed(self.run_seed, "batching", self.version),
            )
        with phases.timed("load"):
            transitions = RankTransitions(batch, updates, engine.device)
            negative = negative_conditioning(batch, engine.device)
            policy = PolicyVelocity(self.family, engine.network, self.guidance_scale, negative)
        references: list[list[Tensor]] = []
        if self.objective_config.kl_weight > 0:
            with phases.timed("reference"):
                for update in updates:
                    rows = (transitions.rows(micro) for micro in update.micro_batches)
                    found = reference_velocities(policy, engine.module, self._frozen, rows)
                    references.append(found)
        return Work(batch, updates, transitions, policy, references)

    def _accumulate(self, work: Work, number: int) -> UpdateTotals:
        """Forward and backward of one update's micro-batches; then its numbers over all ranks."""
        totals = UpdateTotals(self.engine.device)
        micro_batches = work.updates[number].micro_batches
        for index, micro in enumerate(micro_batches):
            rows = work.transitions.rows(micro)
            v_ref = work.references[number][index] if work.references else None
            loss, terms = transition_loss(
                work.policy, rows, self._objective, self.objective_config, v_ref
            )
            self.engine.backward(loss, last=index == len(micro_batches) - 1)
            totals.add(terms, rows.weight)
        totals.reduce(self.engine)
        return totals

    def _check_finite(self, groups: Sequence[RecordBatch], what: str, value: float) -> None:
        if value - value == 0:
            return
        folder = self._dump_dir / f"nonfinite_version_{self.version:06d}"
        if self.rank == 0:
            report = {"what": what, "value": str(value), "policy_version": self.version}
            dump_batch(folder, groups, report | self._settings())
        raise non_finite_loss(what, value, folder)

    def _check_ratio(self, work: Work, totals: UpdateTotals) -> None:
        trajectory, step = totals.worst(work.updates[0])
        where = f"{work.batch.name(trajectory)}, transition {step}"
        tolerance = self.config.ratio_tolerance
        check_ratio(totals.max_abs_log_ratio, tolerance, where, self.version)

    def wait_for_ranks(self) -> None:
        """Return when every rank has called this."""
        self.engine.all_reduce(torch.zeros(1), "sum")

    # weights and checkpoints

    def weights(self, kind: WeightKind = "raw") -> Weights:
        """Return (policy version, CPU tensors in the live tensors' dtypes, their checksum).

        Other ranks than 0 get ({}, "") beside the version. ValueError when averaged weights are
        asked for and none are kept.
        """
        found = self._float_tensors(kind)
        tensors = {name: tensor.to(self.engine.dtypes[name]) for name, tensor in found.items()}
        return self.version, tensors, checksum(tensors) if tensors else ""

    def export(self, folder: str, kind: WeightKind) -> None:
        """Write the trained weights in diffusers' format: a LoRA, or after full fine-tuning a whole
        pipeline folder."""
        tensors, place = self._float_tensors(kind), Path(folder)
        if self.rank != 0:
            return
        place.mkdir(parents=True, exist_ok=True)
        if self.config.adapter == "lora":
            self.family.save_lora(place, tensors, self.config.lora_alpha)
        else:
            self.family.save_full(place, tensors)

    def save_checkpoint(
        self,
        folder: str,
        state: dict[str, Any],
        kept: Mapping[int, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Write all that training needs to go on, and the caller's JSON `state`, to `folder`, which
        should be called step_NNNNNN.

        kept: older versions that batches will yet be sampled with, by number, as `weights("raw")`
        gave them; only rank 0 reads it. Raises what `checkpoint.save` does, on rank 0.
        """
        weights, optimizer = self.engine.full_tensors(), self.engine.optimizer_state()
        if self.rank != 0:
            return
        content = Checkpoint(
            weights=weights,
            optimizer=optimizer,
            ema=None if self._ema is None else self._ema.tensors,
            policy_version=self.version,
            identity=self._identity(),
            config_digest=blake2b(repr(self._settings()).encode(), digest_size=16).hexdigest(),
            state=state,
        )
        checkpoint.save(Path(folder), content, kept)

    def load_checkpoint(self, folder: str) -> dict[str, Any]:
        """Go on from `folder`, written under any number of ranks and ZeRO stage; return the
        caller's state.

        Raises CheckpointError when the folder is damaged, or its adapter or its tensors' names
        aren't this learner's. An average that the checkpoint lacks starts at its weights.
        """
        found = checkpoint.load(Path(folder))
        if found.identity != self._identity():
            raise CheckpointError(
                f"{folder} was written with {found.identity}, this learner has {self._identity()}"
            )
        try:
            self.engine.load_full_tensors(found.weights)
            self.engine.load_optimizer_state(found.optimizer)
        except ValueError as error:
            raise CheckpointError(f"{folder} doesn't fit this learner: {error}") from error
        if self._ema is not None and self.rank == 0:
            self._ema.restart(found.ema or found.weights)
        self.version = found.policy_version
        return found.state

    def kept_versions(self, folder: str) -> list[KeptVersion]:
        """Return the older versions that the checkpoint `folder` holds, oldest first; [] on other
        ranks than 0. CheckpointError when one is damaged."""
        if self.rank != 0:
            return []
        return [
            KeptVersion(version, tensors, checksum(tensors), num_bytes(tensors))
            for version, tensors in checkpoint.load_kept(Path(folder)).items()
        ]

    def _float_tensors(self, kind: WeightKind) -> dict[str, Tensor]:
        """Float32 copies."""
        if kind == "raw":
            return self.engine.full_tensors()
        if self._ema is None:
            raise ValueError(
                "learner.ema_decay = 0 keeps no averaged weights; ask for the raw ones"
            )
        return {name: tensor.clone() for name, tensor in self._ema.tensors.items()}

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint's tensors mean, beyond their names and shapes."""
        config = self.config
        if config.adapter == "full":
            return {"adapter": "full"}
        return {"adapter": "lora", "rank": config.lora_rank, "alpha": config.lora_alpha}

    def _settings(self) -> dict[str, Any]:
        return {
            "model": self.model.model_dump(mode="json"),
            "learner": self.config.model_dump(mode="json"),
            "objective": self.objective_config.model_dump(mode="json"),
        }
