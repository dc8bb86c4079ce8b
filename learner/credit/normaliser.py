"""From raw credit to advantages: scope of the mean and of the std, eps, clip.

A scope is a function (raw [G, N, T], trained bool [G, N, T]) -> (mean, std), both broadcastable to
[G, N, T]. Stds are population stds (ddof 0, as paper 1 writes and numpy's default in Flow-GRPO's
code). Untrained entries reach a scope as 0 and must be left out of both by means of `trained`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.registry import load_object

Scope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

NUM_ULPS = 16
"""Credits closer than this many float64 ulps of max(1, their size) count as equal."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """What multiplies the ratio."""

    values: Tensor
    """[G, N, T] float64; 0 where untrained and in groups of zero variance."""
    zero_variance: Tensor
    """bool [G]: groups whose members do not differ at any trained transition."""


def group(raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std over a group's trajectories, each standing for the mean of its trained credit.

    With the outcome rule that is Flow-GRPO's (r - mean) / std of the group (docs/papers.md section 2).
    """
    value, valid = _per_sample(raw, trained)
    return _mean_and_std(value, valid, (1, 2))


def group_mean_batch_std(raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Mean as in `group`; std over all trajectories of the batch around the batch's mean, as
    Flow-GRPO's global_std = True (docs/papers.md section 2). Groups of zero variance count in it."""
    value, valid = _per_sample(raw, trained)
    mean, _ = _mean_and_std(value, valid, (1, 2))
    _, std = _mean_and_std(value, valid, (0, 1, 2))
    return mean, std


def joint(raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """One mean and one std over the N x T trained credits of a group (docs/papers.md section 1)."""
    return _mean_and_std(raw, trained, (1, 2))


def per_step(raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std over the N trained credits of each transition (docs/papers.md section 3,
    DenseGRPO)."""
    return _mean_and_std(raw, trained, (1,))


NORMALISERS: dict[str, Scope] = {
    "group": group,
    "group_mean_batch_std": group_mean_batch_std,
    "joint": joint,
    "per_step": per_step,
}


def find_scope(name: str) -> Scope:
    """The scope that `name` stands for: one of NORMALISERS, or "my.module:name" of a function or of
    a class without arguments whose objects are called. Raises ValueError on an unknown name."""
    if ":" not in name and name not in NORMALISERS:
        raise ValueError(
            f"unknown normaliser {name!r}: choose from {sorted(NORMALISERS)} or 'my.module:Class'"
        )
    found = NORMALISERS[name] if name in NORMALISERS else load_object(name)
    return found() if isinstance(found, type) else found


def normalise(raw: Tensor, trained: Tensor, scope: str, eps: float, clip: float) -> Advantages:
    """A = clip((raw - mean) / (std + eps), -clip, clip), mean and std being of `scope`.

    raw [G, N, T]; trained bool [T] or [G, N, T]. Returns float64. Untrained entries are 0 in the
    result and in nothing else. A group whose members (all N of them) do not differ at any
    transition that it trains gets zeros: this is tested before the scope is applied, since gains
    that differ between transitions only would otherwise pass for signal. Equal means within
    NUM_ULPS: two pairs of rewards with the same difference give gains an ulp apart. By the same
    bound, entries whose scope has a std of 0 get 0, never rounding noise over eps.

    Raises ValueError on an unknown scope, when nothing is trained, or when a credit that a trained
    transition needs isn't finite.
    """
    trained = trained.expand_as(raw)
    steps = trained.any(dim=1)
    if not bool(steps.any()):
        raise ValueError("no transition is trained: nothing to normalise over")
    used = steps[:, None, :]
    bad = used & ~raw.isfinite()
    if bool(bad.any()):
        raise ValueError(_without_credit(raw, bad))
    raw = torch.where(used, raw.double(), 0.0)
    size = raw.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1.0)
    tolerance = NUM_ULPS * torch.finfo(torch.float64).eps * size
    spread = raw.amax(dim=1) - raw.amin(dim=1)
    zero_variance = ~(spread > tolerance[:, 0]).any(dim=-1)
    raw = torch.where(trained, raw, 0.0)
    mean, std = find_scope(scope)(raw, trained)
    kept = trained & ~zero_variance[:, None, None] & (std > tolerance)
    values = torch.where(kept, (raw - mean) / torch.where(kept, std + eps, 1.0), 0.0)
    return Advantages(values=values.clamp(-clip, clip), zero_variance=zero_variance)


def _without_credit(raw: Tensor, bad: Tensor) -> str:
    """What to say of the trained transitions `bad` [G, N, T], and which states would help."""
    first = tuple(int(i) for i in torch.nonzero(bad)[0])
    text = f"credit {raw[first].item()} at trained (group, sample, step) {first}"
    unknown = (bad & raw.isnan()).flatten(0, 1).any(dim=0)
    steps = [int(step) for step in torch.nonzero(unknown).flatten()]
    if not steps:
        return text
    return (
        f"{text}: the scored states say nothing about the trained steps {steps}. Score state "
        f"{steps[0]} or an earlier one, and state {steps[-1] + 1} or a later one "
        f"(sampling.scored_states; 0 = pure noise, {raw.shape[-1]} = image), or leave those steps "
        "out of sampling.train_steps"
    )


def _per_sample(raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """Mean trained credit of each trajectory, [G, N, 1], and whether it has any."""
    value, _ = _mean_and_std(raw, trained, (2,))
    return value, trained.any(dim=2, keepdim=True)


def _mean_and_std(values: Tensor, valid: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and population std over the `valid` entries of `dims`, which are kept; 0 where none
    is."""
    count = valid.sum(dim=dims, keepdim=True).clamp(min=1)
    mean = torch.where(valid, values, 0.0).sum(dim=dims, keepdim=True) / count
    squares = torch.where(valid, (values - mean).square(), 0.0)
    return mean, (squares.sum(dim=dims, keepdim=True) / count).sqrt()
