"""Learning, with our kernels, credit and objective, towards an optimum known in closed form."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from learner.config import CreditConfig
from learner.credit import make_credit
from tests.learning.mixture import MEMORYLESS_ETA, Policy, Trainer, optimal_mean_reward

pytestmark = pytest.mark.slow
BETA = 0.5


@pytest.fixture(autouse=True)
def one_thread_and_a_seed() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(num_threads)


def centred(raw: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """A scope that does not divide: beta then keeps the unit of the reward."""
    return raw.mean(dim=1, keepdim=True), torch.ones(1, 1, 1, dtype=raw.dtype)


@pytest.mark.parametrize("rule", ["outcome", "gain"])
def test_training_comes_near_the_kl_regularised_optimum(rule: str) -> None:
    """Mean reward ends within a quarter of the way from p_ref's mean reward to the optimum's.

    It can't be exact: ten Gaussian steps are not the continuous path, the last steps are untrained,
    GRPO's per-step KL leaves out what a step does to the KL of later ones, and Tweedie's estimate
    under the trained velocity is a biased value for the gains (measured: outcome ends some 12 %
    short, gain some 11 % beyond).
    """
    config = CreditConfig(rule=rule, normaliser=f"{__name__}:centred", eps=0, clip=math.inf)
    trainer = Trainer("flow_sde", MEMORYLESS_ETA, make_credit(config), BETA)
    history = trainer.train(Policy(), 120)
    start, optimum = optimal_mean_reward(math.inf), optimal_mean_reward(BETA)
    assert history[0] == pytest.approx(start, abs=0.06)
    end = sum(history[-20:]) / 20
    assert abs(end - optimum) < 0.25 * (optimum - start)


def test_zero_advantages_leave_the_policy_at_the_reference() -> None:
    """The KL's gradient is zero there too: not a bit of the network moves."""
    trainer = Trainer("flow_sde", 0.7, make_credit(CreditConfig()), BETA)
    policy = Policy()
    batch, advantage, _ = trainer.sample(policy)
    before = [p.clone() for p in policy.parameters()]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    trainer.update(policy, optimizer, batch, torch.zeros_like(advantage))
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kernel", "eta"),
    [("flow_sde", 0.7), ("dance_sde", 0.7), ("cps", 0.8), ("ddim_sde", 0.7), ("precise", 0.7)],
)
def test_the_default_credit_raises_the_reward_under_every_kernel(kernel: str, eta: float) -> None:
    """Gains, joint normalisation, clip 5, no KL: a rise of at least one std of the reward (.4)."""
    trainer = Trainer(kernel, eta, make_credit(CreditConfig()), beta=0.0)
    history = trainer.train(Policy(), 40)
    assert sum(history[-5:]) / 5 > history[0] + 0.4
