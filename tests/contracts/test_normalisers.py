from learner.credit import NORMALISERS
from tests.contracts import uncovered
from tests.contracts.normaliser import NormaliserContract


class TestGroup(NormaliserContract):
    name = "group"


class TestGroupMeanBatchStd(NormaliserContract):
    name = "group_mean_batch_std"
    over_batch = True


class TestJoint(NormaliserContract):
    name = "joint"


class TestPerStep(NormaliserContract):
    name = "per_step"


def test_every_scope_is_under_contract() -> None:
    assert uncovered(NormaliserContract, NORMALISERS) == set()
