"""The supervised parts of a run: rollout workers and reward servers, behind one event loop."""

from dataclasses import dataclass
from typing import Any

from cluster.backend import Backend, ScaleCommand
from cluster.config import RunConfig
from cluster.events import Events
from cluster.pool import RolloutPool
from cluster.scoring import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What outlives a roll-back."""

    events: Events
    backend: Backend
    pool: RolloutPool
    scorer: Scorer

    def scale(self, command: ScaleCommand) -> None:
        """Do what `flowcredit scale` asked; the numbers were checked where they were asked (cluster.scale)."""
        if command.rollout_workers is not None:
            self.pool.crew.resize(command.rollout_workers)
        for reward, replicas in (command.replicas or {}).items():
            self.scorer.resize(reward, replicas)

    def abandon(self) -> None:
        """Forget all work that is under way: the run goes back to a checkpoint."""
        self.pool.abandon()
        self.scorer.abandon()
        self.events.forget_unsupervised()

    def status(self) -> dict[str, Any]:
        """Return how many of each part there are, and what was lost so far."""
        workers, crews = self.pool.crew, self.scorer.crews
        return {
            "rollout_workers": {"target": workers.target, "ready": len(workers.ready)},
            "reward_servers": {
                name: {"target": crew.target, "ready": len(crew.ready)}
                for name, crew in crews.items()
            },
            "lost": {
                "rollout_workers": workers.num_lost,
                "reward_servers": sum(crew.num_lost for crew in crews.values()),
            },
            "quarantined": workers.num_quarantined
            + sum(crew.num_quarantined for crew in crews.values()),
            "reissued_calls": self.pool.num_reissued,
            "slow_calls": self.pool.num_slow,
        }


def make_fleet(config: RunConfig, backend: Backend) -> Fleet:
    """Return a fleet without members."""
    events = Events(backend, config.faults.learner_timeout_s)
    return Fleet(
        events=events,
        backend=backend,
        pool=RolloutPool(events, backend, config.faults),
        scorer=Scorer(events, backend, config.rewards, config.faults),
    )


def start_fleet(config: RunConfig, fleet: Fleet, *, with_rewards: bool = True) -> None:
    """Start the config's members and return when work can begin; those beyond the minimum join when they are ready.

    ValueError of an actor that cannot start, when none of its kind could.
    """
    fleet.pool.crew.resize(config.rollout.workers.start)
    crews = list(fleet.scorer.crews.values()) if with_rewards else []
    for reward in config.rewards.components if with_rewards else []:
        fleet.scorer.resize(reward.name, reward.replicas)
    fleet.events.until(
        lambda: (
            len(fleet.pool.crew.ready) >= config.rollout.workers.min
            and all(crew.ready for crew in crews)
        )
    )
    fleet.scorer.learn_columns()
