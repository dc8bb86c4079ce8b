"""Which steps of a trajectory are noisy and trained, which states are scored, and what that costs.

Imports no torch at the top, so that recorded trajectories can be read without it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from rollout.config import SamplingConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """How every trajectory of a run is made: T transitions, T + 1 states (state 0 is pure noise,
    state T the image).

    Numbers are Python floats (float64), so that a plan is JSON, compares with ==, and cannot
    change.
    """

    times: tuple[float, ...]
    """[T + 1], from 1 to 0."""
    noise_coefficient: tuple[float, ...]
    """[T], k of each transition: the factor of the predicted noise in its mean."""
    std: tuple[float, ...]
    """[T]; 0 makes a transition deterministic, without log-prob."""
    trained: tuple[bool, ...]
    """[T]; std reaches min_std, and the step is one of SamplingConfig.train_steps."""
    scored: tuple[int, ...]
    """States whose clean estimate is scored, rising; T is the last one."""
    num_substeps: int
    """T', Euler substeps of a clean estimate; 1 is Tweedie's."""
    kernel: str
    eta: float
    first_step: str
    min_std: float
    guidance_scale: float
    shared_initial_noise: bool

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.std)


def make_plan(
    sampling: SamplingConfig,
    times: "Iterable[float] | Tensor",
    credit_scored_states: Literal["all", "trained", "final"],
) -> StepPlan:
    """Lay out `sampling` over the family's `times` [T + 1] (floats or a tensor).

    credit_scored_states is what the credit rule needs; it decides when sampling.scored_states is
    "auto". Raises ValueError when a step or state is out of range, state T isn't scored, no step
    can be trained, or the kernel refuses its settings.
    """
    from rollout.flow.kernels import make_kernel

    grid = tuple(float(t) for t in times)
    num_steps = sampling.num_steps
    assert len(grid) == num_steps + 1, f"{len(grid)} times for {num_steps} steps"
    kernel = make_kernel(sampling.kernel, sampling.eta, sampling.first_step, grid[1])
    coefficients = [kernel.coefficients(t, t_next) for t, t_next in pairwise(grid)]
    std = tuple(c.std for c in coefficients)
    allowed = _train_steps(sampling)
    trained = tuple(s >= sampling.min_std and i in allowed for i, s in enumerate(std))
    if not any(trained):
        largest = max(std[i] for i in allowed)
        raise ValueError(
            f"no step can be trained: kernel = {sampling.kernel!r} with eta = {sampling.eta} "
            f"reaches std {largest:.4g} at most on train_steps {sorted(allowed)}, "
            f"min_std is {sampling.min_std}"
        )
    return StepPlan(
        times=grid,
        noise_coefficient=tuple(c.noise for c in coefficients),
        std=std,
        trained=trained,
        scored=_scored_states(sampling, credit_scored_states, trained),
        num_substeps=sampling.num_substeps,
        kernel=sampling.kernel,
        eta=sampling.eta,
        first_step=sampling.first_step,
        min_std=sampling.min_std,
        guidance_scale=sampling.guidance_scale,
        shared_initial_noise=sampling.shared_initial_noise,
    )


def ode_plan(times: "Iterable[float] | Tensor", guidance_scale: float = 1.0) -> StepPlan:
    """Lay out deterministic sampling over `times` [T + 1]: nothing is trained, only the image is
    scored."""
    grid = tuple(float(t) for t in times)
    num_steps = len(grid) - 1
    return StepPlan(
        times=grid,
        noise_coefficient=grid[1:],
        std=(0.0,) * num_steps,
        trained=(False,) * num_steps,
        scored=(num_steps,),
        num_substeps=1,
        kernel="ode",
        eta=0.0,
        first_step="clamp",
        min_std=0.0,
        guidance_scale=guidance_scale,
        shared_initial_noise=False,
    )


def network_calls_per_group(plan: StepPlan, num_samples: int, num_slices: int = 1) -> int:
    """Count the latents that go through the network for one group of N samples in `num_slices`
    slices, exactly.

    Each trajectory takes T velocities; a shared x_T's is computed once a slice. A refined estimate
    (T' > 1) takes T' - 1 more at each scored state with t > 0, at a shared x_T once a group.
    Guidance doubles everything.
    """
    first = num_slices if plan.shared_initial_noise else num_samples
    calls = first + (plan.num_steps - 1) * num_samples
    refined = scored_images_per_group(plan, num_samples) - num_samples
    calls += (plan.num_substeps - 1) * refined
    return calls * (1 if plan.guidance_scale == 1.0 else 2)


def scored_images_per_group(plan: StepPlan, num_samples: int) -> int:
    """Count the previews of one group of N samples, exactly: N for each scored state, one for a
    shared x_T."""
    shared = plan.shared_initial_noise and 0 in plan.scored
    return len(plan.scored) * num_samples - (num_samples - 1 if shared else 0)


def _train_steps(sampling: SamplingConfig) -> set[int]:
    steps = sampling.train_steps
    last = sampling.num_steps - 1
    if steps is None:
        return set(range(last + 1))
    if not steps:
        raise ValueError(f"train_steps is empty; name steps within 0 .. {last}, or leave it out")
    wrong = [step for step in steps if not 0 <= step <= last]
    if wrong:
        raise ValueError(
            f"train_steps = {steps}: {wrong[0]} is not within 0 .. {last} "
            f"(num_steps = {sampling.num_steps})"
        )
    return set(steps)


def _scored_states(
    sampling: SamplingConfig, credit_scored_states: str, trained: tuple[bool, ...]
) -> tuple[int, ...]:
    last = sampling.num_steps
    chosen = sampling.scored_states
    if chosen == "auto":
        chosen = credit_scored_states
    if chosen == "all":
        return tuple(range(last + 1))
    if chosen == "trained":
        steps = [step for step, is_trained in enumerate(trained) if is_trained]
        chosen = [*steps, *(step + 1 for step in steps), last]
    if chosen == "final":
        return (last,)
    assert not isinstance(chosen, str), chosen
    states = sorted(set(chosen))
    wrong = [state for state in states if not 0 <= state <= last]
    if wrong:
        raise ValueError(
            f"scored_states = {chosen}: {wrong[0]} is not within 0 .. {last} (num_steps = {last})"
        )
    if last not in states:
        raise ValueError(
            f"scored_states = {chosen} must contain {last}, the image (num_steps = {last}): "
            "every credit rule needs the outcome"
        )
    return tuple(states)
