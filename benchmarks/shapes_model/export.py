"""Writes the model folder that diffusers opens, and its card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from transformers import CLIPTokenizer

from benchmarks.shapes_model.networks import TextToVelocity, build_scheduler
from benchmarks.shapes_model.tokenizer import write_tokenizer

MAX_FOLDER_BYTES = 10_000_000


def export_pipeline(model: TextToVelocity, autoencoder: AutoencoderKL, out: Path) -> None:
    """Write float16 safetensors of every part into `out`, replacing what is there at the end."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in ("tokenizer", "tokenizer_2"):
        write_tokenizer(partial / name)
    pipeline = StableDiffusion3Pipeline(
        transformer=model.transformer.half(),
        scheduler=build_scheduler(),
        vae=autoencoder.half(),
        text_encoder=model.text_encoder.half(),
        tokenizer=CLIPTokenizer.from_pretrained(partial / "tokenizer"),
        text_encoder_2=model.text_encoder_2.half(),
        tokenizer_2=CLIPTokenizer.from_pretrained(partial / "tokenizer_2"),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.save_pretrained(partial, safe_serialization=True)
    for name in ("text_encoder", "text_encoder_2"):
        _open_in_float32(partial / name / "config.json")
    size = folder_bytes(partial)
    if size > MAX_FOLDER_BYTES:
        raise ValueError(f"model folder takes {size} bytes, at most {MAX_FOLDER_BYTES}")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def _open_in_float32(config: Path) -> None:
    """Make transformers open these float16 weights in float32, as diffusers opens its own.

    Left alone, transformers keeps the file's type, and a plain `from_pretrained` of the folder
    mixes float16 text encoders with a float32 transformer.
    """
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "dtype": "float32"}, indent=2) + "\n")


def folder_bytes(folder: Path) -> int:
    """Bytes of all the files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def load_exported(folder: Path) -> tuple[TextToVelocity, AutoencoderKL]:
    """The folder's networks again, computing in float32, as diffusers loads them."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        folder, text_encoder_3=None, tokenizer_3=None
    )
    model = TextToVelocity()
    for name in ("text_encoder", "text_encoder_2", "transformer"):
        getattr(model, name).load_state_dict(getattr(pipeline, name).state_dict())
    return model.eval(), pipeline.vae


def write_card(out: Path, facts: dict[str, Any]) -> None:
    """README.md and model_card.json: how the folder was made, and what it scores."""
    (out / "model_card.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="ascii")
    rows = "\n".join(
        f"| {name} | {strict:.3f} | {graded:.3f} |"
        for name, (strict, graded) in facts["scores"].items()
    )
    auto, flow = facts["autoencoder"], facts["flow"]
    text = f"""---
library_name: diffusers
pipeline_tag: text-to-image
tags: [stable-diffusion-3, shapes, flow-matching]
license: apache-2.0
---
# shapes: a tiny StableDiffusion3Pipeline

Made from nothing by `python -m benchmarks.make_model --seed {facts["seed"]} --steps {flow["steps"]}`.
It draws 32x32 scenes of the shapes world (`rewards/shapes`), and is meant to be improved by
reinforcement learning: decent, clearly not perfect.

```python
pipeline = StableDiffusion3Pipeline.from_pretrained(
    "configs/model/shapes", text_encoder_3=None, tokenizer_3=None
)
image = pipeline(
    "a photo of a red circle and a blue square",
    height=32, width=32, num_inference_steps=10, guidance_scale=1.0, max_sequence_length=1,
).images[0]
```

Prompts hold at most ten words ({facts["max_tokens"]} tokens with begin and end).
`max_sequence_length` is the number of zero tokens that stand for the missing T5: trained with 1
(9 batches of 10) and 16 (1 of 10), so keep it small; each costs as much as an image token.

## Data
{facts["num_scenes"]} rendered scenes, seed {facts["seed"]}; every caption of the grammar, also those
of the held-out prompt file (that file is held out from reinforcement learning). No human-made data.

## Training
| | steps | batch | seconds | result |
|---|---|---|---|---|
| autoencoder ({auto["parameters"]:,} parameters) | {auto["steps"]} | {auto["batch"]} | {auto["seconds"]:.0f} \
| squared error {auto["error"]:.5f}, strict {auto["strict"]:.3f} on reconstructions |
| text encoders and transformer ({flow["parameters"]:,} parameters) | {flow["steps"]} \
| {flow["batch"]} | {flow["seconds"]:.0f} | flow-matching loss {flow["loss"]:.4f} |

Wall seconds on two cores that were shared with other work. Float32 weights with bfloat16 autocast,
shipped as float16; the EMA weights are the ones shipped. Latents: 16x4x4.

## Scores of this folder
Held-out prompts, 10 Euler steps, no guidance, float32 compute.

| category | strict | graded |
|---|---|---|
{rows}
"""
    (out / "README.md").write_text(text, encoding="ascii")
