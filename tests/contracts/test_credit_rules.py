from typing import ClassVar

from learner.credit import CREDIT_RULES
from tests.contracts import uncovered
from tests.contracts.credit_rule import CreditRuleContract


class TestOutcome(CreditRuleContract):
    name = "outcome"


class TestGain(CreditRuleContract):
    name = "gain"


class TestGae(CreditRuleContract):
    name = "gae"
    settings: ClassVar = {"gae_lambda": 0.6}


def test_every_credit_rule_is_under_contract() -> None:
    assert uncovered(CreditRuleContract, CREDIT_RULES) == set()
