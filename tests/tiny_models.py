"""Tiny random models in real diffusers layout, for tests that need the classes but no trained
weights."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer


def build_tiny_sd3(folder: Path, seed: int = 0) -> Path:
    """Write a random StableDiffusion3Pipeline (no T5) to `folder` and return it.

    Images 32x32, latents 8x8x8, 16 + 16 text tokens; about 0.3 M parameters. Output and modulation
    layers, which diffusers starts small, are drawn large enough that the velocity depends visibly
    on prompt, time and state.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_autoencoder(),
            text_encoder=_text_encoder(),
            tokenizer=_tokenizer(),
            text_encoder_2=_text_encoder(),
            tokenizer_2=_tokenizer(),
            text_encoder_3=None,  # pyright: ignore[reportArgumentType]
            tokenizer_3=None,  # pyright: ignore[reportArgumentType]
        )
        pipeline.save_pretrained(folder)
    return folder


def _transformer() -> SD3Transformer2DModel:
    network = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=8,
        out_channels=8,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    for name, parameter in network.named_parameters():
        if name.endswith("weight") and parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return network.eval()


def _autoencoder() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=8,
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=32,
        scaling_factor=1.3,
        shift_factor=0.2,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()


def _text_encoder() -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        projection_dim=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(config).eval()


def _vocabulary() -> dict[str, int]:
    letters = [letter + end for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters]
    return {token: index for index, token in enumerate(tokens)}


def _tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=_vocabulary(), merges=[], model_max_length=16)
