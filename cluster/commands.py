"""`flowcredit evaluate` and `flowcredit sample`: draw with any run, checkpoint or model."""

import json
import re
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from safetensors.numpy import save_file

from cluster.evaluation import EvaluationRun, HeldOut, held_out, picked
from cluster.evaluation_table import Columns, single_table, summarise, write_jsonl
from cluster.pictures import grid
from cluster.run_folder import write_json
from cluster.target import Target, opened


def evaluate_target(target: Target, out: Path | None, address: str | None) -> None:
    """Score the held-out prompts; print the table, and with `out` keep lines, summary and a grid of images."""
    with opened(target, address, with_rewards=True) as (config, fleet, weights):
        settings = config.evaluation
        lines = held_out(settings.path, settings.num_prompts, settings.seed)
        seen = EvaluationRun(fleet, weights, lines, config).run().result()
    table = summarise(seen.records, Columns(graded=settings.graded, strict=settings.strict))
    Console().print(single_table(table, target.description))
    if out is None:
        return
    write_jsonl(out / "lines.jsonl", seen.records)
    facts = {"target": target.description, "evaluation": table, "counts": seen.counts}
    write_json(out / "summary.json", facts)
    chosen, captions = picked(seen, settings.graded)
    grid(seen.images[chosen], captions, num_columns=6).save(out / "grid.png")
    Console(soft_wrap=True).print(f"written to {out}", highlight=False, markup=False)


def sample_target(
    target: Target, out: Path, address: str | None, prompts: list[str], seed: int
) -> None:
    """Draw prompts to PNG files; `latents.safetensors` holds the noise of each, in the order of `prompts.json`."""
    lines = HeldOut(
        prompts=prompts,
        metadata=[{}] * len(prompts),
        noise_ids=list(range(len(prompts))),
        noise_seed=seed,
    )
    with opened(target, address, with_rewards=False) as (config, fleet, weights):
        drawn = EvaluationRun(fleet, weights, lines, config, scored=False).run().images()
    images = np.concatenate([chunk.images for chunk in drawn])
    latents = np.concatenate([chunk.initial_latents for chunk in drawn])
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("[0-9][0-9][0-9]-*.png"):
        stale.unlink()
    for index, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
        slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60]
        Image.fromarray(image).save(out / f"{index:03d}-{slug}.png")
    save_file({"latents": latents}, out / "latents.safetensors")
    facts = {
        "format_version": 1,
        "target": target.description,
        "prompts": prompts,
        "num_steps": config.evaluation.num_steps,
        "guidance_scale": config.evaluation.guidance_scale,
        "max_sequence_length": config.model.max_sequence_length,
        "height": images.shape[1],
        "width": images.shape[2],
        "seed": seed,
    }
    (out / "prompts.json").write_text(json.dumps(facts, indent=2) + "\n")
    grid(images, prompts, num_columns=min(6, len(prompts))).save(out / "grid.png")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{len(images)} images of {target.description} in {out}")
