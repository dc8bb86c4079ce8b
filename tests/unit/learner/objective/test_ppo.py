import math

import pytest
import torch
from torch import Tensor

from learner.config import ObjectiveConfig
from learner.objective import ObjectiveOutput, PpoClip, make_objective
from tests.reference import ground_truth

CLIP = 0.1
# Below, inside and above the clip, times advantages of both signs and none.
CASES = [(r, a) for r in (-0.3, -0.05, 0.0, 0.05, 0.3) for a in (-2.0, 0.0, 1.5)]
LOG_RATIO, ADVANTAGE = torch.tensor(CASES, dtype=torch.float64).T
OLD = torch.linspace(-3, 2, len(CASES), dtype=torch.float64)


def evaluate(log_ratio: Tensor, advantage: Tensor) -> tuple[ObjectiveOutput, Tensor]:
    """Output, and gradient of the summed loss by the log-prob."""
    log_prob = log_ratio.clone().requires_grad_()
    output = PpoClip(CLIP)(log_prob, torch.zeros_like(log_ratio), advantage)
    (gradient,) = torch.autograd.grad(output.loss.sum(), log_prob)
    return output, gradient


def test_loss_and_ratio_are_the_definition_s() -> None:
    output = PpoClip(CLIP)(OLD + LOG_RATIO, OLD, ADVANTAGE)
    slow = [ground_truth.ppo(r, a, CLIP) for r, a in CASES]
    assert output.loss.tolist() == pytest.approx(slow, rel=1e-12)
    assert output.ratio.tolist() == pytest.approx([math.exp(r) for r, _ in CASES], rel=1e-12)


def test_gradient_is_that_of_the_definition() -> None:
    _, gradient = evaluate(LOG_RATIO, ADVANTAGE)
    for (r, a), ours in zip(CASES, gradient.tolist(), strict=True):
        slow = ground_truth.numeric_gradient(lambda x, a=a: ground_truth.ppo(x, a, CLIP), r)
        assert ours == pytest.approx(slow, abs=1e-8)


def test_clipped_marks_the_transitions_without_gradient() -> None:
    output, gradient = evaluate(LOG_RATIO, ADVANTAGE)
    moved_away = [(r > CLIP and a > 0) or (r < -CLIP and a < 0) for r, a in CASES]
    assert output.clipped.tolist() == moved_away
    assert ((gradient == 0) == (output.clipped | (ADVANTAGE == 0))).all()


def test_ratio_is_one_and_the_gradient_minus_the_advantage_before_an_update() -> None:
    output, gradient = evaluate(torch.zeros(3), torch.tensor([2.0, -1.0, 0.5]))
    assert output.ratio.tolist() == [1.0, 1.0, 1.0]
    assert gradient.tolist() == [-2.0, 1.0, -0.5]
    assert not output.clipped.any()


def test_diagnostics_are_detached() -> None:
    log_prob = torch.zeros(1, requires_grad=True)
    output = PpoClip(CLIP)(log_prob, torch.zeros(1), torch.ones(1))
    assert output.loss.requires_grad
    assert not output.ratio.requires_grad
    assert not output.clipped.requires_grad


