import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusion3Pipeline
from safetensors.torch import load_file
from torch import Tensor

from rollout.config import ModelConfig
from rollout.families.base import Part, PolicyVelocity
from rollout.families.sd3 import SD3Family
from rollout.families.trainable import (
    attach_lora,
    load_tensors,
    make_trainable_full,
    trainable_tensors,
)
from rollout.plan import ode_plan
from rollout.sampler import sample

CPU = torch.device("cpu")
PROMPTS = ["a red circle", "two blue squares"]
ALL: tuple[Part, ...] = ("network", "text", "decoder")


def load(folder: Path, *parts: Part) -> SD3Family:
    return SD3Family.load(ModelConfig(path=str(folder)), CPU, parts or ALL)


def plain_pipeline(folder: Path) -> StableDiffusion3Pipeline:
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        folder, text_encoder_3=None, tokenizer_3=None
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def plain_images(
    pipeline: StableDiffusion3Pipeline, latents: Tensor, guidance: float = 1.0, steps: int = 5
) -> np.ndarray:
    """What anyone gets from diffusers, [B, H, W, 3] in [0, 1]."""
    return pipeline(
        PROMPTS,
        latents=latents,
        num_inference_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=16,
        output_type="np",
    ).images


def our_images(
    family: SD3Family, latents: Tensor, guidance: float = 1.0, steps: int = 5
) -> np.ndarray:
    conditioning = family.encode_prompts(PROMPTS)
    negative = family.encode_prompts([""])
    policy = PolicyVelocity(family, family.network, guidance, negative)
    plan = ode_plan(family.times(steps))

    def no_noise(step: int) -> Tensor:
        raise AssertionError

    path = sample(lambda x, t: policy(x, t, conditioning), latents, plan, no_noise)
    return family.decode(path.states[-1]).numpy()


def perturbed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach() + 0.1 * torch.randn_like(t) for name, t in tensors.items()}


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("steps", [2, 10])
def test_ode_images_equal_the_pipelines(tiny_sd3: Path, guidance: float, steps: int) -> None:
    latents = torch.randn(2, 8, 8, 8)
    expected = plain_images(plain_pipeline(tiny_sd3), latents, guidance, steps)
    ours = our_images(load(tiny_sd3), latents, guidance, steps)
    assert np.abs(expected[0] - expected[1]).max() > 0.1, "both prompts draw the same"
    assert np.abs(ours - expected).max() <= 1e-3


@pytest.mark.parametrize("steps", [1, 2, 6, 10, 28, 50])
def test_times_equal_the_pipelines_scheduler(tiny_sd3: Path, steps: int) -> None:
    pipeline = plain_pipeline(tiny_sd3)
    pipeline.scheduler.set_timesteps(steps)
    times = load(tiny_sd3, "network").times(steps)
    assert times.dtype == torch.float64
    torch.testing.assert_close(times.float(), pipeline.scheduler.sigmas, rtol=0, atol=0)
    timesteps = times[:-1].float() * 1000
    torch.testing.assert_close(timesteps, pipeline.scheduler.timesteps, rtol=0, atol=0)


def test_prompt_embeddings_equal_the_pipelines(tiny_sd3: Path) -> None:
    expected, _, pooled, _ = plain_pipeline(tiny_sd3).encode_prompt(
        PROMPTS, PROMPTS, PROMPTS, do_classifier_free_guidance=False, max_sequence_length=16
    )
    conditioning = load(tiny_sd3, "text").encode_prompts(PROMPTS)
    assert conditioning["prompt_embeds"].shape == (2, 16 + 16, 32)
    torch.testing.assert_close(conditioning["prompt_embeds"], expected, rtol=0, atol=0)
    torch.testing.assert_close(conditioning["pooled"], pooled, rtol=0, atol=0)


