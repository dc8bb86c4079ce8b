"""Dtype and broadcasting rules that every function of rollout.flow shares."""

import torch
from torch import Tensor


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Promoted dtype of `tensors`, float32 at least: bfloat16 and float16 go up, float64 stays."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def double(value: float | Tensor) -> float | Tensor:
    """`value` in float64.

    Scalars of a step (times, coefficients, std) are combined in float64 and rounded once, so a
    Python float and a [B] tensor of the same float64 give the same bits.
    """
    return value.double() if isinstance(value, Tensor) else float(value)


def expand(values: float | Tensor, like: Tensor) -> float | Tensor:
    """`values` [B], in the dtype and on the device of `like` [B, ...], shaped [B, 1, ..., 1].

    A float, or a tensor without dimensions, is good for every item and is returned as a scalar.
    """
    if not isinstance(values, Tensor):
        return float(values)
    values = values.to(device=like.device, dtype=like.dtype)
    if values.ndim == 0:
        return values
    assert values.shape == like.shape[:1], f"{tuple(values.shape)} for {like.shape[0]} items"
    return values.reshape(-1, *[1] * (like.ndim - 1))
