"""Counter-based noise: every draw is a function of (run seed, purpose, counters) and nothing else.

So a transition can be redrawn from its record, whatever the number of threads, workers or ranks and
whatever the order of the draws. Purposes:

    "initial", group_id            x_T of a group whose trajectories share it
    "initial", group_id, sample    x_T of one trajectory
    "step", group_id, sample, step the noise of one transition

The counters are encoded so that different lists never give the same bytes; the bytes are hashed to
63 bits, all of which key the generator. torch's CPU generator would keep only the low 32 (measured:
seeds 5 and 5 + 2^32 give the same numbers), so that 77,000 draws would hold a repeated one with
probability 1/2; numpy's Philox, a counter-based generator, uses the whole key.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor


def stream_seed(run_seed: int, *counters: int | str) -> int:
    """63-bit seed of the stream that `run_seed` and `counters` name.

    blake2b over each item's type, length and text, so (1, 23) and (12, 3), or 1 and "1", differ.
    """
    encoded = bytearray()
    for item in (run_seed, *counters):
        kind, text = ("s", item) if isinstance(item, str) else ("i", str(int(item)))
        body = text.encode()
        encoded += f"{kind}{len(body)}:".encode() + body
    return int.from_bytes(blake2b(encoded, digest_size=8).digest(), "big") >> 1


def draw(shape: Sequence[int], seed: int) -> Tensor:
    """Standard normal noise of `shape`, float32, on the CPU, from its own generator.

    Raises ValueError when seed is negative.
    """
    if seed < 0:
        raise ValueError(f"seed = {seed} must be >= 0")
    generator = np.random.Generator(np.random.Philox(key=seed))
    return torch.as_tensor(generator.standard_normal(tuple(shape), dtype=np.float32))


def initial_noise(
    shape: Sequence[int], run_seed: int, group_id: int, sample: int, shared: bool
) -> Tensor:
    """x_T of one trajectory, float32 of `shape` (no batch dimension).

    shared: all samples of the group get the same one (docs/papers.md section 1: the gains then telescope
    to the final reward minus a constant of the group).
    """
    counters = (group_id,) if shared else (group_id, sample)
    return draw(shape, stream_seed(run_seed, "initial", *counters))


def step_noise(
    shape: Sequence[int], run_seed: int, group_id: int, sample: int, step: int
) -> Tensor:
    """Noise of transition `step` (0 = first) of one trajectory, float32 of `shape` (no batch
    dimension)."""
    return draw(shape, stream_seed(run_seed, "step", group_id, sample, step))
