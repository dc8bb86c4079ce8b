"""Tensors through Ray's object store: any dtype and shape, the same bits, no copy."""

import pickle
import warnings

import numpy as np
import pytest
import torch

from cluster.tensor_arrays import as_arrays, as_tensors

TENSORS = {
    "matrix": torch.randn(3, 5),
    "bf16": torch.randn(7).bfloat16(),
    "double": torch.randn(2, 2, dtype=torch.float64),
    "scalar": torch.tensor(1.5),
    "nan": torch.tensor([float("nan"), float("-inf")]),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_to_the_bit(name):
    found = as_tensors(as_arrays({name: TENSORS[name]}))[name]
    assert (found.dtype, found.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
    assert torch.equal(bits(found), bits(TENSORS[name]))


def test_nothing_is_copied_and_the_bytes_stay_outside_the_pickle():
    big = torch.zeros(1000, 1000)
    arrays = as_arrays({"big": big})
    assert as_tensors(arrays)["big"].data_ptr() == big.data_ptr()
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
    assert len(message) < 1000
    assert sum(memoryview(buffer).nbytes for buffer in buffers) == 4_000_000


def test_memory_that_can_only_be_read_is_read_without_a_warning():
    arrays = as_arrays({"weights": torch.arange(4.0)})
    arrays["weights"].data.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = as_tensors(arrays)["weights"]
    np.testing.assert_array_equal(found.numpy(), np.arange(4.0, dtype=np.float32))


def test_a_tensor_that_is_not_contiguous_is_sent_as_it_reads():
    turned = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(as_tensors(as_arrays({"turned": turned}))["turned"], turned)
