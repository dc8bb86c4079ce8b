"""What each of two ranks does in test_ranks.py: python -m tests.unit.learner.ranks FOLDER RANK PORT.

FOLDER holds model/, groups.arrow and one_rank/step_000001; rank 0 leaves its results there.
"""

import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn

import learner.engine
import learner.worker
from learner.checks import NonFiniteLoss, dump_batch
from learner.config import LearnerConfig
from learner.engine import Engine
from rollout.trajectory import RecordBatch, read_ipc
from tests.unit.learner.helpers import learner_config, make_learner

WORLD_SIZE = 2
STAGES = (0, 1, 2, 3)


def keep(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write rank 0's tensors; the other rank has none."""
    if tensors:
        save_file(tensors, path)


def train(folder: Path, groups: list[RecordBatch], place: dict[str, Any], stage: int) -> None:
    """Gradient, one step, weights and a checkpoint; a step more, of this learner and of a new one
    that opens the checkpoint; then a step from the one-rank checkpoint.

    Micro-batches of 5 don't divide a rank's transitions, so the last one is filled up.
    """
    config = learner_config(zero_stage=stage, micro_batch=5)
    worker = make_learner(folder / "model", config, **place)
    keep(folder / f"gradient_{stage}.safetensors", worker.gradient(groups))
    start = worker.weights()[1]
    stats = worker.step(groups)
    assert stats.num_padding_calls > 0
    if place["rank"] == 0:
        assert sum(stats.grad_norm) > 0
    keep(folder / f"weights_{stage}.safetensors", worker.weights()[1])
    written = str(folder / f"two_ranks_{stage}" / "step_000001")
    worker.save_checkpoint(written, {"stage": stage}, {0: start})
    assert [kept.version for kept in worker.kept_versions(written)] == [0][place["rank"] :]
    worker.step(groups)  # no rank gets past it before the checkpoint is written
    keep(folder / f"uninterrupted_{stage}.safetensors", worker.weights()[1])
    resumed = make_learner(folder / "model", config, **place)
    resumed.load_checkpoint(written)
    resumed.step(groups)
    keep(folder / f"resumed_{stage}.safetensors", resumed.weights()[1])
    assert worker.load_checkpoint(str(folder / "one_rank" / "step_000001")) == {"from": "one rank"}
    worker.step(groups)
    keep(folder / f"continued_{stage}.safetensors", worker.weights()[1])


def odd_sizes(folder: Path, rank: int, stage: int) -> None:
    """An engine on parameters of odd sizes, that ZeRO-3 must cut up and pad; state out and in."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    config = LearnerConfig(lr=1e-2, zero_stage=stage, max_grad_norm=100.0)
    engine = Engine(network, config, rank, WORLD_SIZE)
    x = torch.linspace(-1, 1, 28).reshape(4, 7)[rank::WORLD_SIZE]
    for _ in range(2):
        engine.backward(engine.network(x).square().sum() / 4, last=True)
        engine.step()
    weights, state = broadcast(engine.full_tensors()), engine.optimizer_state()
    for moments in (state.exp_avg, state.exp_avg_sq):
        moments.update(broadcast(moments))
    keep(folder / f"odd_{stage}.safetensors", weights)
    engine.load_full_tensors({name: tensor * 0 for name, tensor in weights.items()})
    engine.load_full_tensors(weights)
    engine.load_optimizer_state(state)
    keep(folder / f"odd_loaded_{stage}.safetensors", engine.full_tensors())
    engine.backward(engine.network(x).square().sum() / 4, last=True)
    engine.step()
    keep(folder / f"odd_next_{stage}.safetensors", engine.full_tensors())


def not_finite(folder: Path, groups: list[RecordBatch], place: dict[str, Any]) -> None:
    """A batch whose loss is NaN, where rank 0 takes long to dump it; rank 1 leaves what it found afterwards."""

    def slow_dump(*args: Any) -> None:
        time.sleep(1.0)
        dump_batch(*args)

    learner.worker.dump_batch = slow_dump
    worker = make_learner(folder / "model", dump_dir=str(folder / "dump"), **place)
    tensors = broadcast(worker.engine.full_tensors())
    tensors[min(tensors)].fill_(math.nan)
    worker.engine.load_full_tensors(tensors)
    try:
        worker.step(groups)
    except NonFiniteLoss:
        worker.wait_for_ranks()
        if place["rank"] == 1:
            found = sorted(str(p.relative_to(folder)) for p in (folder / "dump").rglob("*.*"))
            (folder / "found_by_rank_1").write_text("\n".join(found))


def broadcast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rank 0's dict on both ranks."""
    box = [tensors]
    distributed.broadcast_object_list(box)
    return box[0]


def main(folder: Path, rank: int, port: int) -> None:
    learner.engine.PERSISTENT_NUMEL = 0  # the model is tiny: ZeRO-3 would cut nothing up
    groups = read_ipc(folder / "groups.arrow")
    place = {"rank": rank, "world_size": WORLD_SIZE, "master_port": port}
    for stage in STAGES:
        train(folder, groups, place, stage)
        odd_sizes(folder, rank, stage)
    not_finite(folder, groups, place)
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
