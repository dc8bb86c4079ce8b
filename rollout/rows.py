"""The rows of one network batch: whose trajectory each row is, which states of it are scored, its
previews."""

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rollout.plan import StepPlan
from rollout.records import Previews, SliceRequest


class Rows:
    """The B trajectories of one call: slices one after the other, samples rising within a slice."""

    def __init__(self, requests: Sequence[SliceRequest], device: torch.device) -> None:
        counts = [request.count for request in requests]
        self.requests, self.device = requests, device
        self.identities = [
            (request.group.group_id, sample)
            for request in requests
            for sample in range(request.first, request.first + request.count)
        ]
        """(group_id, sample) of each row, which name its noise."""
        self.slices = [slice(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]
        """The rows of each request."""
        first_rows = torch.tensor([part.start for part in self.slices])
        self.first_rows = first_rows.to(device)
        """int64 [S], the first row of each request."""
        self.slice_index = (
            torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)
        )
        """int64 [B], the request of each row."""

    def __len__(self) -> int:
        """B."""
        return len(self.identities)

    def scored_pairs(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Return (states, rows), int64 [P] each, of every clean estimate to score, state by state.

        x_T is scored only for requests that say so, once a request if it is shared.
        """
        initial = [
            row
            for request, part in zip(self.requests, self.slices, strict=True)
            if request.score_initial
            for row in range(part.start, part.start + 1 if plan.shared_initial_noise else part.stop)
        ]
        every = torch.arange(len(self))
        by_state = [
            torch.tensor(initial, dtype=torch.int64) if s == 0 else every for s in plan.scored
        ]
        states = [torch.full_like(rows, s) for s, rows in zip(plan.scored, by_state, strict=True)]
        return torch.cat(states).to(self.device), torch.cat(by_state).to(self.device)

    def previews(self, images: np.ndarray, states: Tensor, rows: Tensor) -> Previews:
        """Tag uint8 images [P, H, W, 3] of the pairs (states, rows) with what they are."""
        groups = [self.requests[i].group for i in self.slice_index[rows].tolist()]
        identities = np.array(self.identities, dtype=np.int64)[rows.cpu().numpy()]
        return Previews(
            images=images,
            prompts=[group.prompt for group in groups],
            metadata=[group.metadata for group in groups],
            group_ids=identities[:, 0],
            samples=identities[:, 1],
            states=states.cpu().numpy(),
        )


def preview_pngs(
    request: SliceRequest, previews: Previews, num_states: int
) -> list[list[bytes | None] | None]:
    """Return the PNGs of each trajectory of the request by state; None for those past
    keep_previews."""
    kept = min(request.keep_previews, request.count)
    pngs: list[list[bytes | None]] = [[None] * num_states for _ in range(kept)]
    places = previews.samples - request.first
    wanted = (previews.group_ids == request.group.group_id) & (places >= 0) & (places < kept)
    for i in np.flatnonzero(wanted):
        with io.BytesIO() as file:
            Image.fromarray(previews.images[i]).save(file, format="PNG")
            pngs[places[i]][previews.states[i]] = file.getvalue()
    return [*pngs, *[None] * (request.count - kept)]
