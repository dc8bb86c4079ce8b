"""One rank's share of a batch on its device, and the rows of each micro-batch taken from it."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from learner.batching import MicroBatch, Update
from learner.credit_batch import CreditBatch
from learner.loss import Transitions
from rollout.families.base import Conditioning


class RankTransitions:
    """The latents, log-probs and advantages of the trajectories that this rank's updates name, and
    nothing else."""

    def __init__(self, batch: CreditBatch, updates: Iterable[Update], device: torch.device) -> None:
        """Copy them to `device`, once for the whole learner step."""
        named = [micro.trajectories for update in updates for micro in update.micro_batches]
        own = np.unique(np.concatenate(named))
        num_samples = batch.rewards.shape[1]
        group_of, sample_of = np.divmod(own, num_samples)
        self._row_of = np.full(batch.rewards.shape[0] * num_samples, -1)
        self._row_of[own] = np.arange(len(own))
        states = np.stack(
            [batch.groups[g].states[n] for g, n in zip(group_of, sample_of, strict=True)]
        )
        old = np.stack(
            [batch.groups[g].log_probs[n] for g, n in zip(group_of, sample_of, strict=True)]
        )
        self._states = torch.from_numpy(states).to(device)
        self._old_log_probs = torch.from_numpy(old).to(device)
        advantages = batch.advantages.values.flatten(0, 1)[torch.from_numpy(own)]
        self._advantages = advantages.float().to(device)
        plan = batch.header.plan
        columns = (plan.times[:-1], plan.times[1:], plan.noise_coefficient, plan.std)
        self._scalars = torch.tensor(columns, dtype=torch.float64, device=device)
        """[4, T]: t, t', k, std."""
        groups = np.unique(group_of)
        self._group_row = torch.from_numpy(np.searchsorted(groups, group_of)).to(device)
        self._conditioning: Conditioning = {
            name.removeprefix("conditioning."): _stack(
                [batch.groups[g].embeddings[name] for g in groups], device
            )
            for name in batch.header.embedding_shapes
            if name.startswith("conditioning.")
        }

    def rows(self, micro: MicroBatch) -> Transitions:
        """Gather a micro-batch."""
        device = self._states.device
        row = torch.from_numpy(self._row_of[micro.trajectories]).to(device)
        step = torch.from_numpy(micro.steps).to(device)
        t, t_next, noise_coefficient, std = self._scalars[:, step]
        return Transitions(
            x_t=self._states[row, step],
            x_next=self._states[row, step + 1],
            t=t,
            t_next=t_next,
            noise_coefficient=noise_coefficient,
            std=std,
            old_log_prob=self._old_log_probs[row, step],
            advantage=self._advantages[row, step],
            weight=torch.from_numpy(micro.weights).to(device, torch.float32),
            conditioning={
                name: value[self._group_row[row]] for name, value in self._conditioning.items()
            },
        )


def negative_conditioning(batch: CreditBatch, device: torch.device) -> Conditioning | None:
    """Return the empty prompt's conditioning (one row) that was recorded with guided groups; None
    without guidance."""
    group = batch.groups[0]
    names = [name for name in batch.header.embedding_shapes if name.startswith("negative.")]
    rows = {
        name.removeprefix("negative."): _stack([group.embeddings[name]], device) for name in names
    }
    return rows or None


def _stack(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    """float32 [len(arrays), ...]; the embeddings' storage type may be float16."""
    return torch.from_numpy(np.stack(arrays).astype(np.float32, copy=False)).to(device)
