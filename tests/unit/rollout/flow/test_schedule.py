import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from rollout.flow.schedule import shifted_times
from tests.reference import ground_truth

TEN_STEPS = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]


def test_ten_steps_of_shift_three_are_the_published_numbers() -> None:
    times = shifted_times(10, 3.0)
    assert times.dtype == torch.float64
    assert times.tolist() == pytest.approx(TEN_STEPS, abs=5e-5)


@pytest.mark.parametrize("shift", [0.5, 1.0, 1.15, 3.0, 6.3])
@pytest.mark.parametrize("num_train_timesteps", [100, 1000])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 10, 28, 40, 1000])
def test_float32_times_are_diffusers_sigmas_to_the_bit(
    num_steps: int, num_train_timesteps: int, shift: float
) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=num_train_timesteps, shift=shift
    )
    scheduler.set_timesteps(num_steps)
    ours = shifted_times(num_steps, shift, num_train_timesteps).float()
    assert torch.equal(ours, scheduler.sigmas)


def test_the_last_time_before_zero_does_not_depend_on_the_number_of_steps() -> None:
    assert len({float(shifted_times(num_steps, 3.0)[-2]) for num_steps in range(2, 200)}) == 1


@pytest.mark.parametrize(("num_steps", "shift"), [(2, 3.0), (10, 1.0), (25, 6.0)])
def test_times_equal_the_paper_s_formula(num_steps: int, shift: float) -> None:
    slow = ground_truth.shifted_times(num_steps, shift)
    # t_min passes through float32 (as in diffusers), hence not closer than 1e-7.
    assert shifted_times(num_steps, shift).tolist() == pytest.approx(slow, abs=1e-8, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 3.0), "num_steps = 0"),
        ((10, 0.0), "shift = 0.0"),
        ((10, float("nan")), "shift = nan"),
        ((10, 3.0, 0), "num_train_timesteps = 0"),
    ],
)
def test_impossible_schedules_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shifted_times(*arguments)  # pyright: ignore[reportArgumentType]
