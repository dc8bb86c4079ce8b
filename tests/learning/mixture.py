"""A two-dimensional world in which everything is known: data from a mixture of three Gaussians, the
reward -x/2 + 3 of the point's first coordinate.

The reference policy is the mixture's exact velocity, the trained one adds a small network to it.
With the reward linear, the KL-regularised optimum p_ref exp(r / beta) is again a mixture of
Gaussians:

    means   m_j - (S^2 / (2 beta)) e_x      weights   w_j exp(-m_jx / (2 beta)), normalised
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from learner.credit import CreditAssigner
from learner.objective import PpoClip
from rollout.flow import (
    clean_estimate,
    kl_exact,
    log_prob,
    make_kernel,
    shifted_times,
    step,
    step_mean,
)

MEANS = torch.tensor([[-0.8, 0.0], [0.6, 0.8], [0.6, -0.8]])
WEIGHTS = torch.tensor([0.3, 0.4, 0.3])
STD = 0.5
GROUPS, SAMPLES = 8, 64


def reward(x: Tensor) -> Tensor:
    """[..., 2] -> [...]"""
    return 3 - x[..., 0] / 2


def optimal_mean_reward(beta: float) -> float:
    """E[r] under p_ref exp(r / beta); beta = inf gives p_ref's."""
    weights = (WEIGHTS.log() - MEANS[:, 0] / (2 * beta)).softmax(0)
    means = MEANS[:, 0] - STD**2 / (2 * beta)
    return float(3 - (weights * means).sum() / 2)


def reference_velocity(x: Tensor, t: Tensor) -> Tensor:
    """(x - E[x_0 | x_t = x]) / t, by the posterior of the component and of the point in it."""
    t = t[:, None]
    variance = (1 - t) ** 2 * STD**2 + t**2
    gap = x[:, None] - (1 - t)[..., None] * MEANS
    component = (WEIGHTS.log() - gap.square().sum(-1) / (2 * variance)).softmax(-1)
    point = MEANS + ((1 - t) * STD**2 / variance)[..., None] * gap
    return (x - (component[..., None] * point).sum(1)) / t


class Policy(nn.Module):
    """reference_velocity plus a network that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(64, 2)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.net = nn.Sequential(nn.Linear(5, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), last)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        features = torch.stack([t, (3 * t).sin(), (3 * t).cos()], dim=1)
        return reference_velocity(x, t) + self.net(torch.cat([x, features], dim=1))


@dataclass(frozen=True)
class Transitions:
    """The trained transitions of one batch, flattened: [M, 2] and [M]."""

    x: Tensor
    x_next: Tensor
    t: Tensor
    t_next: Tensor
    noise_coefficient: Tensor
    std: Tensor

    def mean(self, velocity) -> Tensor:
        v = velocity(self.x, self.t.float())
        return step_mean(self.x, v, self.t, self.t_next, self.noise_coefficient)


@dataclass(frozen=True)
class Trainer:
    """On-policy iterations of rollout, credit and PPO with KL, by the project's own pure
    functions."""

    kernel: str
    eta: float
    credit: CreditAssigner
    beta: float
    num_steps: int = 10
    min_std: float = 0.02

    def train(self, policy: Policy, num_iterations: int, lr: float = 2e-3) -> list[float]:
        """Mean reward of the images of each iteration."""
        optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
        history: list[float] = []
        for iteration in range(num_iterations):
            if iteration == int(0.6 * num_iterations):
                optimizer.param_groups[0]["lr"] = lr / 5
            batch, advantage, mean_reward = self.sample(policy)
            history.append(mean_reward)
            self.update(policy, optimizer, batch, advantage)
        return history

    @torch.no_grad()
    def sample(self, policy: Policy) -> tuple[Transitions, Tensor, float]:
        times = shifted_times(self.num_steps, 1.0).tolist()
        kernel = make_kernel(self.kernel, self.eta, "clamp", times[1])
        x = torch.randn(GROUPS, 1, 2).repeat(1, SAMPLES, 1).flatten(0, 1)
        states, rewards, scalars = [x], [], []
        for t, t_next in pairwise(times):
            v = policy(x, torch.full((len(x),), t))
            rewards.append(reward(clean_estimate(x, v, t)))
            c = kernel.coefficients(t, t_next)
            x = step(step_mean(x, v, t, t_next, c.noise), c.std, torch.randn_like(x))
            states.append(x)
            scalars.append((t, t_next, c.noise, c.std))
        rewards.append(reward(x))
        table = torch.tensor(scalars, dtype=torch.float64)
        trained = table[:, 3] >= self.min_std
        shaped = torch.stack(rewards, dim=-1).reshape(GROUPS, SAMPLES, -1)
        advantage = self.credit.assign(shaped, trained).values.flatten(0, 1).T[trained]
        columns = table[trained].repeat_interleave(len(x), dim=0).T
        before, after = torch.stack(states[:-1])[trained], torch.stack(states[1:])[trained]
        batch = Transitions(before.flatten(0, 1), after.flatten(0, 1), *columns)
        return batch, advantage.flatten().float(), float(shaped[..., -1].mean())

    def update(
        self, policy: Policy, optimizer: torch.optim.Optimizer, batch: Transitions, adv: Tensor
    ) -> None:
        """Two optimizer steps over all of the batch, each within the clip of the sampling
        policy."""
        with torch.no_grad():
            mean_ref = batch.mean(reference_velocity)
            old = log_prob(batch.x_next, batch.mean(policy), batch.std)
        for _ in range(2):
            mean = batch.mean(policy)
            output = PpoClip(0.2)(log_prob(batch.x_next, mean, batch.std), old, adv)
            loss = output.loss + self.beta * kl_exact(mean, mean_ref, batch.std)
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()


MEMORYLESS_ETA = math.sqrt(2)
"""Flow-SDE's a at which x_0 doesn't depend on x_T: only then is p_ref exp(r / beta) what maximising
E[r] - beta KL(paths) gives, since no policy can tilt x_T itself."""
