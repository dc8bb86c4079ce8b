"""Makes configs/model/shapes from nothing: `python -m benchmarks.make_model --workdir runs/model`.

Renders scenes, trains the autoencoder, encodes every scene once, trains text encoders and
transformer on the flow-matching loss, scores on the held-out prompts, writes a diffusers folder.
Stopping and starting it again with the same --workdir goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL

from benchmarks.shapes_model import autoencoder as autoencoder_module
from benchmarks.shapes_model import flow, ranks
from benchmarks.shapes_model.data import (
    CHUNK,
    encode_latents,
    load_scenes,
    make_scenes,
    standardise,
)
from benchmarks.shapes_model.export import export_pipeline, load_exported, write_card
from benchmarks.shapes_model.networks import TextToVelocity
from benchmarks.shapes_model.ranks import NUM_RANKS
from benchmarks.shapes_model.scores import means, score_lines
from benchmarks.shapes_model.tokenizer import MAX_TOKENS
from rewards.shapes.grammar import eval_records


def get_autoencoder(
    rank: int, workdir: Path, images: np.ndarray, seed: int, num_steps: int
) -> AutoencoderKL:
    """The trained autoencoder, from workdir or made now; the same on every rank."""
    folder = workdir / "autoencoder"
    if not (folder / "facts.json").exists():
        start = time.monotonic()
        model, facts = autoencoder_module.train_autoencoder(rank, images, seed, num_steps)
        if rank == 0:
            model.save_pretrained(folder)
            facts = {**facts, "steps": num_steps, "seconds": time.monotonic() - start}
            (folder / "facts.json").write_text(json.dumps(facts))
            print(f"autoencoder {facts}", flush=True)
    dist.barrier()
    return AutoencoderKL.from_pretrained(folder).requires_grad_(False)


def make(rank: int, args: argparse.Namespace) -> None:
    """Everything but the export, on one rank."""
    start = time.monotonic()
    make_scenes(rank, args.workdir, args.seed, args.num_chunks)
    images, captions = load_scenes(rank, args.workdir, args.num_chunks)
    if rank == 0:
        print(f"scenes seconds {time.monotonic() - start:.0f}", flush=True)
    autoencoder = get_autoencoder(rank, args.workdir, images, args.seed, args.autoencoder_steps)
    start = time.monotonic()
    latents = standardise(autoencoder, encode_latents(autoencoder, images))
    if rank == 0:
        print(f"latents seconds {time.monotonic() - start:.0f}", flush=True)
        autoencoder.save_config(args.workdir / "autoencoder")
    del images
    flow.train_flow(
        rank,
        latents,
        torch.from_numpy(captions),
        autoencoder,
        args.workdir,
        args.seed,
        args.steps,
    )


def export(args: argparse.Namespace) -> None:
    """Write the EMA weights of step --steps as a model folder, score it as reloaded, add its card.

    Training that went on for longer is no obstacle: every scored step's weights are kept.
    """
    lines = map(json.loads, (args.workdir / "scores.jsonl").read_text().splitlines())
    by_step = {line["step"]: line for line in lines}
    if args.steps not in by_step:
        raise ValueError(f"--steps {args.steps} is not among the scored steps {sorted(by_step)}")
    line = by_step[args.steps]
    model = TextToVelocity()
    model.load_state_dict(torch.load(args.workdir / f"ema_{line['step']}.pt", weights_only=True))
    num_flow = sum(p.numel() for p in model.parameters())
    autoencoder = AutoencoderKL.from_pretrained(args.workdir / "autoencoder")
    export_pipeline(model, autoencoder, args.out)
    reloaded, autoencoder = load_exported(args.out)
    scores = means(score_lines(reloaded, autoencoder, range(len(eval_records()))))
    facts = json.loads((args.workdir / "autoencoder" / "facts.json").read_text())
    write_card(
        args.out,
        {
            "seed": args.seed,
            "num_scenes": args.num_chunks * CHUNK,
            "max_tokens": MAX_TOKENS,
            "autoencoder": {
                **facts,
                "batch": NUM_RANKS * autoencoder_module.BATCH_PER_RANK,
                "parameters": sum(p.numel() for p in autoencoder.parameters()),
            },
            "flow": {
                "steps": line["step"],
                "batch": NUM_RANKS * flow.BATCH_PER_RANK,
                "seconds": line["seconds"],
                "loss": line["loss"],
                "parameters": num_flow,
            },
            "scores": scores,
        },
    )
    print(f"exported step {line['step']}: {scores}", flush=True)


def main() -> None:
    """Parse the command line, train, export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=Path, default=Path("runs/model"))
    parser.add_argument("--out", type=Path, default=Path("configs/model/shapes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000, help="of the flow training")
    parser.add_argument("--autoencoder-steps", type=int, default=3500)
    parser.add_argument("--num-chunks", type=int, default=200, help="of 1000 scenes each")
    parser.add_argument("--export-only", action="store_true", help="train nothing")
    args = parser.parse_args()
    if not 0 < args.steps <= flow.SCHEDULE_STEPS:
        raise ValueError(f"--steps must be in 1..{flow.SCHEDULE_STEPS}, got {args.steps}")
    args.workdir.mkdir(parents=True, exist_ok=True)
    if not args.export_only:
        ranks.run(make, args.workdir, args)
    export(args)


if __name__ == "__main__":
    main()