def test_parts_are_loaded_only_when_asked_for(tiny_sd3: Path) -> None:
    learner_side = load(tiny_sd3, "network")
    assert learner_side.latent_shape == (8, 8, 8)
    assert not any(p.requires_grad for p in learner_side.network.parameters())
    assert not learner_side.network.training
    with pytest.raises(ValueError, match="without its text encoders; add 'text' to parts"):
        learner_side.encode_prompts(PROMPTS)
    with pytest.raises(ValueError, match="without its decoder; add 'decoder' to parts"):
        learner_side.decode(torch.zeros(1, 8, 8, 8))
    text = load(tiny_sd3, "text")
    assert {p.device.type for p in text.network.parameters()} == {"meta"}
    assert load(tiny_sd3, "decoder").decode(torch.zeros(1, 8, 8, 8)).shape == (1, 32, 32, 3)


def test_half_precision_casts_at_the_edge(tiny_sd3: Path) -> None:
    config = ModelConfig(path=str(tiny_sd3), dtype="bfloat16")
    half, full = SD3Family.load(config, CPU, ALL), load(tiny_sd3)
    x, t = torch.randn(2, 8, 8, 8), torch.tensor([0.9, 0.2])
    v = half.velocity(half.network, x, t, half.encode_prompts(PROMPTS))
    expected = full.velocity(full.network, x, t, full.encode_prompts(PROMPTS))
    assert v.dtype == torch.float32
    assert 0 < (v - expected).abs().max() < 0.1 * expected.abs().max()
    assert half.decode(x).dtype == torch.float32


def change_index(folder: Path, change: Callable[[dict], None]) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    change(index)
    (folder / "model_index.json").write_text(json.dumps(index))


def test_a_t5_that_the_index_names_but_the_folder_lacks_is_left_out(
    tiny_sd3: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_sd3, tmp_path / "model"))

    def name_t5(index: dict) -> None:
        index["text_encoder_3"] = ["transformers", "T5EncoderModel"]
        index["tokenizer_3"] = ["transformers", "T5TokenizerFast"]

    change_index(folder, name_t5)
    assert load(folder, "text").encode_prompts(PROMPTS)["prompt_embeds"].shape == (2, 32, 32)


def change_scheduler(folder: Path, **settings: object) -> None:
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize("key", ["use_karras_sigmas", "stochastic_sampling"])
def test_a_scheduler_with_another_schedule_is_refused(
    tiny_sd3: Path, tmp_path: Path, key: str
) -> None:
    folder = Path(shutil.copytree(tiny_sd3, tmp_path / "model"))
    change_scheduler(folder, **{key: True})
    with pytest.raises(ValueError, match=rf"sets \['{key}'\]; only FlowMatchEuler"):
        load(folder, "network")


def test_another_scheduler_is_refused_by_its_name(tiny_sd3: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_sd3, tmp_path / "model"))
    DDIMScheduler().save_pretrained(folder / "scheduler")
    change_index(folder, lambda index: index.update(scheduler=["diffusers", "DDIMScheduler"]))
    with pytest.raises(ValueError, match="comes with a DDIMScheduler; only FlowMatchEuler"):
        load(folder, "network")


def test_a_scheduler_of_other_timesteps_draws_what_the_pipeline_draws(
    tiny_sd3: Path, tmp_path: Path
) -> None:
    """The network sees t num_train_timesteps, which is 1000 in every published model."""
    folder = Path(shutil.copytree(tiny_sd3, tmp_path / "model"))
    change_scheduler(folder, num_train_timesteps=500)
    latents = torch.randn(2, 8, 8, 8)
    expected = plain_images(plain_pipeline(folder), latents)
    assert np.abs(expected - plain_images(plain_pipeline(tiny_sd3), latents)).max() > 0.02
    assert np.abs(our_images(load(folder), latents) - expected).max() <= 1e-3


