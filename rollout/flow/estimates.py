"""Estimates of the clean latent and of the noise from a state and its velocity.

Convention (docs/papers.md section 0): x_t = (1 - t) x_0 + t x_1, v = dx_t/dt = x_1 - x_0.
"""

from collections.abc import Callable

from torch import Tensor

from rollout.flow.tensors import double, expand, working_dtype

VelocityFn = Callable[[Tensor, Tensor], Tensor]
"""(x [B, ...], t [B]) -> v [B, ...]"""


def clean_estimate(x_t: Tensor, v_t: Tensor, t: float | Tensor) -> Tensor:
    """Tweedie's clean estimate x0_hat(t) = x_t - t v_t (docs/papers.md section 0).

    x_t, v_t [B, ...] of any float dtype; t a float or [B]. Returns [B, ...] in the promoted dtype,
    float32 or better. An item with t = 0 gives x_t back (its velocity must be finite).
    """
    x_t, v_t = _promoted(x_t, v_t)
    return x_t - expand(t, x_t) * v_t


def noise_estimate(x_t: Tensor, v_t: Tensor, t: float | Tensor) -> Tensor:
    """The predicted noise x1_hat(t) = x_t + (1 - t) v_t (docs/papers.md section 0).

    Shapes and dtypes as in `clean_estimate`.
    """
    x_t, v_t = _promoted(x_t, v_t)
    return x_t + expand(1 - double(t), x_t) * v_t


def refined_estimate(
    velocity_fn: VelocityFn, x_t: Tensor, v_t: Tensor, t: Tensor, num_substeps: int
) -> Tensor:
    """The clean estimate of T' = num_substeps Euler substeps, uniform from t to 0 for each item.

        x <- x - (t / T') v(x, t_j),   t_j = t (T' - j) / T',   j = 0 .. T' - 1

    Source: docs/papers.md section 1; the grid inside [t, 0] isn't stated there, uniform is our
    choice. x_t, v_t [B, ...] and t [B] (items may differ in t). The first substep reuses v_t =
    v(x_t, t), so `velocity_fn` is called T' - 1 times, with x in the promoted dtype and times in
    t's dtype; T' = 1 is Tweedie's estimate. Items with t = 0 give x_t back. Returns [B, ...] in the
    promoted dtype.

    Raises ValueError when num_substeps < 1.
    """
    if num_substeps < 1:
        raise ValueError(f"num_substeps = {num_substeps} must be >= 1")
    x, v = _promoted(x_t, v_t)
    stride = expand(double(t) / num_substeps, x)
    for remaining in range(num_substeps, 0, -1):
        if remaining < num_substeps:
            v = velocity_fn(x, t * (remaining / num_substeps)).to(x.dtype)
        x = x - stride * v
    return x


def _promoted(x_t: Tensor, v_t: Tensor) -> tuple[Tensor, Tensor]:
    assert x_t.shape == v_t.shape, f"{tuple(x_t.shape)} and {tuple(v_t.shape)} differ"
    dtype = working_dtype(x_t, v_t)
    return x_t.to(dtype), v_t.to(dtype)
