"""Tensors as byte arrays, which Ray keeps outside the pickle: one copy into the object store, none out of it.

A tensor by itself is pickled into the message, byte by byte, and copied again by every worker that reads it.
"""

import warnings
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class TensorBytes(NamedTuple):
    """A CPU tensor of any dtype, with at least one element."""

    data: np.ndarray
    """uint8 [bytes]"""
    dtype: str
    """torch's name of it, without "torch."."""
    shape: tuple[int, ...]


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, TensorBytes]:
    """Return views of CPU tensors, by name; nothing is copied that is contiguous."""
    return {
        name: TensorBytes(
            tensor.detach().reshape(-1).view(torch.uint8).numpy(),
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
        )
        for name, tensor in tensors.items()
    }


def as_tensors(arrays: Mapping[str, TensorBytes]) -> dict[str, Tensor]:
    """Return views of what `as_arrays` gave, by name. In the object store memory is read-only: copy, never write."""
    with warnings.catch_warnings():
        # torch can't mark a tensor as read-only, and says so for every array that is.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return {
            name: torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
            for name, (data, dtype, shape) in arrays.items()
        }
