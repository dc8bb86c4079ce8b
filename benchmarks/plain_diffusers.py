"""Draws with plain diffusers what `flowcredit sample` drew, from the same noise, and compares. Imports nothing of ours.

    python benchmarks/plain_diffusers.py MODEL WEIGHTS SAMPLES

MODEL is the base model's folder, WEIGHTS a run's `weights/` (a LoRA, or a whole pipeline after full fine-tuning),
SAMPLES the folder that `flowcredit sample` wrote. Exits 1 when an image differs by more than 1e-3 + 8-bit rounding.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import load_file

HALF_STEP = 0.5 / 255
"""The PNG files hold 8 bits."""


def main(model: Path, weights: Path, samples: Path) -> int:
    no_t5 = {"text_encoder_3": None, "tokenizer_3": None}
    if (weights / "model_index.json").exists():
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            weights, torch_dtype=torch.float32, **no_t5
        )
    else:
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            model, torch_dtype=torch.float32, **no_t5
        )
        pipeline.load_lora_weights(weights)
    pipeline.set_progress_bar_config(disable=True)
    facts = json.loads((samples / "prompts.json").read_text())
    images = pipeline(
        facts["prompts"],
        latents=load_file(samples / "latents.safetensors")["latents"],
        num_inference_steps=facts["num_steps"],
        guidance_scale=facts["guidance_scale"],
        max_sequence_length=facts["max_sequence_length"],
        height=facts["height"],
        width=facts["width"],
        output_type="np",
    ).images
    pictures = sorted(path for path in samples.glob("*.png") if path.name != "grid.png")
    ours = np.stack([np.asarray(Image.open(path)) for path in pictures]) / 255
    difference = float(np.abs(images - ours).max())
    print(
        f"{len(ours)} images, largest difference {difference:.6f} (8-bit rounding is {HALF_STEP:.6f})"
    )
    return int(difference > 1e-3 + HALF_STEP)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
