"""Stable Diffusion 3 and 3.5: the door to diffusers' StableDiffusion3Pipeline.

Its conventions, which end here: timesteps in 0 .. num_train_timesteps (1000), latents (x - shift_factor) scaling_factor
away from the autoencoder's, images in [-1, 1] with channels first, half-precision outputs.
"""

import logging
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,  # pyright: ignore[reportPrivateImportUsage]
    SD3Transformer2DModel,  # pyright: ignore[reportPrivateImportUsage]
    StableDiffusion3Pipeline,  # pyright: ignore[reportPrivateImportUsage]
)
from diffusers.utils.logging import disable_progress_bar as disable_diffusers_bar
from torch import Tensor, nn
from transformers.utils.logging import disable_progress_bar as disable_transformers_bar

from rollout.config import ModelConfig
from rollout.families.base import Conditioning, Family, Part
from rollout.families.folder import MODEL_INDEX, lacks, model_index, pipeline_folder
from rollout.families.trainable import load_tensors, make_trainable_full
from rollout.flow.schedule import shifted_times

log = logging.getLogger(__name__)

TEXT_PARTS = (
    "text_encoder",
    "tokenizer",
    "text_encoder_2",
    "tokenizer_2",
    "text_encoder_3",
    "tokenizer_3",
)
UNUSED_PARTS = ("feature_extractor", "image_encoder")
OTHER_SCHEDULES = (
    "use_dynamic_shifting",
    "shift_terminal",
    "invert_sigmas",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "stochastic_sampling",
)
"""Settings of the scheduler under which its times or its step aren't those of `shifted_times`."""


