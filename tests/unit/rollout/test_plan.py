import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from rollout.config import SamplingConfig
from rollout.flow.schedule import shifted_times
from rollout.plan import (
    StepPlan,
    make_plan,
    network_calls_per_group,
    ode_plan,
    scored_images_per_group,
)


def plan(credit: Any = "all", **settings: Any) -> StepPlan:
    sampling = SamplingConfig(**settings)
    return make_plan(sampling, shifted_times(sampling.num_steps, 3.0), credit)


def test_the_ten_step_ddim_plan_equals_the_table_of_the_papers() -> None:
    """docs/papers.md section 0, DDIM-SDE eta = .7, with the literal first step."""
    made = plan(first_step="literal")
    expected = (0, 0.128, 0.177, 0.209, 0.227, 0.228, 0.205, 0.142, 0.0053, 0)
    assert made.std == pytest.approx(expected, abs=6e-4)
    assert made.trained == (False, *[True] * 7, False, False)
    assert made.scored == tuple(range(11))
    assert (made.num_steps, len(made.times)) == (10, 11)


def test_a_plan_takes_floats_or_a_tensor_and_compares() -> None:
    times = shifted_times(4, 3.0)
    sampling = SamplingConfig(num_steps=4)
    assert make_plan(sampling, times, "all") == make_plan(sampling, times.tolist(), "all")
    assert make_plan(sampling, times, "all") != make_plan(sampling, times, "final")


def test_trained_steps_need_the_std_and_the_users_leave() -> None:
    assert plan(min_std=0.15).trained == tuple(i in range(2, 7) for i in range(10))
    assert plan(train_steps=[0, 3, 9]).trained == tuple(i in (0, 3) for i in range(10))


@pytest.mark.parametrize(
    ("credit", "chosen", "scored"),
    [
        ("all", "auto", (0, 1, 2, 3, 4)),
        ("final", "auto", (4,)),
        ("trained", "auto", (0, 1, 2, 4)),
        ("final", "all", (0, 1, 2, 3, 4)),
        ("all", "final", (4,)),
        ("all", [4, 0, 2, 2], (0, 2, 4)),
    ],
)
def test_scored_states(credit: str, chosen: Any, scored: tuple[int, ...]) -> None:
    assert plan(credit, num_steps=4, scored_states=chosen).scored == scored


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_steps": [1, 10]}, "train_steps = [1, 10]: 10 is not within 0 .. 9"),
        ({"train_steps": [-1]}, "train_steps = [-1]: -1 is not within 0 .. 9"),
        ({"train_steps": []}, "train_steps is empty; name steps within 0 .. 9"),
        ({"scored_states": [3, 11]}, "scored_states = [3, 11]: 11 is not within 0 .. 10"),
        ({"scored_states": [0, 5]}, "scored_states = [0, 5] must contain 10, the image"),
        ({"scored_states": []}, "scored_states = [] must contain 10, the image"),
        ({"kernel": "ode"}, "no step can be trained: kernel = 'ode' with eta = 0.7 reaches std 0"),
        ({"train_steps": [8, 9]}, "at most on train_steps [8, 9], min_std is 0.02"),
        ({"kernel": "euler"}, "unknown kernel 'euler'"),
        ({"eta": 1.2}, "ddim_sde: eta = 1.2 gives std"),
    ],
)
def test_impossible_plans_are_explained(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(**settings)


def test_the_ode_plan_is_the_euler_step() -> None:
    made = ode_plan(torch.tensor([1.0, 0.6, 0.0]).double(), guidance_scale=2.0)
    assert made.noise_coefficient == made.times[1:]
    assert made.std == (0.0, 0.0)
    assert (made.scored, made.trained) == ((2,), (False, False))
    assert network_calls_per_group(made, num_samples=3) == 12


@pytest.mark.parametrize(
    ("settings", "num_slices", "calls", "images"),
    [
        # T = 4, N = 6: shared x_T once a slice, then 3 x 6
        ({}, 1, 19, 25),
        ({}, 3, 21, 25),
        ({"shared_initial_noise": False}, 1, 24, 30),
        ({"scored_states": "final"}, 1, 19, 6),
        # T' = 3: two more at each scored state with t > 0, once for the shared x_T
        ({"num_substeps": 3}, 1, 19 + 2 * (1 + 18), 25),
        ({"num_substeps": 3, "shared_initial_noise": False}, 1, 24 + 2 * 24, 30),
        ({"num_substeps": 3, "scored_states": [2, 4]}, 1, 19 + 2 * 6, 12),
        ({"num_substeps": 3, "scored_states": "final"}, 1, 19, 6),
        ({"guidance_scale": 2.0, "cfg_mode": "train"}, 2, 2 * 20, 25),
    ],
)
def test_counts_of_a_group(
    settings: dict[str, Any], num_slices: int, calls: int, images: int
) -> None:
    made = plan(num_steps=4, **settings)
    assert network_calls_per_group(made, num_samples=6, num_slices=num_slices) == calls
    assert scored_images_per_group(made, num_samples=6) == images


def test_what_reads_records_imports_no_torch() -> None:
    modules = "rollout.plan, rollout.records, rollout.trajectory, rollout.prompts, rollout.stats"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
