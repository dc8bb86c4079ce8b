"""The trainable tensors of a network: attach, name, load, fingerprint. Rollout and learner both use
this file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor, nn

ADAPTER_NAME = "default"


def attach_lora(
    network: nn.Module, rank: int, alpha: float, targets: tuple[str, ...] | list[str], seed: int
) -> None:
    """Add LoRA to every linear layer whose module name ends in one of `targets`; freeze all else.

    The update is (alpha / rank) B A. A starts Gaussian with std 1 / rank (as diffusers' training
    scripts do), drawn on the CPU from `seed` in the order of the sorted names, so it's the same in
    every process; B starts at 0. A and B are float32 whatever the network's dtype is.

    Raises ValueError when a target matches no module.
    """
    from peft import LoraConfig, inject_adapter_in_model  # 0.15 GB of memory: who has a LoRA pays

    names = [name for name, _ in network.named_modules()]
    missing = [t for t in targets if not any(n == t or n.endswith("." + t) for n in names)]
    if missing or not targets:
        raise ValueError(
            f"lora_targets {missing or list(targets)} match no module of {type(network).__name__}"
        )
    network.requires_grad_(False)
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  (peft divides it, any number will do)
        target_modules=list(targets),
    )
    inject_adapter_in_model(config, network, ADAPTER_NAME)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(trainable_tensors(network).items()):
        parameter.data = parameter.data.float()
        if ".lora_A." in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.data.copy_(noise / rank)


def make_trainable_full(network: nn.Module) -> None:
    """Make every parameter trainable, in the dtype it has."""
    network.requires_grad_(True)


def trainable_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the live trainable parameters (not copies) by name, sorted by name."""
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    return dict(sorted(named.items()))


def load_tensors(network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the live trainable parameters, in place, casting to each parameter's
    dtype.

    Raises ValueError, before anything is copied, when names or shapes differ from
    `trainable_tensors(network)`.
    """
    live = trainable_tensors(network)
    differences = [f"missing {name}" for name in live.keys() - tensors.keys()]
    differences += [f"unexpected {name}" for name in tensors.keys() - live.keys()]
    differences += [
        f"{name} has shape {list(tensors[name].shape)}, not {list(live[name].shape)}"
        for name in live.keys() & tensors.keys()
        if tensors[name].shape != live[name].shape
    ]
    if differences:
        shown = "; ".join(sorted(differences)[:5])
        raise ValueError(
            f"{len(differences)} differences to the network's {len(live)} trainable tensors: "
            f"{shown}"
        )
    with torch.no_grad():
        for name, parameter in live.items():
            parameter.copy_(tensors[name])


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return how much memory the tensors' numbers take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return a blake2b fingerprint (32 hex digits) over sorted names, dtypes, shapes and bytes."""
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def lora_disabled(network: nn.Module) -> Iterator[None]:
    """Make the network the reference inside the block: every LoRA's scale is 0, so W x + 0 B A x =
    W x exactly.

    The same modules run as before and no requires_grad changes, so that ZeRO-3's prefetch isn't
    upset. Raises ValueError when the network has no LoRA, since then it can't stand for its own
    reference.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in network.modules() if isinstance(module, LoraLayer)]
    if not layers:
        raise ValueError(
            f"{type(network).__name__} has no LoRA to disable; keep a copy as its reference"
        )
    scales = [dict(layer.scaling) for layer in layers]
    try:
        for layer in layers:
            layer.scaling.update(dict.fromkeys(layer.scaling, 0.0))
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling.update(scale)
