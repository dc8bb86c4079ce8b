"""Do the kernels keep the data's law? docs/papers.md section 0, second table of numbers.

Data N(0, s0^2) with its exact velocity, which is linear in x: the state stays Gaussian with mean 0,
so its std follows from a recursion, without sampling.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from rollout.flow.kernels import make_kernel, step_mean
from rollout.flow.schedule import shifted_times
from tests.reference import ground_truth

NUM_STEPS = [10, 20, 40, 200, 2000]
TABLE = [
    ("ode", 0.0, [0.818, 0.910, 0.955, 0.991, 0.999]),
    ("flow_sde", 0.7, [0.885, 0.947, 0.976, 0.998, 1.001]),
    ("dance_sde", 0.3, [0.824, 0.913, 0.957, 0.991, 0.999]),
    ("precise", 0.7, [0.790, 0.890, 0.943, 0.988, 0.999]),
    ("cps", 0.8, [0.674, 0.731, 0.763, 0.795, 0.806]),
    ("cps", 0.4, [0.782, 0.863, 0.904, 0.938, 0.949]),
    ("ddim_sde", 0.7, [0.798, 0.878, 0.915, 0.939, 0.937]),
    ("ddim_sde", 1.0, [0.771, 0.831, 0.851, 0.848, 0.815]),
]
CONSISTENT = ("ode", "flow_sde", "dance_sde", "precise")


def final_std(name: str, eta: float, first_step, num_steps: int, data_std: float) -> float:
    """Std of the final state over the data's."""
    times = shifted_times(num_steps, 3.0).tolist()
    kernel = make_kernel(name, eta, first_step, times[1])
    variance, one = 1.0, torch.ones(1, 1, dtype=torch.float64)
    for t, t_next in pairwise(times):
        c = kernel.coefficients(t, t_next)
        velocity = one * float(ground_truth.gaussian_velocity(np.float64(1), t, data_std))
        slope = float(step_mean(one, velocity, t, t_next, c.noise))
        variance = slope**2 * variance + c.std**2
    return math.sqrt(variance) / data_std


@pytest.mark.parametrize(("name", "eta", "row"), TABLE)
def test_std_of_the_final_state_is_that_of_the_table(name: str, eta: float, row) -> None:
    first_step = "literal" if name == "ddim_sde" else "clamp"
    stds = [final_std(name, eta, first_step, num_steps, 1.0) for num_steps in NUM_STEPS]
    assert stds == pytest.approx(row, abs=6e-4)


@pytest.mark.parametrize("data_std", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", CONSISTENT)
def test_consistent_kernels_converge_at_first_order(name: str, data_std: float) -> None:
    """Ten times the steps: a tenth of the error. Flow-SDE's error crosses zero on the way."""
    coarse, fine = (abs(final_std(name, 0.7, "clamp", n, data_std) - 1) for n in (200, 2000))
    assert fine < 3e-3
    if name != "flow_sde":
        assert 6 < coarse / fine < 14


@pytest.mark.parametrize("data_std", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("name", "eta"), [("cps", 0.8), ("ddim_sde", 0.7)])
def test_the_others_stay_contracted(name: str, eta: float, data_std: float) -> None:
    assert final_std(name, eta, "clamp", 2000, data_std) < 0.97
