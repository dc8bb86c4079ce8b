"""Sealed groups to advantages and to rows, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.batching import plan_updates
from learner.config import CreditConfig
from learner.credit import make_credit
from learner.credit_batch import mean_gain_per_step, read_batch
from learner.transitions import RankTransitions, negative_conditioning
from rollout.trajectory import HEADER_KEY, RecordBatch, read_group, seal_group
from tests.unit.learner.helpers import (
    NUM_SAMPLES,
    NUM_STEPS,
    make_learner,
    make_rollout,
    sample_groups,
)

CREDIT = make_credit(CreditConfig())


def with_header(batch: RecordBatch, **changes: object) -> RecordBatch:
    metadata = dict(batch.schema.metadata)
    header = json.loads(metadata[HEADER_KEY]) | changes
    return batch.replace_schema_metadata(metadata | {HEADER_KEY: json.dumps(header).encode()})


def test_advantages_are_those_of_the_rule_over_all_groups(groups: list[RecordBatch]) -> None:
    batch = read_batch(groups, CREDIT)
    read = [read_group(group) for group in groups]
    rewards = np.stack([group.rewards for group in read])
    trained = np.array(read[0].header.plan.trained)
    gains = np.diff(rewards, axis=2)
    mean = gains[..., trained].mean(axis=(1, 2), keepdims=True)
    std = gains[..., trained].std(axis=(1, 2), keepdims=True)
    expected = np.where(trained, (gains - mean) / (std + 1e-4), 0)
    np.testing.assert_allclose(batch.advantages.values.numpy(), expected, rtol=1e-9)
    assert batch.valid.shape == (len(groups) * NUM_SAMPLES, NUM_STEPS)
    assert (batch.valid == trained).all()
    assert batch.name(NUM_SAMPLES + 1) == f"group {read[1].group_id}, sample 1"


def test_rows_are_the_recorded_transitions(groups: list[RecordBatch]) -> None:
    """Rank 1 of 2: its rows hold exactly the numbers of the groups that they name."""
    batch = read_batch(groups, CREDIT)
    (update,) = plan_updates(batch.valid, num_updates=1, rank=1, num_ranks=2, micro_batch=7, seed=0)
    transitions = RankTransitions(batch, [update], torch.device("cpu"))
    plan = batch.header.plan
    assert len(transitions._states) == len(groups) * NUM_SAMPLES // 2, "only its own latents"
    for micro in update.micro_batches:
        rows = transitions.rows(micro)
        for b, (trajectory, i) in enumerate(zip(micro.trajectories, micro.steps, strict=True)):
            group = batch.groups[trajectory // NUM_SAMPLES]
            n = trajectory % NUM_SAMPLES
            assert np.array_equal(rows.x_t[b].numpy(), group.states[n, i])
            assert np.array_equal(rows.x_next[b].numpy(), group.states[n, i + 1])
            assert rows.old_log_prob[b].item() == group.log_probs[n, i]
            values = batch.advantages.values[trajectory // NUM_SAMPLES, n, i]
            assert rows.advantage[b].item() == pytest.approx(values.item(), rel=1e-6)
            scalars = (rows.t[b], rows.t_next[b], rows.noise_coefficient[b], rows.std[b])
            expected = (plan.times[i], plan.times[i + 1], plan.noise_coefficient[i], plan.std[i])
            assert tuple(value.item() for value in scalars) == expected
            for name, value in rows.conditioning.items():
                assert np.array_equal(value[b].numpy(), group.embeddings[f"conditioning.{name}"])
        assert rows.weight.tolist() == pytest.approx(micro.weights.tolist(), rel=1e-6)


def test_only_guided_groups_bring_the_empty_prompt(model: Path, groups: list[RecordBatch]) -> None:
    assert negative_conditioning(read_batch(groups, CREDIT), torch.device("cpu")) is None
    sampler = make_rollout(model, guidance_scale=3.0, cfg_mode="train")
    guided = sample_groups(sampler, make_learner(model).weights(), num_groups=1)
    found = negative_conditioning(read_batch(guided, CREDIT), torch.device("cpu"))
    assert found is not None
    assert set(found) == {"prompt_embeds", "pooled"}
    assert all(len(value) == 1 for value in found.values())


def test_gains_next_to_states_that_were_not_scored_are_none() -> None:
    rewards = torch.tensor([[[0.0, float("nan"), 0.5, 1.0], [0.2, float("nan"), 0.5, 0.8]]])
    assert mean_gain_per_step(rewards) == [None, None, pytest.approx(0.4)]


def test_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="a learner step needs at least one group"):
        read_batch([], CREDIT)


def test_a_slice_is_refused(groups: list[RecordBatch]) -> None:
    unsealed = groups[0].select([n for n in groups[0].schema.names if not n.startswith("reward")])
    with pytest.raises(ValueError, match="a slice, not a sealed group"):
        read_batch([unsealed], CREDIT)


def test_groups_of_different_sizes_are_refused(model: Path, groups: list[RecordBatch]) -> None:
    small = sample_groups(
        make_rollout(model),
        make_learner(model).weights(),
        num_groups=1,
        num_samples=2,
        first_group=8,
    )
    with pytest.raises(ValueError, match="group 8 has 2 trajectories, group 0 has 4"):
        read_batch([groups[0], *small], CREDIT)


def test_groups_of_different_plans_are_refused(groups: list[RecordBatch]) -> None:
    other = with_header(groups[1], run_seed=99)
    with pytest.raises(ValueError, match="groups 0 and 1 were sampled with different step plans"):
        read_batch([groups[0], other], CREDIT)


def test_another_reduction_of_log_probs_is_refused(groups: list[RecordBatch]) -> None:
    with pytest.raises(ValueError, match="recorded with reduction 'sum', this code uses 'mean'"):
        read_batch([with_header(groups[0], log_prob_reduction="sum")], CREDIT)


def test_rewards_that_the_rule_cannot_use_are_refused(groups: list[RecordBatch]) -> None:
    """The first state's reward is missing, and step 0 is trained on its gain."""
    bare = groups[0].select([n for n in groups[0].schema.names if not n.startswith("reward")])
    rewards = read_group(groups[0]).rewards.copy()
    rewards[:, 0] = np.nan
    with pytest.raises(ValueError, match="Score state 0 or an earlier one, and state 1 or a later"):
        read_batch([seal_group([bare], rewards, {})], CREDIT)
