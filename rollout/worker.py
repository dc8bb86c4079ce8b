"""RolloutWorker: samples slices of groups, decodes their clean estimates, records what happened. No
ray here."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rollout.config import ModelConfig, RolloutConfig, SamplingConfig
from rollout.embeddings import PromptEmbeddings
from rollout.families.base import Conditioning, Family, PolicyVelocity, to_uint8
from rollout.families.registry import load_family
from rollout.families.trainable import (
    attach_lora,
    checksum,
    load_tensors,
    make_trainable_full,
    trainable_tensors,
)
from rollout.flow.estimates import VelocityFn
from rollout.flow.gaussian import LOG_PROB_REDUCTION
from rollout.flow.noise import initial_noise, step_noise, stream_seed
from rollout.plan import make_plan, ode_plan
from rollout.records import (
    AdapterSpec,
    EvaluationImages,
    Previews,
    SampleResult,
    SliceRequest,
    WeightReport,
)
from rollout.rows import Rows, preview_pngs
from rollout.sampler import Path, clean_estimates, sample
from rollout.stats import RolloutStats
from rollout.trajectory import Header, RecordBatch, slice_batch

CPU_DECODE_BATCH = 32
"""Latents of one decoder call on a CPU: larger ones fall out of its caches (0.8 -> 1.5 ms an image at 256)."""


class RolloutWorker:
    """One model on one device that turns slice requests into facts and previews.

    Results are a function of the requests, the weights and the config, not of the order of calls.
    """

    def __init__(
        self,
        model: ModelConfig,
        sampling: SamplingConfig,
        settings: RolloutConfig,
        adapter: AdapterSpec,
        run_seed: int,
        credit_scored_states: Literal["all", "trained", "final"] = "all",
    ) -> None:
        """Load the model, without trained weights: `load_weights` comes before the first `sample`.

        Raises ValueError when the model or the plan is impossible, or settings ask for a GPU that
        isn't there.
        """
        torch.set_num_threads(settings.threads_per_worker)
        self.device = _device(settings)
        self.settings, self.run_seed = settings, run_seed
        self.family: Family = load_family(model, self.device)
        prepare_network(self.family, adapter, run_seed)
        times = self.family.times(sampling.num_steps)
        self.plan = make_plan(sampling, times, credit_scored_states)
        self.version: int | None = None
        """Policy version of the loaded weights; None before any arrived."""
        self._embed = PromptEmbeddings(self.family, settings.embedding_dtype)
        self._policy = self._make_policy(self.plan.guidance_scale)
        self._header = self._make_header()

    def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> WeightReport:
        """Copy `tensors` into the network; the report's checksum is read back from the live
        tensors.

        Raises ValueError, leaving the old weights in place, when names or shapes differ.
        """
        load_tensors(self.family.network, tensors)
        self.version = version
        live = trainable_tensors(self.family.network)
        return WeightReport(version=version, num_tensors=len(live), checksum=checksum(live))

    @torch.inference_mode()
    def sample(self, requests: Sequence[SliceRequest]) -> SampleResult:
        """Sample all slices in one network batch, and decode the clean estimates of their scored
        states.

        Raises ValueError when a request names another policy version than the loaded one, or
        another run seed.
        """
        self._check(requests)
        stats, rows = RolloutStats(), Rows(requests, self.device)
        calls_before = self._policy.num_network_calls
        with self._timed(stats, "encode_s"):
            per_slice = self._embed([request.group.prompt for request in requests])
        conditioning = {name: value[rows.slice_index] for name, value in per_slice.items()}
        with self._timed(stats, "sample_s"):
            path = self._sample(rows, per_slice, conditioning)
        states, chosen = rows.scored_pairs(self.plan)
        with self._timed(stats, "estimate_s"):
            estimates = self._estimates(path, states, chosen, conditioning)
        with self._timed(stats, "decode_s"):
            images = self._decode(estimates)
        with self._timed(stats, "record_s"):
            previews = rows.previews(images, states, chosen)
            slices = self._record(rows, path, per_slice, previews)
        stats.num_images, stats.num_previews = len(rows), len(images)
        stats.num_transitions = self.plan.num_steps * len(rows)
        stats.num_network_calls = self._policy.num_network_calls - calls_before
        return SampleResult(slices=slices, previews=previews, stats=stats)

    @torch.inference_mode()
    def evaluate(
        self,
        prompts: Sequence[str],
        noise_ids: Sequence[int],
        num_steps: int,
        guidance_scale: float = 1.0,
        noise_seed: int = 0,
    ) -> EvaluationImages:
        """Make one image a prompt along the ODE, from the initial latent that (noise_seed,
        noise_ids[i]) names.

        The noise depends on nothing else, so two models can be compared on equal terms; no training
        noise equals it. Raises ValueError when prompts and noise_ids differ in number.
        """
        if len(prompts) != len(noise_ids) or not prompts:
            raise ValueError(
                f"{len(prompts)} prompts and {len(noise_ids)} noise ids must be as many, at least 1"
            )
        seed = stream_seed(noise_seed, "evaluation")
        shape = self.family.latent_shape
        latents = torch.stack([initial_noise(shape, seed, i, 0, shared=True) for i in noise_ids])
        stats = RolloutStats(num_images=len(prompts), num_transitions=num_steps * len(prompts))
        images = []
        for begin in range(0, len(prompts), self.settings.estimate_batch):
            part = slice(begin, begin + self.settings.estimate_batch)
            images.append(
                self._evaluate(prompts[part], latents[part], num_steps, guidance_scale, stats)
            )
        return EvaluationImages(
            images=np.concatenate(images), initial_latents=latents.numpy(), stats=stats
        )

    def _evaluate(
        self,
        prompts: Sequence[str],
        latents: Tensor,
        num_steps: int,
        guidance_scale: float,
        stats: RolloutStats,
    ) -> np.ndarray:
        """Make the uint8 images of one batch, and add what it took to `stats`."""
        plan = ode_plan(self.family.times(num_steps), guidance_scale)
        with self._timed(stats, "encode_s"):
            conditioning = self._embed(prompts)
            policy = self._make_policy(guidance_scale)
        with self._timed(stats, "sample_s"):
            path = sample(
                lambda x, t: policy(x, t, conditioning), latents.to(self.device), plan, _no_noise
            )
        with self._timed(stats, "decode_s"):
            images = self._decode(path.states[-1])
        stats.num_network_calls += policy.num_network_calls
        stats.num_previews += len(images)
        return images

    def _check(self, requests: Sequence[SliceRequest]) -> None:
        if not requests:
            raise ValueError("sample needs at least one slice request")
        for request in requests:
            group = request.group
            if group.policy_version != self.version:
                loaded = "none is" if self.version is None else f"version {self.version} is"
                raise ValueError(
                    f"group {group.group_id} wants policy version {group.policy_version}, "
                    f"but {loaded} loaded"
                )
            if group.run_seed != self.run_seed:
                raise ValueError(
                    f"group {group.group_id} has run_seed {group.run_seed}, "
                    f"but this worker {self.run_seed}"
                )

    def _sample(self, rows: Rows, per_slice: Conditioning, conditioning: Conditioning) -> Path:
        shape, plan = self.family.latent_shape, self.plan
        shared = plan.shared_initial_noise

        def noise_fn(step: int) -> Tensor:
            drawn = [step_noise(shape, self.run_seed, g, i, step) for g, i in rows.identities]
            return torch.stack(drawn)

        def velocity_fn(x: Tensor, t: Tensor) -> Tensor:
            return self._policy(x, t, conditioning)

        drawn = [initial_noise(shape, self.run_seed, g, i, shared) for g, i in rows.identities]
        x_T = torch.stack(drawn).to(self.device)
        first_velocity = None
        if shared:  # all rows of a slice are equal at x_T: one velocity for each slice
            x = x_T[rows.first_rows]
            t = x.new_full((len(x),), plan.times[0])
            first_velocity = self._policy(x, t, per_slice)[rows.slice_index]
        return sample(velocity_fn, x_T, plan, noise_fn, first_velocity)

    def _estimates(
        self, path: Path, states: Tensor, rows: Tensor, conditioning: Conditioning
    ) -> Tensor:
        def velocity_of(chosen: Tensor) -> VelocityFn:
            own = {name: value[chosen] for name, value in conditioning.items()}
            return lambda x, t: self._policy(x, t, own)

        max_batch = self.settings.estimate_batch
        return clean_estimates(velocity_of, path, self.plan, states, rows, max_batch)

    def _decode(self, latents: Tensor) -> np.ndarray:
        """uint8 [P, H, W, 3], in batches of at most estimate_batch. RuntimeError when a latent or an
        image isn't finite."""
        on_cpu = self.device.type == "cpu"
        batch = min(self.settings.estimate_batch, CPU_DECODE_BATCH if on_cpu else len(latents))
        self._check_finite("latents", latents)
        images = []
        for part in latents.split(batch):
            decoded = self.family.decode(part)
            self._check_finite("images", decoded)
            images.append(to_uint8(decoded))
        return np.concatenate(images)

    def _check_finite(self, what: str, values: Tensor) -> None:
        """A NaN would become black pixels, which a reward scores like any others."""
        if bool(values.isfinite().all()):
            return
        raise RuntimeError(
            f"policy version {self.version} gives {what} that are not finite: look for weights that "
            "grew (learner.lr too large), or a model.dtype that overflows (float16)"
        )

    def _record(
        self, rows: Rows, path: Path, per_slice: Conditioning, previews: Previews
    ) -> list[RecordBatch]:
        states = path.states.transpose(0, 1).contiguous().cpu().numpy()
        log_probs = path.log_probs.T.contiguous().cpu().numpy()
        embedded = {f"conditioning.{n}": v.cpu().numpy() for n, v in per_slice.items()}
        negative = {f"negative.{n}": v[0].cpu().numpy() for n, v in self._negative.items()}
        slices = []
        for i, (request, part) in enumerate(zip(rows.requests, rows.slices, strict=True)):
            own = {name: value[i] for name, value in embedded.items()} | negative
            pngs = preview_pngs(request, previews, self.plan.num_steps + 1)
            slices.append(
                slice_batch(self._header, request, states[part], log_probs[part], own, pngs)
            )
        return slices

    def _make_policy(self, guidance_scale: float) -> PolicyVelocity:
        negative = None if guidance_scale == 1.0 else self._embed([""])
        return PolicyVelocity(self.family, self.family.network, guidance_scale, negative)

    @property
    def _negative(self) -> Conditioning:
        return self._policy.negative or {}

    def _make_header(self) -> Header:
        named = {f"conditioning.{name}": value for name, value in self._embed([""]).items()}
        named |= {f"negative.{name}": value for name, value in self._negative.items()}
        return Header(
            plan=self.plan,
            run_seed=self.run_seed,
            latent_shape=self.family.latent_shape,
            log_prob_reduction=LOG_PROB_REDUCTION,
            embedding_dtype=self.settings.embedding_dtype,
            embedding_shapes={name: tuple(value.shape[1:]) for name, value in named.items()},
        )

    @contextmanager
    def _timed(self, stats: RolloutStats, name: str) -> Iterator[None]:
        """Add the block's seconds, the device's work included, to the field `name` of `stats`."""
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        setattr(stats, name, getattr(stats, name) + time.perf_counter() - begin)


def prepare_network(family: Family, adapter: AdapterSpec, seed: int) -> None:
    """Make the network's trainable tensors those that `adapter` names."""
    if adapter.adapter == "lora":
        targets = adapter.targets or family.lora_targets
        attach_lora(family.network, adapter.rank, adapter.alpha, targets, seed)
    elif adapter.adapter == "full":
        make_trainable_full(family.network)


def _no_noise(step: int) -> Tensor:
    raise AssertionError(f"the ODE asked for the noise of step {step}")


def _device(settings: RolloutConfig) -> torch.device:
    if settings.gpus_per_worker == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"rollout.gpus_per_worker = {settings.gpus_per_worker}, but this process sees no GPU; "
            "set it to 0, or give the cluster GPUs"
        )
    return torch.device("cuda")
