"""From scored slices to sealed groups: the controller's side of one group's journey (docs/design.md, steps 4 and 5)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.backend import ScoreAnswer
from rewards.base import RewardCall, RewardValues
from rewards.composite import combine
from rollout.records import GroupRequest, Previews, SliceRequest
from rollout.trajectory import seal_group


@dataclass(slots=True)
class OpenGroup:
    """A group whose slices are still being sampled or scored."""

    request: GroupRequest
    num_slices: int
    batches: dict[int, Any] = field(default_factory=dict)
    """pa.RecordBatch of each scored slice, by its first sample."""
    scores: list[tuple[np.ndarray, np.ndarray, Mapping[str, np.ndarray]]] = field(
        default_factory=list
    )
    """(samples [B], states [B], columns) of each slice and reward."""

    def has(self, request: SliceRequest) -> bool:
        """Whether the slice was added."""
        return request.first in self.batches

    def add(self, request: SliceRequest, batch: Any, answers: list[ScoreAnswer]) -> bool:
        """Take one slice and every reward's values for it; True when the group is whole."""
        assert not self.has(request)
        self.batches[request.first] = batch
        for answer in answers:
            assert isinstance(answer.outcome, RewardValues)
            self.scores.append((answer.samples, answer.states, answer.outcome.columns))
        return len(self.batches) == self.num_slices


def split_group(
    request: GroupRequest, slice_size: int, shared: bool, keep_previews: int
) -> list[SliceRequest]:
    """Cut a group into slices; only the first one scores x_T when the group shares it."""
    return [
        SliceRequest(
            group=request,
            first=first,
            count=slice_size,
            score_initial=first == 0 or not shared,
            keep_previews=max(0, min(slice_size, keep_previews - first)),
        )
        for first in range(0, request.num_samples, slice_size)
    ]


def reward_call(previews: Previews, request: SliceRequest | None) -> RewardCall:
    """Return what a reward scores of the previews: those that belong to a slice; all of them for None."""
    rows = np.arange(len(previews.images))
    if request is not None:
        rows = np.flatnonzero(
            (previews.group_ids == request.group.group_id)
            & (previews.samples >= request.first)
            & (previews.samples < request.first + request.count)
        )
    return RewardCall(
        images=previews.images[rows],
        prompts=[previews.prompts[row] for row in rows],
        metadata=[previews.metadata[row] for row in rows],
        group_ids=previews.group_ids[rows],
        samples=previews.samples[rows],
        states=previews.states[rows],
    )


def seal(group: OpenGroup, weights: dict[str, float], num_states: int, shared: bool) -> Any:
    """Put slices and rewards together into the group's record batch.

    A reward column becomes [N, T + 1], NaN where a state was not scored. A shared x_T was scored once: its value
    stands in every member's row.
    """
    num_samples = group.request.num_samples
    parts: dict[str, np.ndarray] = {}
    for samples, states, columns in group.scores:
        for name, values in columns.items():
            table = parts.setdefault(name, np.full((num_samples, num_states), np.nan))
            assert np.isnan(table[samples, states]).all(), f"two rewards fill column {name!r}"
            table[samples, states] = values
    for table in parts.values():
        scored_initial = ~np.isnan(table[:, 0])
        if shared and scored_initial.any():
            table[:, 0] = table[scored_initial, 0][0]
    in_order = dict(sorted(parts.items()))  # not as the answers came in: a file has one schema
    return seal_group(list(group.batches.values()), combine(parts, weights), in_order)
