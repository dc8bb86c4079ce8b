import pytest
import torch
from torch import Tensor

from rollout.config import SamplingConfig
from rollout.flow.estimates import VelocityFn
from rollout.flow.gaussian import log_prob
from rollout.flow.kernels import KERNELS, step_mean
from rollout.flow.schedule import shifted_times
from rollout.plan import StepPlan, make_plan, ode_plan
from rollout.sampler import Path, clean_estimates, sample

SDES = [name for name in KERNELS if name != "ode"]
SHAPE = (2, 3)


def plan(kernel: str = "ddim_sde", **settings: object) -> StepPlan:
    sampling = SamplingConfig.model_validate(
        {"num_steps": 5, "kernel": kernel, "eta": 0.6, **settings}
    )
    return make_plan(sampling, shifted_times(5, 3.0), "all")


def velocity(x: Tensor, t: Tensor) -> Tensor:
    assert x.shape[:1] == t.shape
    return torch.sin(x) * (0.5 + t[:, None, None])


def noise(step: int) -> Tensor:
    return torch.randn((4, *SHAPE), generator=torch.Generator().manual_seed(step))


def walk(made: StepPlan) -> Path:
    return sample(velocity, torch.randn(4, *SHAPE), made, noise)


@pytest.mark.parametrize("kernel", SDES)
def test_every_transition_follows_from_its_record(kernel: str) -> None:
    made = plan(kernel)
    path = walk(made)
    assert path.states.shape == (6, 4, *SHAPE)
    assert path.velocities.shape == (5, 4, *SHAPE)
    for i, (t, t_next) in enumerate(zip(made.times[:-1], made.times[1:], strict=True)):
        x_t, v = path.states[i], velocity(path.states[i], torch.full((4,), t))
        torch.testing.assert_close(path.velocities[i], v, rtol=0, atol=0)
        mean = step_mean(x_t, v, t, t_next, made.noise_coefficient[i])
        if made.std[i] == 0:
            torch.testing.assert_close(path.states[i + 1], mean, rtol=0, atol=0)
            assert path.log_probs[i].isnan().all()
            continue
        redrawn = mean + made.std[i] * noise(i)
        torch.testing.assert_close(path.states[i + 1], redrawn, rtol=0, atol=0)
        expected = log_prob(path.states[i + 1], mean, made.std[i])
        torch.testing.assert_close(path.log_probs[i], expected, rtol=0, atol=0)


def test_log_probs_equal_the_learners_with_tensors_of_mixed_steps() -> None:
    """The learner mixes transitions of different steps in one batch, as float64 tensors [B]."""
    made = plan()
    path = walk(made)
    steps, rows = torch.tensor([3, 1, 2, 1]), torch.tensor([0, 3, 2, 1])
    t, t_next, k, s = (
        torch.tensor(column, dtype=torch.float64)[steps]
        for column in (made.times[:-1], made.times[1:], made.noise_coefficient, made.std)
    )
    x_t = path.states[steps, rows]
    mean = step_mean(x_t, velocity(x_t, t.float()), t, t_next, k)
    recomputed = log_prob(path.states[steps + 1, rows], mean, s)
    torch.testing.assert_close(recomputed, path.log_probs[steps, rows], rtol=1e-6, atol=1e-6)


def test_the_ode_asks_for_no_noise() -> None:
    def no_noise(step: int) -> Tensor:
        raise AssertionError(step)

    x, made = torch.randn(4, *SHAPE), ode_plan(shifted_times(5, 3.0))
    path = sample(velocity, x, made, no_noise)
    for t, t_next in zip(made.times[:-1], made.times[1:], strict=True):
        x = x + (t_next - t) * velocity(x, torch.full((4,), t))
    torch.testing.assert_close(path.states[-1], x, rtol=1e-5, atol=1e-5)
    assert path.log_probs.isnan().all()


def test_a_velocity_at_the_start_that_is_given_is_not_asked_for_again() -> None:
    made, x_T = plan(), torch.randn(4, *SHAPE)
    asked: list[float] = []

    def counting(x: Tensor, t: Tensor) -> Tensor:
        asked.append(float(t[0]))
        return velocity(x, t)

    whole = sample(velocity, x_T, made, noise)
    path = sample(counting, x_T, made, noise, velocity(x_T, torch.ones(4)))
    assert asked == pytest.approx(made.times[1:-1])
    assert torch.equal(path.states, whole.states)
    assert torch.equal(path.velocities, whole.velocities)


def test_sampling_tracks_no_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)
    path = sample(lambda x, t: weight * x, torch.randn(4, *SHAPE), plan(), noise)
    assert not path.states.requires_grad
    assert not path.velocities.requires_grad


def pairs(made: StepPlan) -> tuple[Tensor, Tensor]:
    """All (state, row) pairs, shuffled, so that states mix within a chunk."""
    grid = torch.cartesian_prod(torch.arange(made.num_steps + 1), torch.arange(4))
    shuffled = grid[torch.randperm(len(grid), generator=torch.Generator().manual_seed(0))]
    return shuffled[:, 0], shuffled[:, 1]


def test_tweedie_estimates_call_no_network() -> None:
    made = plan()
    path = walk(made)

    def no_network(rows: Tensor) -> object:
        raise AssertionError(rows)

    states, rows = pairs(made)
    found = clean_estimates(no_network, path, made, states, rows, 7)  # pyright: ignore
    for estimate, state, row in zip(found, states, rows, strict=True):
        x_t = path.states[state, row]
        last = state == made.num_steps
        expected = x_t if last else x_t - made.times[state] * path.velocities[state, row]
        torch.testing.assert_close(estimate, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("max_batch", [1, 7, 100])
def test_refined_estimates_are_euler_substeps_with_each_rows_own_prompt(max_batch: int) -> None:
    made = plan(num_substeps=5)
    prompts = torch.tensor([0.0, 1.0, 2.0, 3.0])

    def prompted(rows: Tensor) -> VelocityFn:
        assert len(rows) <= max_batch
        return lambda x, t: velocity(x, t) + prompts[rows][:, None, None]

    path = sample(prompted_all, torch.randn(4, *SHAPE), made, noise)
    states, rows = pairs(made)
    found = clean_estimates(prompted, path, made, states, rows, max_batch)
    for estimate, state, row in zip(found, states, rows, strict=True):
        x, t = path.states[state, row].clone()[None], made.times[state]
        for j in range(5):
            at = torch.full((1,), t * (5 - j) / 5)
            x = x - t / 5 * (velocity(x, at) + prompts[row])
        torch.testing.assert_close(estimate, x[0], rtol=1e-5, atol=1e-5)


def prompted_all(x: Tensor, t: Tensor) -> Tensor:
    return velocity(x, t) + torch.arange(4.0)[:, None, None]
