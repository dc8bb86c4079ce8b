"""Times of a trajectory's states."""

import torch
from torch import Tensor


def shifted_times(num_steps: int, shift: float, num_train_timesteps: int = 1000) -> Tensor:
    """The T + 1 times of a trajectory of T = num_steps transitions, float64 [T+1], from 1 to 0.

        u_i = linspace(1, t_min, T),   t_i = shift u_i / (1 + (shift - 1) u_i),   t_T = 0
        t_min = shift / (num_train_timesteps + shift - 1)

    Source: docs/papers.md section 0 (SD3.5-M's ten numbers at T = 10, shift 3). Note that t_min is
    already shifted and is shifted again. Cast to float32 the result equals, to the bit, the sigmas
    of diffusers' FlowMatchEulerDiscreteScheduler(shift=shift).set_timesteps(num_steps): so t_min is
    rounded through float32 and the grid is laid in units of train timesteps, as it does.

    Raises ValueError when num_steps < 1, shift <= 0 or num_train_timesteps < 1.
    """
    if num_steps < 1 or num_train_timesteps < 1:
        raise ValueError(
            f"num_steps = {num_steps} and num_train_timesteps = {num_train_timesteps} must be >= 1"
        )
    if not shift > 0:
        raise ValueError(f"shift = {shift} must be > 0")
    smallest = torch.tensor(1.0, dtype=torch.float32) / num_train_timesteps
    t_min = (shift * smallest / (1 + (shift - 1) * smallest)).item()
    first, last = float(num_train_timesteps), t_min * num_train_timesteps
    stride = (last - first) / max(num_steps - 1, 1)
    grid = torch.arange(num_steps, dtype=torch.float64) * stride + first
    if num_steps > 1:
        grid[-1] = last
    u = grid / num_train_timesteps
    return torch.cat([shift * u / (1 + (shift - 1) * u), torch.zeros(1, dtype=torch.float64)])
