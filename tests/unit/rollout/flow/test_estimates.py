from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.flow.estimates import clean_estimate, noise_estimate, refined_estimate
from tests.reference import ground_truth

TIMES = torch.tensor([1.0, 0.86, 0.4, 0.01, 0.0], dtype=torch.float64)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(5, 2, 3, dtype=torch.float64, generator=GENERATOR)
V = torch.randn(5, 2, 3, dtype=torch.float64, generator=GENERATOR)


def test_estimates_solve_the_interpolation_equations() -> None:
    clean, noise = clean_estimate(X, V, TIMES), noise_estimate(X, V, TIMES)
    for i, t in enumerate(TIMES.tolist()):
        x, v = X[i].numpy(), V[i].numpy()
        np.testing.assert_allclose(clean[i], ground_truth.clean_estimate(x, v, t), atol=1e-14)
        np.testing.assert_allclose(noise[i], ground_truth.noise_estimate(x, v, t), atol=1e-14)


@pytest.mark.parametrize("estimate", [clean_estimate, noise_estimate])
def test_a_float_time_and_a_tensor_of_it_give_the_same_bits(estimate) -> None:
    x, v = X.float(), V.float()
    assert torch.equal(
        estimate(x, v, 0.86), estimate(x, v, torch.full((5,), 0.86, dtype=torch.float64))
    )


@pytest.mark.parametrize(
    ("x_dtype", "v_dtype", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_arithmetic_is_float32_or_better(x_dtype, v_dtype, expected) -> None:
    x, v, t = X.to(x_dtype), V.to(v_dtype), TIMES.float()
    for result in (
        clean_estimate(x, v, t),
        noise_estimate(x, v, t),
        refined_estimate(lambda x, t: x.to(v_dtype), x, v, t, 3),
    ):
        assert result.dtype == expected
    exact = x.double() - t.double()[:, None, None] * v.double()
    torch.testing.assert_close(clean_estimate(x, v, t).double(), exact, atol=1e-6, rtol=1e-6)


class CountingField:
    """v(x, t) = cos(3 t) x + t, recording the times it was asked for."""

    def __init__(self) -> None:
        self.times: list[Tensor] = []

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.times.append(t)
        wide = t.reshape(-1, *[1] * (x.ndim - 1))
        return torch.cos(3 * wide) * x + wide


@pytest.mark.parametrize("num_substeps", [1, 2, 5])
def test_refinement_is_euler_on_a_uniform_grid_of_each_item(num_substeps: int) -> None:
    field = CountingField()
    v = CountingField()(X, TIMES)
    result = refined_estimate(field, X, v, TIMES, num_substeps)
    assert len(field.times) == num_substeps - 1
    for i, t in enumerate(TIMES.tolist()):
        grid = np.linspace(t, 0, num_substeps + 1)
        x = X[i].numpy()
        for a, b in pairwise(grid):
            x = x + (np.cos(3 * a) * x + a) * (b - a)
        np.testing.assert_allclose(result[i], x, atol=1e-13)
        asked = [float(times[i]) for times in field.times]
        assert asked == pytest.approx(list(grid[1:-1]))


def test_one_substep_is_tweedie_s_estimate_and_calls_nothing() -> None:
    def fail(x: Tensor, t: Tensor) -> Tensor:
        raise AssertionError("called")

    refined = refined_estimate(fail, X, V, TIMES, 1)
    assert torch.equal(refined, clean_estimate(X, V, TIMES))


@pytest.mark.parametrize("num_substeps", [1, 4])
def test_an_item_at_time_zero_gives_its_state_back(num_substeps: int) -> None:
    refined = refined_estimate(CountingField(), X, V, TIMES, num_substeps)
    assert torch.equal(refined[-1], X[-1])


@pytest.mark.parametrize("data_std", [0.5, 1.0, 2.0])
def test_two_thousand_substeps_reach_the_exact_flow_map(data_std: float) -> None:
    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return ground_truth.gaussian_velocity(x, t[:, None, None], data_std)  # type: ignore

    refined = refined_estimate(velocity, X, velocity(X, TIMES), TIMES, 2000)
    for i, t in enumerate(TIMES.tolist()):
        exact = ground_truth.gaussian_flow_map(X[i].numpy(), t, data_std)
        np.testing.assert_allclose(refined[i], exact, rtol=3e-3)


@pytest.mark.parametrize(("num_substeps", "error"), [(1, 0.88), (2, 0.48), (5, 0.21), (10, 0.11)])
def test_the_error_of_the_refinement_is_that_of_the_digest(num_substeps: int, error: float) -> None:
    """docs/papers.md section 1: data std .5, t = .8, relative to the flow map."""
    x, t = X[:1], torch.tensor([0.8], dtype=torch.float64)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return ground_truth.gaussian_velocity(x, t[:, None, None], 0.5)  # type: ignore

    refined = refined_estimate(velocity, x, velocity(x, t), t, num_substeps)
    exact = torch.as_tensor(ground_truth.gaussian_flow_map(x.numpy(), 0.8, 0.5))
    assert float((refined / exact - 1).abs().max()) == pytest.approx(error, abs=0.01)


def test_no_substep_is_refused() -> None:
    with pytest.raises(ValueError, match="num_substeps = 0"):
        refined_estimate(CountingField(), X, V, TIMES, 0)


def test_differing_shapes_fail() -> None:
    with pytest.raises(AssertionError, match="differ"):
        clean_estimate(X, V[:, :1], 0.5)
