"""The untrained networks of the shipped model, and the exact text path of diffusers' SD3 pipeline.

Latents are [B, 16, 4, 4]: 16 tokens of 16 numbers at patch size 1, so a network call is cheap.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from benchmarks.shapes_model.tokenizer import MAX_TOKENS, token_ids, vocabulary

LATENT_SHAPE = (16, 4, 4)
TEXT_WIDTH = 64  # of each of the two text encoders
TRANSFORMER_WIDTH = 128
NUM_LAYERS = 5
HEAD_SIZE = 32
SHIFT = 3.0


def build_autoencoder() -> AutoencoderKL:
    """Three halvings, 32x32x3 -> 4x4x16; few channels at full size, where decoding costs most."""
    channels = (16, 16, 48, 64)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=1,
        latent_channels=LATENT_SHAPE[0],
        norm_num_groups=8,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def build_transformer() -> SD3Transformer2DModel:
    """A joint-attention transformer with one token per latent cell."""
    return SD3Transformer2DModel(
        sample_size=LATENT_SHAPE[1],
        patch_size=1,
        in_channels=LATENT_SHAPE[0],
        out_channels=LATENT_SHAPE[0],
        num_layers=NUM_LAYERS,
        attention_head_dim=HEAD_SIZE,
        num_attention_heads=TRANSFORMER_WIDTH // HEAD_SIZE,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=TRANSFORMER_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=LATENT_SHAPE[1],
    )


def build_text_encoder() -> CLIPTextModelWithProjection:
    """Two layers: SD3 reads tokens after the first and the pooled projection after the second."""
    words = vocabulary()
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=words["<|startoftext|>"],
        eos_token_id=words["<|endoftext|>"],
        pad_token_id=words["<|endoftext|>"],
    )
    return CLIPTextModelWithProjection(config)


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Euler steps over SD3's shifted times."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT)


class TextToVelocity(nn.Module):
    """Both text encoders and the transformer: what the flow-matching loss trains."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = build_text_encoder()
        self.text_encoder_2 = build_text_encoder()
        self.transformer = build_transformer()

    def encode(self, ids: torch.Tensor, num_zero_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int64 [B, 12] -> prompt embeddings [B, 12 + z, 128] and pooled [B, 128].

        The same numbers as `StableDiffusion3Pipeline.encode_prompt` without a T5 and with
        `max_sequence_length` z, but differentiable.
        """
        outputs = [
            encoder(ids, output_hidden_states=True)
            for encoder in (self.text_encoder, self.text_encoder_2)
        ]
        embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
        zeros = embeds.new_zeros(len(ids), num_zero_tokens, embeds.shape[-1])
        return torch.cat([embeds, zeros], dim=1), pooled

    def velocity(
        self, latents: torch.Tensor, t: torch.Tensor, embeds: torch.Tensor, pooled: torch.Tensor
    ) -> torch.Tensor:
        """Velocity d x_t / d t [B, 16, 4, 4] at times t [B] in [0, 1]."""
        return self.transformer(
            hidden_states=latents,
            timestep=t * 1000.0,
            encoder_hidden_states=embeds,
            pooled_projections=pooled,
            return_dict=False,
        )[0]


def caption_ids(captions: list[str]) -> torch.Tensor:
    """Token ids int64 [len(captions), 12] of captions made of the grammar's words."""
    return torch.tensor([token_ids(caption) for caption in captions])
