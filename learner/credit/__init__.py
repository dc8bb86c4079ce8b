"""Credit: rewards of states -> advantages of transitions. Pure maths; one small file per rule.

A new rule: one file with a class that satisfies `CreditRule`, and one line in CREDIT_RULES (or
`rule = "my.module:Class"` in the run's TOML). A new scope: one function, one line in NORMALISERS.
"""

from learner.config import CreditConfig
from learner.credit.assigner import CreditAssigner
from learner.credit.base import CreditRule, ScoredStates
from learner.credit.gae import Gae
from learner.credit.gain import Gain
from learner.credit.normaliser import NORMALISERS, Advantages, find_scope, normalise
from learner.credit.outcome import Outcome
from rollout.registry import load_object

CREDIT_RULES: dict[str, type[CreditRule]] = {"outcome": Outcome, "gain": Gain, "gae": Gae}


def make_credit(config: CreditConfig) -> CreditAssigner:
    """The rule and the normaliser that `config` names. Raises ValueError on an unknown name."""
    name = config.rule
    if ":" not in name and name not in CREDIT_RULES:
        raise ValueError(
            f"unknown credit rule {name!r}: choose from {sorted(CREDIT_RULES)} or 'my.module:Class'"
        )
    rule_class: type[CreditRule] = CREDIT_RULES[name] if name in CREDIT_RULES else load_object(name)
    find_scope(config.normaliser)
    return CreditAssigner(
        rule=rule_class.from_config(config),
        normaliser=config.normaliser,
        eps=config.eps,
        clip=config.clip,
    )


__all__ = [
    "CREDIT_RULES",
    "NORMALISERS",
    "Advantages",
    "CreditAssigner",
    "CreditRule",
    "Gae",
    "Gain",
    "Outcome",
    "ScoredStates",
    "find_scope",
    "make_credit",
    "normalise",
]
