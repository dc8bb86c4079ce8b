"""N steps == k steps + checkpoint + a new learner + N - k steps, to the bit."""

from pathlib import Path

import pytest

from learner.checkpoint import CheckpointError
from learner.worker import LearnerWorker, Weights
from rollout.trajectory import RecordBatch
from tests.unit.learner.helpers import (
    learner_config,
    make_learner,
    make_rollout,
    relative_difference,
    same_bits,
    sample_groups,
)


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_a_resumed_learner_is_the_uninterrupted_one(
    model: Path, tmp_path: Path, adapter: str
) -> None:
    """On-policy: the batches themselves depend on the weights. Two updates a batch, so that the
    split of trajectories, which depends on the version, is part of it."""
    config = learner_config(adapter=adapter, lr=1e-4, updates_per_batch=2)
    whole, sampler = make_learner(model, config), make_rollout(model, config)
    folder = str(tmp_path / "step_000002")
    for version in range(4):
        if version == 2:
            whole.save_checkpoint(folder, {"cursor": 17})
        whole.step(sample_groups(sampler, whole.weights(), first_group=10 * version))
    resumed = make_learner(model, config)
    assert resumed.load_checkpoint(folder) == {"cursor": 17}
    assert resumed.version == 2
    for version in range(2, 4):
        resumed.step(sample_groups(sampler, resumed.weights(), first_group=10 * version))
    assert resumed.weights()[::2] == whole.weights()[::2]
    assert resumed.weights("ema")[::2] == whole.weights("ema")[::2]
    states = (resumed.engine.optimizer_state(), whole.engine.optimizer_state())
    assert states[0].step == states[1].step == 8
    assert same_bits(states[0].exp_avg, states[1].exp_avg)
    assert same_bits(states[0].exp_avg_sq, states[1].exp_avg_sq)


def test_an_asynchronous_run_goes_on_with_the_versions_that_its_checkpoint_keeps(
    model: Path, tmp_path: Path
) -> None:
    """max_policy_lag = 2: batch b is sampled with version max(0, b - 2), so after 3 batches the next
    two need versions 1 and 2."""
    sampler, folder = make_rollout(model), str(tmp_path / "step_000003")

    def train(worker: LearnerWorker, published: dict[int, Weights], batches: range) -> None:
        for batch in batches:
            weights = published[max(0, batch - 2)]
            stats = worker.step(sample_groups(sampler, weights, first_group=10 * batch))
            assert stats.policy_version == max(0, batch - 2)
            published[worker.version] = worker.weights()

    whole, resumed = make_learner(model), make_learner(model)
    published = {0: whole.weights()}
    train(whole, published, range(3))
    whole.save_checkpoint(folder, {}, {version: published[version][1] for version in (2, 1)})
    train(whole, published, range(3, 6))
    resumed.load_checkpoint(folder)
    kept = resumed.kept_versions(folder)
    assert [(found.version, found.checksum) for found in kept] == [
        (version, published[version][2]) for version in (1, 2)
    ]
    assert kept[0].num_bytes == sum(tensor.nbytes for tensor in published[1][1].values())
    again = {found.version: (found.version, found.tensors, found.checksum) for found in kept}
    train(resumed, again | {3: resumed.weights()}, range(3, 6))
    assert resumed.weights()[::2] == whole.weights()[::2]
    assert resumed.weights("ema")[::2] == whole.weights("ema")[::2]


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0), (1, 2), (2, 1)])
def test_a_checkpoint_opens_under_another_zero_stage(
    model: Path, groups: list[RecordBatch], tmp_path: Path, before: int, after: int
) -> None:
    source = make_learner(model, learner_config(zero_stage=before))
    source.step(groups)
    folder = str(tmp_path / "step_000001")
    source.save_checkpoint(folder, {})
    other = make_learner(model, learner_config(zero_stage=after))
    other.load_checkpoint(folder)
    assert same_bits(other.weights()[1], source.weights()[1])
    source.step(groups)
    other.step(groups)
    assert relative_difference(other.weights()[1], source.weights()[1]) < 1e-6


def test_a_checkpoint_without_average_starts_it_at_its_weights(
    model: Path, groups: list[RecordBatch], tmp_path: Path
) -> None:
    source = make_learner(model, learner_config(ema_decay=0))
    source.step(groups)
    source.save_checkpoint(str(tmp_path / "step_000001"), {})
    other = make_learner(model)
    other.load_checkpoint(str(tmp_path / "step_000001"))
    assert same_bits(other.weights("ema")[1], source.weights()[1])


def test_a_checkpoint_of_another_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    """alpha changes neither names nor shapes, but what the tensors mean."""
    folder = str(tmp_path / "step_000000")
    make_learner(model).save_checkpoint(folder, {})
    other = make_learner(model, learner_config(lora_alpha=16.0))
    with pytest.raises(
        CheckpointError, match=r"'alpha': 8\.0\}, this learner has .*'alpha': 16\.0"
    ):
        other.load_checkpoint(folder)


def test_a_checkpoint_of_other_targets_is_refused(model: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "step_000000")
    make_learner(model).save_checkpoint(folder, {})
    other = make_learner(model, learner_config(lora_targets=["attn.to_q"]))
    with pytest.raises(CheckpointError, match=r"doesn't fit this learner: .* names differ"):
        other.load_checkpoint(folder)
