"""Two processes of one thread each, which average their gradients.

For networks this small that is faster than two threads inside every operation, and it does not
stall when something else takes a core for a moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 2


def _enter(rank: int, rendezvous: str, function: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(minutes=30),
    )
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def run(function: Callable[..., None], workdir: Path, *args: Any) -> None:
    """Call function(rank, *args) in NUM_RANKS fresh processes and wait for them."""
    rendezvous = workdir.resolve() / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    mp.spawn(_enter, args=(str(rendezvous), function, *args), nprocs=NUM_RANKS)


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace every gradient by its mean over the ranks; one message for all of them."""
    with_gradient = [p for p in parameters if p.grad is not None]
    flat = torch.cat([p.grad.reshape(-1) for p in with_gradient])
    dist.all_reduce(flat)
    flat /= NUM_RANKS
    for p, g in zip(with_gradient, flat.split([p.numel() for p in with_gradient]), strict=True):
        p.grad.copy_(g.view_as(p))


def total(values: torch.Tensor) -> torch.Tensor:
    """Sum of a float tensor over the ranks."""
    values = values.clone()
    dist.all_reduce(values)
    return values
