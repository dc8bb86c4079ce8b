"""transition_loss against the formulas written out, in float64, with every KL form."""

import math

import pytest
import torch
from torch import Tensor, nn

from learner.config import ObjectiveConfig
from learner.loss import Transitions, transition_loss
from learner.objective import make_objective

B, SHAPE = 5, (2, 3)
T, T_NEXT, K, STD = 0.7, 0.6, 0.55, 0.2


class LinearPolicy:
    """v = w x + c t: a policy that needs no family."""

    def __init__(self) -> None:
        self.w = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.c = nn.Parameter(torch.tensor(-0.2, dtype=torch.float64))

    def __call__(self, x_t: Tensor, t: Tensor, conditioning: dict[str, Tensor]) -> Tensor:
        return self.w * x_t + self.c * t.double().reshape(-1, 1, 1) * conditioning["scale"]


def make_transitions() -> Transitions:
    generator = torch.Generator().manual_seed(0)
    x_t, noise = torch.randn(2, B, *SHAPE, generator=generator, dtype=torch.float64)
    column = torch.ones(B, dtype=torch.float64)
    return Transitions(
        x_t=x_t,
        x_next=0.9 * x_t + 0.2 * noise,
        t=column * T,
        t_next=column * T_NEXT,
        noise_coefficient=column * K,
        std=column * STD,
        old_log_prob=torch.full((B,), 0.1, dtype=torch.float64),
        advantage=torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0], dtype=torch.float64),
        weight=torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0], dtype=torch.float64),
        conditioning={"scale": torch.ones(B, 1, 1, dtype=torch.float64)},
    )


def by_hand(
    policy: LinearPolicy, rows: Transitions, config: ObjectiveConfig, v_ref: Tensor
) -> Tensor:
    """One transition after the other, the papers' formulas."""
    total = torch.zeros((), dtype=torch.float64)
    t = float(torch.tensor(T).float())  # the network is told t in float32
    for b in range(B):
        x = rows.x_t[b]
        v = policy.w * x + policy.c * t

        def mean_of(velocity: Tensor, x: Tensor = x) -> Tensor:
            return (1 - T_NEXT) * (x - T * velocity) + K * (x + (1 - T) * velocity)

        density = -((rows.x_next[b] - mean_of(v)) ** 2) / (2 * STD**2)
        logp = (density - math.log(STD) - 0.5 * math.log(2 * math.pi)).mean()
        ratio = (logp - rows.old_log_prob[b]).exp()
        bounded = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
        loss = -torch.min(ratio * rows.advantage[b], bounded * rows.advantage[b])
        difference = mean_of(v) - mean_of(v_ref[b])
        kl = {
            "exact": (difference**2 / (2 * STD**2)).mean(),
            "without_dt": (difference**2 / (2 * STD**2 / (T - T_NEXT))).mean(),
            "velocity": ((v - v_ref[b]) ** 2 / 2).mean(),
        }[config.kl_form]
        total = total + rows.weight[b] * (loss + config.kl_weight * kl)
    return total


@pytest.mark.parametrize("kl_form", ["exact", "without_dt", "velocity"])
@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
def test_loss_and_gradient_are_those_of_the_formula(kl_form: str, kl_weight: float) -> None:
    config = ObjectiveConfig.model_validate(
        {"clip_range": 0.2, "kl_weight": kl_weight, "kl_form": kl_form}
    )
    rows = make_transitions()
    v_ref = torch.full((B, *SHAPE), 0.1, dtype=torch.float64)
    policy, slow = LinearPolicy(), LinearPolicy()
    loss, terms = transition_loss(policy, rows, make_objective(config), config, v_ref)  # type: ignore[arg-type]
    expected = by_hand(slow, rows, config, v_ref)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for found, wanted in ((policy.w, slow.w), (policy.c, slow.c)):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-12)
    assert not terms.loss.requires_grad
    assert not terms.log_ratio.requires_grad
    assert (float(terms.kl) > 0) == (kl_weight > 0)
    assert terms.ratio.shape == terms.clipped.shape == terms.log_ratio.shape == (B,)


def test_a_row_of_weight_zero_changes_nothing() -> None:
    config = ObjectiveConfig(clip_range=0.2)
    rows = make_transitions()
    losses = []
    for value in (0.0, 50.0):
        rows.advantage[-1] = value
        loss, _ = transition_loss(LinearPolicy(), rows, make_objective(config), config)  # type: ignore[arg-type]
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_a_kl_needs_the_references_velocities() -> None:
    config = ObjectiveConfig(clip_range=0.2, kl_weight=0.1)
    with pytest.raises(AssertionError, match="kl_weight > 0 needs the reference's velocities"):
        transition_loss(LinearPolicy(), make_transitions(), make_objective(config), config)  # type: ignore[arg-type]