def test_trained_lora_draws_the_same_in_plain_diffusers(tiny_sd3: Path, tmp_path: Path) -> None:
    """alpha differs from rank; with diffusers' default alpha = rank the images would differ."""
    family, latents = load(tiny_sd3), torch.randn(2, 8, 8, 8)
    attach_lora(family.network, rank=4, alpha=10.0, targets=SD3Family.lora_targets, seed=0)
    load_tensors(family.network, perturbed(trainable_tensors(family.network)))
    ours = our_images(family, latents)

    family.save_lora(tmp_path, trainable_tensors(family.network), alpha=10.0)

    pipeline = plain_pipeline(tiny_sd3)
    base = plain_images(pipeline, latents)
    pipeline.load_lora_weights(tmp_path)
    assert pipeline.transformer.peft_config["default_0"].lora_alpha == 10.0
    assert np.abs(ours - base).max() > 0.1, "the adapter changes nothing"
    assert np.abs(ours - plain_images(pipeline, latents)).max() <= 1e-3


def test_a_lora_of_mixed_ranks_or_other_tensors_is_refused(tiny_sd3: Path, tmp_path: Path) -> None:
    family = load(tiny_sd3, "network")
    mixed = {f"a.lora_B.default.weight{rank}": torch.zeros(3, rank) for rank in (2, 4)}
    with pytest.raises(ValueError, match=r"ranks \[2, 4\] aren't one LoRA"):
        family.save_lora(tmp_path, mixed, alpha=1.0)
    with pytest.raises(ValueError, match=r"ranks \[\] aren't one LoRA"):
        family.save_lora(tmp_path, {"a.weight": torch.zeros(3, 3)}, alpha=1.0)


def test_fully_trained_weights_draw_the_same_in_plain_diffusers(
    tiny_sd3: Path, tmp_path: Path
) -> None:
    family, latents = load(tiny_sd3), torch.randn(2, 8, 8, 8)
    make_trainable_full(family.network)
    load_tensors(family.network, perturbed(trainable_tensors(family.network)))
    ours = our_images(family, latents)

    family.save_full(tmp_path / "trained", trainable_tensors(family.network))

    base = plain_images(plain_pipeline(tiny_sd3), latents)
    exported = plain_images(plain_pipeline(tmp_path / "trained"), latents)
    assert np.abs(ours - base).max() > 0.1, "the training changed nothing"
    assert np.abs(ours - exported).max() <= 1e-3


def test_full_export_refuses_another_networks_tensors(tiny_sd3: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainable tensors: missing context_embedder\.bias"):
        load(tiny_sd3, "network").save_full(tmp_path, {"x": torch.zeros(1)})


class OneTokenAWord:
    """A T5's tokenizer."""

    def __call__(self, prompt: str, truncation: bool) -> SimpleNamespace:
        assert not truncation
        return SimpleNamespace(input_ids=prompt.split())


def test_a_prompt_that_is_cut_is_said_once(
    tiny_sd3: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, long = load(tiny_sd3, "text"), " ".join(["a red circle"] * 12)
    for _ in range(2):
        family.encode_prompts([long, "a red circle"])
    (said,) = (r.getMessage() for r in caplog.records if r.name == "rollout.families.sd3")
    assert re.search(r"read 16 of \d\d+ tokens of the prompt 'a red circle a", said)
    caplog.clear()
    family = SD3Family.load(
        ModelConfig(path=str(tiny_sd3), max_sequence_length=30), CPU, parts=("text",)
    )
    family._pipeline.tokenizer_3 = OneTokenAWord()
    family._warn_of_cut([" ".join(["word"] * 30)])
    assert not caplog.records, "T5 reads what CLIP does not"
    family._warn_of_cut([" ".join(["word"] * 31)])
    assert "read 30 of 31 tokens" in caplog.records[0].getMessage()


def test_a_folder_with_pickled_weights_only_is_refused(tiny_sd3: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_sd3, folder)
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises((OSError, ValueError), match="safetensors"):
        load(folder)
