import math

import pytest
import torch
from torch import Tensor

from learner.credit.normaliser import NORMALISERS, find_scope, normalise
from tests.reference import ground_truth

GENERATOR = torch.Generator().manual_seed(3)
RAW = torch.randn(3, 4, 5, dtype=torch.float64, generator=GENERATOR)
ALL = torch.ones(5, dtype=torch.bool)
SOME = torch.tensor([False, True, True, False, True])
SCOPES = list(NORMALISERS)
EPS = 1e-4
INF = math.inf


def outcome_like(values: Tensor) -> Tensor:
    """[G, N] -> the same value at each of 5 transitions."""
    return values[..., None].repeat(1, 1, 5)


def trained_list(values: Tensor, trained: Tensor) -> list[float]:
    return values[..., trained].flatten().tolist()


@pytest.mark.parametrize("trained", [ALL, SOME])
def test_joint_is_one_mean_and_std_over_a_group(trained: Tensor) -> None:
    values = normalise(RAW, trained, "joint", EPS, INF).values
    for g in range(3):
        expected = ground_truth.standardise(trained_list(RAW[g], trained), EPS)
        assert trained_list(values[g], trained) == pytest.approx(expected, abs=1e-14)
    assert not values[..., ~trained].any()


def test_joint_has_mean_zero_and_std_one_over_the_group_but_not_per_step() -> None:
    values = normalise(RAW, SOME, "joint", 0.0, INF).values[..., SOME]
    torch.testing.assert_close(values.mean(dim=(1, 2)), torch.zeros(3).double(), atol=1e-14, rtol=0)
    std = values.std(dim=(1, 2), correction=0)
    torch.testing.assert_close(std, torch.ones(3).double(), atol=1e-14, rtol=0)
    assert bool((values.mean(dim=1).abs() > 0.05).any())


@pytest.mark.parametrize("trained", [ALL, SOME])
def test_per_step_standardises_each_column(trained: Tensor) -> None:
    values = normalise(RAW, trained, "per_step", EPS, INF).values
    for g in range(3):
        for j in range(5):
            if trained[j]:
                expected = ground_truth.standardise(RAW[g, :, j].tolist(), EPS)
                assert values[g, :, j].tolist() == pytest.approx(expected, abs=1e-14)
            else:
                assert not values[g, :, j].any()


def test_group_scope_of_an_outcome_is_flow_grpo_s_advantage() -> None:
    rewards = RAW[..., 0]
    values = normalise(outcome_like(rewards), SOME, "group", EPS, INF).values
    for g in range(3):
        expected = ground_truth.standardise(rewards[g].tolist(), EPS)
        for j in torch.nonzero(SOME).flatten().tolist():
            assert values[g, :, j].tolist() == pytest.approx(expected, abs=1e-14)


def test_batch_std_is_over_all_trajectories_of_the_batch() -> None:
    """Flow-GRPO's global_std = True: the spread between groups counts."""
    rewards = RAW[..., 0] + torch.tensor([[0.0], [10.0], [20.0]])
    values = normalise(outcome_like(rewards), ALL, "group_mean_batch_std", EPS, INF).values
    std = rewards.flatten().std(correction=0)
    expected = (rewards - rewards.mean(dim=1, keepdim=True)) / (std + EPS)
    torch.testing.assert_close(values, outcome_like(expected), atol=1e-14, rtol=1e-12)


