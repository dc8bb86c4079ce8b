import json

import pytest
import torch
from torch import Tensor

from rollout.flow.gaussian import log_prob
from rollout.flow.kernels import make_kernel, step, step_mean
from tests.golden import flow_grpo

GOLDEN = json.loads(flow_grpo.PATH.read_text())


def tensor(case, name: str) -> Tensor:
    return torch.tensor(case[name], dtype=torch.float64)[None]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"step{case['step']}")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_our_flow_sde_gives_flow_grpo_s_numbers(case, dtype: torch.dtype, tolerance: float) -> None:
    kernel = make_kernel("flow_sde", GOLDEN["noise_level"], "clamp", GOLDEN["second_time"])
    c = kernel.coefficients(case["t"], case["t_next"])
    assert c.std == pytest.approx(case["std"], rel=1e-12)
    x, v, eps = (tensor(case, name).to(dtype) for name in ("x", "v", "eps"))
    mean = step_mean(x, v, case["t"], case["t_next"], c.noise)
    x_next = step(mean, c.std, eps)
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(mean.double(), tensor(case, "mean"), **close)
    torch.testing.assert_close(x_next.double(), tensor(case, "x_next"), **close)
    # Float32 rounds x_next to 1 part in 1e7, which the last step's std of .006 enlarges.
    loose = 1e-10 if dtype is torch.float64 else 2e-4
    assert log_prob(x_next, mean, c.std).item() == pytest.approx(case["log_prob"], abs=loose)


def test_the_golden_file_is_what_its_generator_writes() -> None:
    again = flow_grpo.generate()
    assert again.keys() == GOLDEN.keys()
    for new, old in zip(again["cases"], GOLDEN["cases"], strict=True):  # type: ignore[arg-type]
        assert new.keys() == old.keys()
        for name in new:
            new_value = torch.tensor(new[name], dtype=torch.float64)
            old_value = torch.tensor(old[name], dtype=torch.float64)
            torch.testing.assert_close(new_value, old_value, atol=1e-14, rtol=1e-14)
