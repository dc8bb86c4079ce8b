"""Golden vectors of Flow-GRPO's step and log-prob.

The formula is the one of its `sde_step_with_logprob` as docs/papers.md section 2 quotes it, written
here in numpy float64, independent of rollout.flow. `python -m tests.golden.flow_grpo` rewrites
flow_grpo.json, next to this file, from inputs that are stored in it.
"""

import json
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("flow_grpo.json")
NOISE_LEVEL = 0.7
NUM_STEPS, SHIFT = 10, 3.0
FIRST_MIDDLE_LAST = (0, 5, 9)


def sigmas() -> np.ndarray:
    """The ten-step schedule of shift 3."""
    smallest = SHIFT * 0.001 / (1 + (SHIFT - 1) * 0.001)
    u = np.linspace(1, smallest, NUM_STEPS)
    return np.append(SHIFT * u / (1 + (SHIFT - 1) * u), 0.0)


def flow_grpo_step(
    x: np.ndarray, v: np.ndarray, eps: np.ndarray, i: int
) -> tuple[np.ndarray, float, np.ndarray, float]:
    """Mean, std, next state and log-prob of one item at step i."""
    grid = sigmas()
    sigma, dt = grid[i], grid[i + 1] - grid[i]
    std_dev_t = np.sqrt(sigma / (1 - np.where(sigma == 1, grid[1], sigma))) * NOISE_LEVEL
    mean = (
        x * (1 + std_dev_t**2 / (2 * sigma) * dt)
        + v * (1 + std_dev_t**2 * (1 - sigma) / (2 * sigma)) * dt
    )
    std = std_dev_t * np.sqrt(-dt)
    x_next = mean + std * eps
    per_dimension = (
        -((x_next - mean) ** 2) / (2 * std**2) - np.log(std) - np.log(np.sqrt(2 * np.pi))
    )
    return mean, float(std), x_next, float(per_dimension.mean())


def generate() -> dict[str, object]:
    """The golden file's content; x, v and eps are short decimals."""
    generator = np.random.default_rng(2025)
    cases: list[dict[str, object]] = []
    for i in FIRST_MIDDLE_LAST:
        x, v, eps = np.round(generator.standard_normal((3, 2, 3)), 3)
        mean, std, x_next, log_prob = flow_grpo_step(x, v, eps, i)
        arrays = {"x": x, "v": v, "eps": eps, "mean": mean, "x_next": x_next}
        scalars = {"step": i, "t": sigmas()[i], "t_next": sigmas()[i + 1], "std": std}
        cases.append(
            scalars | {name: a.tolist() for name, a in arrays.items()} | {"log_prob": log_prob}
        )
    return {
        "generated_by": "tests/golden/flow_grpo.py:generate",
        "source": "docs/papers.md section 2, [C]: Flow-GRPO's sde_step_with_logprob, float64",
        "noise_level": NOISE_LEVEL,
        "second_time": sigmas()[1],
        "cases": cases,
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(generate(), indent=1) + "\n")