def test_group_scope_of_gains_uses_the_mean_gain_of_each_trajectory() -> None:
    values = normalise(RAW, SOME, "group", EPS, INF).values
    per_sample = RAW[..., SOME].mean(dim=-1)
    mean, std = per_sample.mean(dim=1), per_sample.std(dim=1, correction=0)
    expected = (RAW - mean[:, None, None]) / (std + EPS)[:, None, None]
    torch.testing.assert_close(values[..., SOME], expected[..., SOME], atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("scope", SCOPES)
def test_trained_may_differ_between_trajectories(scope: str) -> None:
    """Group 2 trains nothing, trajectory (0, 1) neither, and step 4 is trained by one member
    only."""
    trained = SOME.repeat(3, 4, 1)
    trained[2] = False
    trained[0, 1] = False
    trained[:, 1:, 4] = False
    result = normalise(RAW, trained, scope, EPS, INF)
    assert result.zero_variance.tolist() == [False, False, True]
    assert not result.values[~trained].any()
    changed = torch.where(trained, RAW, 1e6)  # untrained credit moves no trained advantage
    again = normalise(changed, trained, scope, EPS, INF)
    torch.testing.assert_close(again.values[:2], result.values[:2], atol=1e-12, rtol=0)


@pytest.mark.parametrize("scope", SCOPES)
def test_untrained_entries_are_excluded_even_when_nan(scope: str) -> None:
    spoiled = RAW.clone()
    spoiled[..., ~SOME] = math.nan
    clean = normalise(RAW, SOME, scope, EPS, INF)
    assert torch.equal(normalise(spoiled, SOME, scope, EPS, INF).values, clean.values)


@pytest.mark.parametrize("eps", [0.0, EPS])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_group_whose_members_agree_gets_zero(scope: str, eps: float) -> None:
    """Its gains differ from step to step, which the joint scope alone would take for signal;
    members may differ where nothing is trained."""
    raw = RAW.clone()
    raw[1] = raw[1, :1]
    raw[1, :, 0] = torch.arange(4.0)
    result = normalise(raw, SOME, scope, eps, 5.0)
    assert result.zero_variance.tolist() == [False, True, False]
    assert not result.values[1].any()
    assert result.values.isfinite().all()
    assert result.values[0].any()


@pytest.mark.parametrize("scope", SCOPES)
def test_equality_is_within_a_few_ulps(scope: str) -> None:
    """.3 - .1 and .4 - .2 are an ulp apart: with eps = 0 that would become advantages of +-1."""
    raw = torch.tensor([[[0.3 - 0.1], [0.4 - 0.2]]], dtype=torch.float64)
    assert raw[0, 0] != raw[0, 1]
    result = normalise(raw, torch.tensor([True]), scope, 0.0, INF)
    assert result.zero_variance.tolist() == [True]
    assert not result.values.any()
    further = torch.tensor([[[0.2], [0.2 + 1e-12]]], dtype=torch.float64)
    wider = normalise(further, torch.tensor([True]), scope, 0.0, INF)
    assert wider.zero_variance.tolist() == [False]
    assert wider.values.flatten().abs().tolist() == pytest.approx([1, 1], abs=1e-3)


def test_one_step_without_spread_gives_zero_in_the_per_step_scope() -> None:
    raw = RAW.clone()
    raw[:, :, 2] = 0.1
    values = normalise(raw, ALL, "per_step", 0.0, INF).values
    assert values.isfinite().all()
    assert not values[:, :, 2].any()
    assert values[:, :, 1].all()


def test_group_scope_without_spread_of_the_means_gives_zero() -> None:
    """Members differ, but not in their mean credit: no std to divide by."""
    raw = torch.tensor([[[0.25, 0.5], [0.5, 0.25]]], dtype=torch.float64)
    result = normalise(raw, torch.tensor([True, True]), "group", EPS, INF)
    assert result.zero_variance.tolist() == [False]
    assert not result.values.any()


@pytest.mark.parametrize("scope", SCOPES)
def test_permuting_the_prompts_permutes_the_advantages(scope: str) -> None:
    order = torch.tensor([2, 0, 1])
    direct = normalise(RAW, SOME, scope, EPS, 5.0)
    permuted = normalise(RAW[order], SOME, scope, EPS, 5.0)
    torch.testing.assert_close(permuted.values, direct.values[order], atol=1e-14, rtol=0)
    assert torch.equal(permuted.zero_variance, direct.zero_variance[order])


def test_advantages_are_clipped() -> None:
    free = normalise(RAW, ALL, "joint", EPS, INF).values
    assert float(free.abs().max()) > 1
    clipped = normalise(RAW, ALL, "joint", EPS, 1.0).values
    assert torch.equal(clipped, free.clamp(-1, 1))


def test_credit_is_normalised_in_float64() -> None:
    assert normalise(RAW.float(), ALL, "joint", EPS, 5.0).values.dtype == torch.float64


def test_nothing_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="no transition is trained"):
        normalise(RAW, ~ALL, "joint", EPS, 5.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_trained_credit_must_be_finite(value: float) -> None:
    raw = RAW.clone()
    raw[1, 2, 4] = value
    with pytest.raises(ValueError, match=r"credit .* \(group, sample, step\) \(1, 2, 4\)"):
        normalise(raw, SOME, "joint", EPS, 5.0)


def test_unknown_scope_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"unknown normaliser 'batch': choose from .*'joint'"):
        normalise(RAW, ALL, "batch", EPS, 5.0)


def centred(raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    return raw.mean(dim=1, keepdim=True), torch.ones(1, 1, 1, dtype=raw.dtype)


class Centred:
    def __call__(self, raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
        return centred(raw, trained)


@pytest.mark.parametrize("name", ["centred", "Centred"])
def test_a_plug_in_is_a_function_or_a_class(name: str) -> None:
    values = normalise(RAW, ALL, f"{__name__}:{name}", 0.0, INF).values
    torch.testing.assert_close(values, RAW - RAW.mean(dim=1, keepdim=True))
    assert callable(find_scope(f"{__name__}:{name}"))
