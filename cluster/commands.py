"""`flowcredit evaluate` and `flowcredit sample`: draw with any run, checkpoint or model."""

import json
import re
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from safetensors.numpy import save_file

from cluster.evaluation import HeldOut, draw, evaluate, gather, held_out
from cluster.evaluation_table import Columns, single_table, summarise, write_jsonl
from cluster.pictures import grid
from cluster.run_folder import write_json
from cluster.target import find_target, open_target

NUM_PICTURES = 24


def evaluate_target(
    path: Path,
    config_path: Path | None,
    overrides: list[str],
    base: bool,
    out: Path | None,
    address: str | None,
) -> None:
    """Score the held-out prompts; print the table, and with `out` keep lines, summary and a grid of images."""
    target = find_target(path, config_path, overrides, base)
    config, backend = open_target(target, address, with_rewards=True)
    settings, names = config.evaluation, [reward.name for reward in config.rewards.components]
    gather(backend, [backend.check_reward(name) for name in names])
    lines = held_out(settings.path, settings.num_prompts, settings.seed)
    seen = evaluate(
        backend,
        names,
        lines,
        batch=settings.batch,
        num_steps=settings.num_steps,
        guidance=settings.guidance_scale,
    )
    table = summarise(seen.records, Columns(graded=settings.graded, strict=settings.strict))
    Console().print(single_table(table, target.description))
    if out is None:
        return
    write_jsonl(out / "lines.jsonl", seen.records)
    write_json(
        out / "summary.json",
        {"target": target.description, "evaluation": table, "counts": seen.counts},
    )
    chosen = np.linspace(0, len(lines.prompts) - 1, min(NUM_PICTURES, len(lines.prompts))).astype(
        int
    )
    captions = [
        f"{lines.prompts[i]} {seen.records[i]['rewards'][settings.graded]:.2f}" for i in chosen
    ]
    grid(seen.images[chosen], captions, num_columns=6).save(out / "grid.png")
    Console().print(f"written to {out}", highlight=False)


def sample_target(
    path: Path,
    config_path: Path | None,
    overrides: list[str],
    base: bool,
    out: Path,
    address: str | None,
    prompts: list[str],
    seed: int,
) -> None:
    """Draw prompts to PNG files; `latents.safetensors` holds the noise of each, in the order of `prompts.json`."""
    target = find_target(path, config_path, overrides, base)
    config, backend = open_target(target, address, with_rewards=False)
    settings = config.evaluation
    lines = HeldOut(
        prompts=prompts,
        metadata=[{}] * len(prompts),
        noise_ids=list(range(len(prompts))),
        noise_seed=seed,
    )
    drawn = draw(backend, lines, settings.batch, settings.num_steps, settings.guidance_scale)
    out.mkdir(parents=True, exist_ok=True)
    images = np.concatenate([chunk.images for chunk in drawn])
    for index, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
        slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60]
        Image.fromarray(image).save(out / f"{index:03d}-{slug}.png")
    save_file(
        {"latents": np.concatenate([chunk.initial_latents for chunk in drawn])},
        out / "latents.safetensors",
    )
    facts = {
        "format_version": 1,
        "target": target.description,
        "prompts": prompts,
        "num_steps": settings.num_steps,
        "guidance_scale": settings.guidance_scale,
        "max_sequence_length": config.model.max_sequence_length,
        "height": images.shape[1],
        "width": images.shape[2],
        "seed": seed,
    }
    (out / "prompts.json").write_text(json.dumps(facts, indent=2) + "\n")
    grid(images, prompts, num_columns=min(6, len(prompts))).save(out / "grid.png")
    Console().print(
        f"{len(images)} images of {target.description} in {out}", highlight=False, soft_wrap=True
    )
