"""A credit rule and a normaliser, composed."""

from dataclasses import dataclass

from torch import Tensor

from learner.credit.base import CreditRule, ScoredStates
from learner.credit.normaliser import Advantages, normalise


@dataclass(frozen=True)
class CreditAssigner:
    """From the rewards of a batch to the advantages of its transitions."""

    rule: CreditRule
    normaliser: str
    """Name of the scope of mean and std."""
    eps: float
    clip: float
    """inf leaves the advantages as they are."""

    @property
    def scored_states(self) -> ScoredStates:
        """States that the rule wants scored when the user leaves the choice to it."""
        return self.rule.scored_states

    def assign(self, reward_values: Tensor, trained: Tensor) -> Advantages:
        """Advantages [G, N, T] of rewards [G, N, T+1] (NaN where a state was not scored).

        trained: bool [T] or [G, N, T], the transitions that the loss uses. All groups of the batch
        must be given together (a scope may reach over the batch). Computed in float64.

        Raises ValueError as the rule and `normalise` do.
        """
        return normalise(
            self.rule(reward_values.double()), trained, self.normaliser, self.eps, self.clip
        )
