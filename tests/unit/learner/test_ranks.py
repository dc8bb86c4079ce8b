"""Two ranks over gloo, every ZeRO stage: same gradient, same update, checkpoints that open anywhere."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from learner.worker import LearnerWorker
from rollout.trajectory import RecordBatch, write_ipc
from tests.unit.learner.helpers import learner_config, make_learner, relative_difference, same_bits
from tests.unit.learner.ranks import STAGES, WORLD_SIZE

pytestmark = pytest.mark.slow
TIMEOUT_S = 150


@pytest.fixture(scope="module")
def alone(model: Path, groups: list[RecordBatch]) -> dict[str, dict[str, torch.Tensor]]:
    """What one rank gets: gradient, weights after a step, and after another."""
    worker = make_learner(model)
    found = {"gradient": worker.gradient(groups)}
    worker.step(groups)
    found["weights"] = worker.weights()[1]
    worker.step(groups)
    return found | {"continued": worker.weights()[1]}


@pytest.fixture(scope="module")
def results(
    model: Path, groups: list[RecordBatch], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Run both ranks to their end, all stages; the folder with what they wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    shutil.copytree(model, folder / "model")
    write_ipc(folder / "groups.arrow", groups)
    worker = make_learner(model)
    worker.step(groups)
    worker.save_checkpoint(str(folder / "one_rank" / "step_000001"), {"from": "one rank"})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.unit.learner.ranks", str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), port], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-6000:]
    return folder


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["gradient", "weights", "continued"])
def test_two_ranks_do_what_one_does(
    results: Path, alone: dict[str, dict[str, torch.Tensor]], what: str, stage: int
) -> None:
    """continued: a step from the checkpoint of one rank under ZeRO-0."""
    found = load_file(results / f"{what}_{stage}.safetensors")
    assert relative_difference(found, alone[what]) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_resume_to_the_bit(results: Path, alone, stage: int) -> None:
    found = load_file(results / f"resumed_{stage}.safetensors")
    assert same_bits(found, load_file(results / f"uninterrupted_{stage}.safetensors"))
    assert relative_difference(found, alone["continued"]) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_two_ranks_opens_on_one(
    results: Path, model: Path, groups: list[RecordBatch], alone, stage: int
) -> None:
    worker: LearnerWorker = make_learner(model, learner_config(zero_stage=3 - stage))
    folder = results / f"two_ranks_{stage}" / "step_000001"
    assert worker.load_checkpoint(str(folder)) == {"stage": stage}
    assert worker.version == 1
    worker.step(groups)
    assert relative_difference(worker.weights()[1], alone["continued"]) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_odd_sizes_survive_being_cut_up(results: Path, stage: int) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=1e-4)
    x, expected = torch.linspace(-1, 1, 28).reshape(4, 7), []
    for _ in range(3):
        optimizer.zero_grad()
        (network(x).square().sum() / 4).backward()
        optimizer.step()
        expected.append({name: p.detach().clone() for name, p in network.named_parameters()})
    found = {
        name: load_file(results / f"odd{name}_{stage}.safetensors")
        for name in ("", "_loaded", "_next")
    }
    assert relative_difference(found[""], expected[1]) < 1e-6
    assert same_bits(found["_loaded"], found[""])
    assert relative_difference(found["_next"], expected[2]) < 1e-6


def test_no_rank_leaves_a_bad_batch_before_it_is_dumped(results: Path) -> None:
    """The first error ends the run, and with it rank 0."""
    found = (results / "found_by_rank_1").read_text().splitlines()
    assert found == [f"dump/nonfinite_version_000000/{n}" for n in ("groups.arrow", "report.json")]
