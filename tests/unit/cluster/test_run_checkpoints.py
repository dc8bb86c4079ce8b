"""A checkpoint's weights as a worker must hold them to prove that it does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from cluster.config import RunConfig, load
from cluster.costs import step_plan
from cluster.run_checkpoints import weights_in
from cluster.tensor_arrays import as_tensors
from learner.checkpoint import CheckpointError, OptimizerState, save
from rollout.families.trainable import (
    checksum,
    load_tensors,
    make_trainable_full,
    num_bytes,
    trainable_tensors,
)
from tests.fake_backend import FakeBackend
from tests.unit.learner.saves import example

FULL_BF16 = ['learner.adapter="full"', 'learner.precision="bf16"', 'model.dtype="bfloat16"']


def fake_backend(config: RunConfig) -> Any:
    return FakeBackend(step_plan(config)[0])


@pytest.fixture
def network():
    """As a rollout worker holds it under full fine-tuning in bf16."""
    made = nn.Linear(3, 2).bfloat16()
    make_trainable_full(made)
    return made


@pytest.fixture
def checkpoint(tmp_path, network):
    """Masters in float32, whose digits bf16 doesn't hold, and their average."""
    shapes = {name: tensor.shape for name, tensor in trainable_tensors(network).items()}
    drawn = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(4)]
    weights, ema, *moments = drawn
    content = replace(example(1), weights=weights, ema=ema, optimizer=OptimizerState(1, *moments))
    folder = tmp_path / "step_000001"
    save(folder, content)
    return folder, {"raw": weights, "ema": ema}


@pytest.mark.parametrize("kind", ["raw", "ema"])
def test_a_worker_can_prove_the_weights_of_a_checkpoint(network, checkpoint, kind):
    folder, kept = checkpoint
    config = load("configs/quickstart.toml", FULL_BF16)
    answer = weights_in(folder, kind, config, fake_backend(config))
    load_tensors(network, as_tensors(answer.tensors))
    live = trainable_tensors(network)
    assert checksum(live) == answer.checksum
    assert num_bytes(live) == answer.num_bytes == 2 * (3 * 2 + 2)
    for name, tensor in live.items():
        assert torch.equal(tensor, kept[kind][name].bfloat16())


def test_a_checkpoint_that_is_gone_is_said(tmp_path):
    config = load("configs/quickstart.toml")
    with pytest.raises(CheckpointError):
        weights_in(tmp_path / "step_000001", "raw", config, fake_backend(config))
