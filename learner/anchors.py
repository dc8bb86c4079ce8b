"""What the policy is compared with: the average of its past weights (EMA), and the reference of the
KL."""

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from learner.loss import Transitions
from rollout.families.base import PolicyVelocity
from rollout.families.trainable import lora_disabled


class Ema:
    """Exponential moving average of the trainable tensors, float32 on the CPU, one update per
    optimizer step.

        e_0 = w_0,   e_k = d e_{k-1} + (1 - d) w_k

    It starts at the initial weights, so its coefficients sum to 1 at every k and no bias correction
    is needed; the price is that the initial weights still count d^k.
    """

    def __init__(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        """Start from copies of `tensors` (w_0). decay in [0, 1)."""
        self.decay = decay
        self.tensors: dict[str, Tensor] = {}
        self.restart(tensors)

    def restart(self, tensors: Mapping[str, Tensor]) -> None:
        """Become a copy of `tensors`, as after loading a checkpoint."""
        self.tensors = {
            name: tensor.detach().to("cpu", torch.float32, copy=True)
            for name, tensor in tensors.items()
        }

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Take in the weights after one optimizer step: same names as at the start."""
        for name, average in self.tensors.items():
            average.mul_(self.decay).add_(tensors[name], alpha=1 - self.decay)


def frozen_copy(network: nn.Module) -> nn.Module:
    """A copy that never trains: the reference of full fine-tuning, made before anything is trained
    or partitioned."""
    return copy.deepcopy(network).eval().requires_grad_(False)


@torch.no_grad()
def reference_velocities(
    policy: PolicyVelocity,
    module: nn.Module,
    frozen: nn.Module | None,
    batches: Iterable[Transitions],
) -> list[Tensor]:
    """One pass of the reference over micro-batches: v_ref [B, *latent_shape] of each, guided like
    the policy.

    The reference is `frozen` if given; else the policy's own network with the LoRA of `module` (the
    same network without its engine) off. It runs before the update as a whole, since switching
    adapters between forwards upsets ZeRO-3.
    """
    if frozen is None:
        with lora_disabled(module):
            return [policy(batch.x_t, batch.t.float(), batch.conditioning) for batch in batches]
    reference = PolicyVelocity(policy.family, frozen, policy.guidance_scale, policy.negative)
    found = [reference(batch.x_t, batch.t.float(), batch.conditioning) for batch in batches]
    policy.num_network_calls += reference.num_network_calls
    return found
