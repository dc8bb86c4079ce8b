"""EMA arithmetic by hand, and the reference of the KL."""

from pathlib import Path

import pytest
import torch

from learner.anchors import Ema, frozen_copy, reference_velocities
from learner.loss import Transitions
from rollout.config import ModelConfig
from rollout.families.base import PolicyVelocity
from rollout.families.registry import load_family
from rollout.families.trainable import attach_lora, make_trainable_full, trainable_tensors


def test_ema_by_hand() -> None:
    """d = 1/2 and weights 0, 8, 4: 0 -> 4 -> 4; then it restarts."""
    ema = Ema({"w": torch.tensor([0.0])}, decay=0.5)
    ema.update({"w": torch.tensor([8.0])})
    assert ema.tensors["w"].tolist() == [4.0]
    ema.update({"w": torch.tensor([4.0])})
    assert ema.tensors["w"].tolist() == [4.0]
    ema.restart({"w": torch.tensor([1.0])})
    assert ema.tensors["w"].tolist() == [1.0]


def test_ema_of_constant_weights_is_that_constant() -> None:
    """No bias towards 0 at the start."""
    ema = Ema({"w": torch.tensor([3.0])}, decay=0.9)
    for _ in range(5):
        ema.update({"w": torch.tensor([3.0])})
    assert ema.tensors["w"].item() == pytest.approx(3.0, rel=1e-6)


def test_ema_keeps_float32_copies() -> None:
    start = torch.tensor([1.0], dtype=torch.bfloat16)
    ema = Ema({"w": start}, decay=0.5)
    start.fill_(9.0)
    assert ema.tensors["w"].dtype == torch.float32
    assert ema.tensors["w"].item() == 1.0


@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_the_reference_is_the_untrained_model(
    model: Path, adapter: str, guidance_scale: float
) -> None:
    family = load_family(
        ModelConfig(path=str(model)), torch.device("cpu"), parts=("network", "text")
    )
    network = family.network
    conditioning = family.encode_prompts(["a star", "a ring"])
    policy = PolicyVelocity(family, network, guidance_scale, family.encode_prompts([""]))
    numbers = torch.ones(2)
    rows = Transitions(
        x_t=torch.randn(2, *family.latent_shape),
        x_next=torch.zeros(2, *family.latent_shape),
        t=numbers.double() * 0.5,
        t_next=numbers * 0.4,
        noise_coefficient=numbers * 0.3,
        std=numbers * 0.1,
        old_log_prob=numbers,
        advantage=numbers,
        weight=numbers / 2,
        conditioning=conditioning,
    )
    with torch.no_grad():
        untrained = policy(rows.x_t, rows.t.float(), conditioning)
    frozen = None
    if adapter == "lora":
        attach_lora(network, 4, 8.0, family.lora_targets, seed=0)
    else:
        frozen = frozen_copy(network)
        make_trainable_full(network)
    with torch.no_grad():
        for tensor in trainable_tensors(network).values():
            tensor.add_(0.1)
    policy.num_network_calls = 0
    found = reference_velocities(policy, network, frozen, [rows, rows])
    assert len(found) == 2
    for v_ref in found:
        assert not v_ref.requires_grad
        torch.testing.assert_close(v_ref, untrained, rtol=0, atol=1e-6)
    assert policy.num_network_calls == 2 * 2 * (1 if guidance_scale == 1 else 2)
    with torch.no_grad():
        now = policy(rows.x_t, rows.t.float(), conditioning)
    assert float((now - untrained).abs().max()) > 1e-2, "the adapter is on again"