class SD3Family(Family):
    """A pipeline folder's network, text encoders (T5 optional) and decoder, each loaded only when
    asked for."""

    lora_targets = (
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    )

    def __init__(
        self, pipeline: StableDiffusion3Pipeline, folder: Path, config: ModelConfig
    ) -> None:
        """Use `load`; `pipeline` holds None for the parts that weren't asked for."""
        self._pipeline, self._folder, self._config = pipeline, folder, config
        settings = _network_config(folder)
        size = settings["sample_size"]
        scheduler = _plain_schedule(pipeline.scheduler, config.path)
        self._shift: float = scheduler["shift"]
        self._num_train_timesteps: int = scheduler["num_train_timesteps"]
        self.latent_shape = (settings["in_channels"], size, size)
        self._cut: set[str] = set()
        """Prompts that were said to be too long."""

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        device: torch.device,
        parts: tuple[Part, ...] = ("network", "text", "decoder"),
    ) -> "SD3Family":
        """Load the named parts on `device`, frozen and in eval mode.

        Network and text encoders take config.dtype, the decoder is float32. Raises ValueError when
        the folder is missing, isn't a StableDiffusion3Pipeline's, or has a scheduler that does
        anything but shift the times by a constant.
        """
        disable_diffusers_bar()
        disable_transformers_bar()
        folder = pipeline_folder(config.path, StableDiffusion3Pipeline)
        left_out = [
            *UNUSED_PARTS,
            *(name for name in TEXT_PARTS if "text" not in parts or lacks(folder, name)),
        ]
        left_out += [] if "network" in parts else ["transformer"]
        left_out += [] if "decoder" in parts else ["vae"]
        dtypes = {"vae": torch.float32, "default": getattr(torch, config.dtype)}
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            folder,
            dtype=dtypes,
            local_files_only=True,
            use_safetensors=True,  # never a pickle: whoever wrote it could run code here
            **dict.fromkeys(left_out),
        )
        pipeline.to(device)
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                component.eval().requires_grad_(False)
        if pipeline.vae is not None:  # 1.4 -> 0.8 ms an image on a CPU, 32x32 pixels
            pipeline.vae.to(memory_format=torch.channels_last)
        if "network" not in parts:  # encode_prompt reads the network's config
            with torch.device("meta"):
                pipeline.transformer = SD3Transformer2DModel.from_config(_network_config(folder))
        return cls(pipeline, folder, config)

    @property
    def network(self) -> nn.Module:
        """The SD3Transformer2DModel."""
        return cast(nn.Module, self._pipeline.transformer)

    def times(self, num_steps: int) -> Tensor:
        """Return the pipeline's own schedule, float64 [T + 1]."""
        return shifted_times(num_steps, self._shift, self._num_train_timesteps)

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str]) -> Conditioning:
        """Return {"prompt_embeds": [B, L, D], "pooled": [B, P]}, float32, by the pipeline's own
        encode_prompt. A prompt that is longer than every text encoder reads is logged, once."""
        if self._pipeline.text_encoder is None:
            raise ValueError(
                "this family was loaded without its text encoders; add 'text' to parts"
            )
        self._warn_of_cut(prompts)
        device = self._pipeline.text_encoder.device
        prompt_embeds, _, pooled, _ = self._pipeline.encode_prompt(
            prompt=prompts,
            prompt_2=prompts,
            prompt_3=prompts,
            device=device,
            do_classifier_free_guidance=False,
            max_sequence_length=self._config.max_sequence_length,
        )
        assert prompt_embeds is not None
        assert pooled is not None
        return {"prompt_embeds": prompt_embeds.float(), "pooled": pooled.float()}

    def _warn_of_cut(self, prompts: list[str]) -> None:
        """With a T5, what CLIP doesn't read is not lost."""
        tokenizer, most = self._pipeline.tokenizer_3, self._config.max_sequence_length
        if tokenizer is None:
            tokenizer, most = self._pipeline.tokenizer, self._pipeline.tokenizer_max_length
        for prompt in set(prompts) - self._cut:
            count = len(tokenizer(prompt, truncation=False).input_ids)
            if count > most:
                self._cut.add(prompt)
                log.warning(
                    "the text encoders read %d of %d tokens of the prompt %r", most, count, prompt
                )

    def velocity(
        self, network: nn.Module, x_t: Tensor, t: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Return float32 v [B, C, H, W] at t [B]; inputs are cast to the network's dtype, timesteps
        stay float32."""
        dtype = next(network.parameters()).dtype
        v = network(
            hidden_states=x_t.to(dtype),
            timestep=t.float() * self._num_train_timesteps,
            encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
            pooled_projections=conditioning["pooled"].to(dtype),
            return_dict=False,
        )[0]
        return v.float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images float32 [B, H, W, 3] in [0, 1] for standardised clean latents [B, C, h,
        w]."""
        vae = self._pipeline.vae
        if vae is None:
            raise ValueError("this family was loaded without its decoder; add 'decoder' to parts")
        raw = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
        images = vae.decode(raw, return_dict=False)[0]
        return (images * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float()

    def save_lora(self, folder: Path, tensors: dict[str, Tensor], alpha: float) -> None:
        """Write `pytorch_lora_weights.safetensors` for `pipe.load_lora_weights(folder)`.

        `tensors` are named as `trainable_tensors` names them. Rank and alpha travel as LoRA
        metadata, since without it diffusers takes alpha = rank, and it refuses ".alpha" keys for
        SD3.
        """
        layers: dict[str, nn.Module | Tensor] = {
            name.replace(".default.", "."): tensor.detach().cpu().contiguous()
            for name, tensor in tensors.items()
        }
        ranks = {tensor.shape[1] for name, tensor in tensors.items() if ".lora_B." in name}
        if len(ranks) != 1 or not all(".lora_" in name for name in layers):
            raise ValueError(f"{len(layers)} tensors with ranks {sorted(ranks)} aren't one LoRA")
        metadata = {
            "r": ranks.pop(),
            "lora_alpha": alpha,
            "target_modules": sorted({name.split(".lora_")[0] for name in layers}),
        }
        StableDiffusion3Pipeline.save_lora_weights(
            folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=metadata
        )

    def save_full(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write a pipeline folder: this model's other components as they are, its network with
        `tensors` in it.

        Raises ValueError when names or shapes aren't the network's.
        """
        network = SD3Transformer2DModel.from_pretrained(
            self._folder / "transformer", dtype=torch.float32, use_safetensors=True
        )
        network = cast(SD3Transformer2DModel, network)
        make_trainable_full(network)
        load_tensors(network, tensors)
        network.save_pretrained(folder / "transformer")
        shutil.copy2(self._folder / MODEL_INDEX, folder / MODEL_INDEX)
        for name in model_index(self._folder):
            if name != "transformer" and (self._folder / name).is_dir():
                shutil.copytree(self._folder / name, folder / name, dirs_exist_ok=True)


def _plain_schedule(scheduler: Any, path: str) -> Any:
    """The settings of a scheduler whose times are `shifted_times`; ValueError for any other."""
    supported = "only FlowMatchEulerDiscreteScheduler with a constant shift is supported"
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ValueError(
            f"model.path = {path!r} comes with a {type(scheduler).__name__}; {supported}"
        )
    settings: Any = scheduler.config
    other = [key for key in OTHER_SCHEDULES if settings.get(key)]
    if other:
        raise ValueError(f"the scheduler of model.path = {path!r} sets {other}; {supported}")
    return settings


def _network_config(folder: Path) -> dict[str, Any]:
    config: Any = SD3Transformer2DModel.load_config(str(folder / "transformer"))
    return config
