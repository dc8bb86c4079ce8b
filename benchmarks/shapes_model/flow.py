"""Trains text encoders and transformer together on the flow-matching loss."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import AutoencoderKL
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.shapes_model.data import CAPTIONS
from benchmarks.shapes_model.networks import TextToVelocity, caption_ids
from benchmarks.shapes_model.ranks import NUM_RANKS, average_gradients, total
from benchmarks.shapes_model.scores import NUM_ZERO_TOKENS, means, score_lines
from rewards.shapes.grammar import eval_records

BATCH_PER_RANK = 96
LEARNING_RATE = 2e-3
WARMUP_STEPS = 300
SCHEDULE_STEPS = 10_000  # where the rate would reach zero; the shipped model stops well before,
# so that reinforcement learning has something to improve
EMPTY_CAPTION_FRAC = 0.1
TIME_LOGIT = (0.7, 1.1)  # mean and std of logit(t); denser at noisy times is worse (tried)
LONG_TEXT_FRAC = 0.1  # share of batches with LONG_ZERO_TOKENS zero tokens instead of one
LONG_ZERO_TOKENS = 16
EMA_DECAY = 0.999
LOG_EVERY = 100
SCORE_EVERY = 500


@dataclass(kw_only=True)
class FlowRun:
    """Where the flow training stands; what a checkpoint holds."""

    model: TextToVelocity
    ema: TextToVelocity
    optimizer: torch.optim.Optimizer
    step: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        torch.save(
            {
                "model": self.model.state_dict(),
                "ema": self.ema.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "seconds": self.seconds,
            },
            partial,
        )
        partial.rename(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]


def start_run(seed: int) -> FlowRun:
    """Fresh weights, the same on every rank."""
    torch.manual_seed(seed)
    model = TextToVelocity()
    ema = copy.deepcopy(model).requires_grad_(False)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    return FlowRun(
        model=model,
        ema=ema,
        optimizer=torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True),
    )


def learning_rate(step: int) -> float:
    """Linear rise, then a linear fall to zero at SCHEDULE_STEPS."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    return LEARNING_RATE * max(0.0, 1 - (step - WARMUP_STEPS) / (SCHEDULE_STEPS - WARMUP_STEPS))


def flow_loss(
    model: TextToVelocity, clean: torch.Tensor, ids: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Mean squared error of the velocity at random times, for clean latents [B, 16, 4, 4]."""
    mean, std = TIME_LOGIT
    t = torch.sigmoid(mean + std * torch.randn(len(clean), generator=generator))
    noise = torch.randn(clean.shape, generator=generator)
    is_long = torch.rand((), generator=generator) < LONG_TEXT_FRAC
    mix = t[:, None, None, None]
    # On the CPU the fused attention's backward is several times slower than the plain one.
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        embeds, pooled = model.encode(ids, LONG_ZERO_TOKENS if is_long else NUM_ZERO_TOKENS)
        predicted = model.velocity((1 - mix) * clean + mix * noise, t, embeds, pooled)
    return (predicted.float() - (noise - clean)).square().mean()


def one_step(run: FlowRun, loss: torch.Tensor) -> None:
    """Backward, average, clip, update, EMA."""
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.step)
    run.optimizer.zero_grad()
    loss.backward()
    average_gradients(run.model.parameters())
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.step += 1
    decay = min(EMA_DECAY, (1 + run.step) / (10 + run.step))
    with torch.no_grad():
        torch._foreach_lerp_(list(run.ema.parameters()), list(run.model.parameters()), 1 - decay)


def train_flow(
    rank: int,
    latents: torch.Tensor,
    captions: torch.Tensor,
    autoencoder: AutoencoderKL,
    workdir: Path,
    seed: int,
    num_steps: int,
) -> FlowRun:
    """Train for num_steps on standardised latents [N, 16, 4, 4], resuming from workdir/flow.pt."""
    run = start_run(seed)
    checkpoint = workdir / "flow.pt"
    if checkpoint.exists():
        run.load(checkpoint)
    all_ids = caption_ids([*CAPTIONS, ""])
    generator = torch.Generator().manual_seed((seed * 1000 + rank) * 1_000_000 + run.step)
    start = time.monotonic() - run.seconds
    recent: list[float] = []
    while run.step < num_steps:
        index = torch.randint(len(latents), (BATCH_PER_RANK,), generator=generator)
        caption = captions[index].clone()
        caption[torch.rand(BATCH_PER_RANK, generator=generator) < EMPTY_CAPTION_FRAC] = -1
        loss = flow_loss(run.model, latents[index], all_ids[caption], generator)
        one_step(run, loss)
        recent = [*recent[-(LOG_EVERY - 1) :], loss.item()]
        run.seconds = time.monotonic() - start
        if rank == 0 and run.step % LOG_EVERY == 0:
            mean = sum(recent) / len(recent)
            print(f"flow step {run.step} loss {mean:.4f} seconds {run.seconds:.0f}", flush=True)
        if run.step % SCORE_EVERY == 0 or run.step == num_steps:
            report(rank, run, autoencoder, workdir, sum(recent) / len(recent))
    return run


def report(rank: int, run: FlowRun, autoencoder: AutoencoderKL, workdir: Path, loss: float) -> None:
    """Score the EMA weights, log them, and write a checkpoint."""
    lines = range(rank, len(eval_records()), NUM_RANKS)
    scores = means(total(score_lines(run.ema, autoencoder, lines)))
    if rank == 0:
        line = {"step": run.step, "seconds": run.seconds, "loss": loss, "scores": scores}
        with (workdir / "scores.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        text = ", ".join(f"{name} {s:.3f}/{g:.3f}" for name, (s, g) in scores.items())
        print(f"flow step {run.step} strict/graded: {text}", flush=True)
        run.save(workdir / "flow.pt")
        torch.save(run.ema.state_dict(), workdir / f"ema_{run.step}.pt")
    dist.barrier()