@pytest.mark.parametrize("log_ratio", [-500.0, -88.0, 88.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_huge_finite_log_ratio_stays_finite_and_counts_as_clipped(
    log_ratio: float, advantage: float
) -> None:
    output, gradient = evaluate(torch.tensor([log_ratio]), torch.tensor([advantage]))
    assert output.loss.isfinite().all()
    assert gradient.tolist() == [0.0]
    assert output.clipped.tolist() == [True]


@pytest.mark.parametrize("log_ratio", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_log_ratio_that_is_not_finite_is_never_hidden(log_ratio: float, advantage: float) -> None:
    output, _ = evaluate(torch.tensor([log_ratio, 0.0]), torch.tensor([advantage, 1.0]))
    assert output.loss.isfinite().tolist() == [False, True]


def test_an_advantage_that_is_not_finite_is_never_hidden() -> None:
    output, _ = evaluate(torch.zeros(2), torch.tensor([math.nan, math.inf]))
    assert not output.loss.isfinite().any()


def test_differing_shapes_fail() -> None:
    with pytest.raises(AssertionError, match=r"all be \[B\]"):
        PpoClip(CLIP)(torch.zeros(3), torch.zeros(3), torch.zeros(3, 1))


MAX_RATIO = 1.5
# Log-ratios below, inside and above the clip, just below and just above log(1.5) = 0.405, far above;
# times advantages of both signs and none.
TRUNCATION_CASES = [(r, a) for r in (-0.3, 0.05, 0.3, 0.4, 0.41, 3.0) for a in (-2.0, 0.0, 1.5)]


def dual_clip(log_ratio: float, advantage: float) -> float:
    """docs/papers.md section 5, by cases: -max(min(r A, clip(r) A), m A) where A < 0, else PPO's."""
    loss = ground_truth.ppo(log_ratio, advantage, CLIP)
    return min(loss, -MAX_RATIO * advantage) if advantage < 0 else loss


def evaluate_truncated(cases: list[tuple[float, float]]) -> tuple[ObjectiveOutput, Tensor]:
    log_ratio, advantage = torch.tensor(cases, dtype=torch.float64).T
    log_prob = log_ratio.clone().requires_grad_()
    output = PpoClip(CLIP, MAX_RATIO)(log_prob, torch.zeros_like(log_ratio), advantage)
    (gradient,) = torch.autograd.grad(output.loss.sum(), log_prob)
    return output, gradient


def test_truncated_loss_and_gradient_are_those_of_the_definition() -> None:
    output, gradient = evaluate_truncated(TRUNCATION_CASES)
    slow = [dual_clip(r, a) for r, a in TRUNCATION_CASES]
    assert output.loss.tolist() == pytest.approx(slow, rel=1e-12)
    for (r, a), ours in zip(TRUNCATION_CASES, gradient.tolist(), strict=True):
        slope = ground_truth.numeric_gradient(lambda x, a=a: dual_clip(x, a), r)
        assert ours == pytest.approx(slope, abs=1e-8)


def test_a_ratio_beyond_the_truncation_has_no_gradient_and_is_counted() -> None:
    output, gradient = evaluate_truncated(TRUNCATION_CASES)
    beyond = torch.tensor([math.exp(r) > MAX_RATIO for r, _ in TRUNCATION_CASES])
    advantage = torch.tensor([a for _, a in TRUNCATION_CASES])
    assert output.truncated is not None
    assert torch.equal(output.truncated, beyond)
    assert 0 < int(beyond.sum()) < len(beyond)
    assert (gradient[beyond] == 0).all()
    assert ((gradient == 0) == (output.clipped | (advantage == 0))).all()
    assert output.ratio.tolist() == pytest.approx([math.exp(r) for r, _ in TRUNCATION_CASES])


def test_truncation_bounds_the_loss_that_the_clip_leaves_open() -> None:
    """Off-policy, one transition whose ratio is e^10 would outweigh the whole batch."""
    far = torch.tensor([10.0], dtype=torch.float64)
    nothing, negative = torch.zeros_like(far), torch.full_like(far, -2.0)
    assert PpoClip(CLIP)(far, nothing, negative).loss.item() == pytest.approx(2 * math.exp(10))
    assert PpoClip(CLIP, MAX_RATIO)(far, nothing, negative).loss.item() == 2 * MAX_RATIO
    assert PpoClip(CLIP, MAX_RATIO)(far, nothing, -negative).loss.item() == -2 * (1 + CLIP)


def test_without_truncation_every_bit_is_plain_ppo_s() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, advantage = torch.randn(3, 1000, generator=generator)
    output = PpoClip(CLIP)(new, old, advantage)
    ratio = (new - old).exp()
    plain = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
    assert torch.equal(output.loss, plain)
    assert output.truncated is not None
    assert not output.truncated.any()


@pytest.mark.parametrize("max_ratio", [0.5, 1.0, 1 + CLIP, math.nan])
def test_a_truncation_inside_the_clip_range_is_refused(max_ratio: float) -> None:
    message = r"objective\.max_ratio = .* must be above 1 \+ objective\.clip_range = 1\.1"
    with pytest.raises(ValueError, match=message):
        PpoClip(CLIP, max_ratio)


class Reinforce:
    """A plug-in."""

    def __init__(self, clip_range: float) -> None:
        self.clip_range = clip_range

    @classmethod
    def from_config(cls, config: ObjectiveConfig) -> "Reinforce":
        return cls(config.clip_range)

    def __call__(
        self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor
    ) -> ObjectiveOutput:
        ratio = (log_prob - old_log_prob).exp().detach()
        return ObjectiveOutput(
            -advantage * log_prob, ratio, torch.zeros_like(ratio, dtype=torch.bool)
        )


def test_objectives_are_made_by_name_or_path() -> None:
    assert make_objective(ObjectiveConfig(clip_range=0.2)) == PpoClip(0.2)
    truncating = ObjectiveConfig(clip_range=0.2, max_ratio=1.5)
    assert make_objective(truncating) == PpoClip(0.2, 1.5)
    plug_in = make_objective(ObjectiveConfig(name=f"{__name__}:Reinforce", clip_range=0.2))
    assert isinstance(plug_in, Reinforce)
    output = plug_in(torch.ones(2), torch.ones(2), torch.ones(2))
    assert output.loss.tolist() == [-1, -1]
    with pytest.raises(ValueError, match="unknown objective 'ppo': choose from"):
        make_objective(ObjectiveConfig(name="ppo"))


@pytest.mark.parametrize("clip_range", [0.0, -1.0, math.nan])
def test_clip_range_is_positive(clip_range: float) -> None:
    with pytest.raises(ValueError, match="clip_range"):
        PpoClip(clip_range)
