from rollout.flow.kernels import KERNELS
from tests.contracts import uncovered
from tests.contracts.kernel import KernelContract


class NoiseShareContract(KernelContract):
    """Kernels whose std is a share of t', so that the last transition is without noise."""

    def is_deterministic(self, t: float, t_next: float) -> bool:
        return t_next == 0


class TestOde(KernelContract):
    name = "ode"

    def is_deterministic(self, t: float, t_next: float) -> bool:
        return True


class TestFlowSde(KernelContract):
    name = "flow_sde"
    may_overshoot = True


class TestDanceSde(KernelContract):
    name = "dance_sde"
    may_overshoot = True


class TestCps(NoiseShareContract):
    name = "cps"


class TestDdimSde(NoiseShareContract):
    name = "ddim_sde"


class TestDdimSdeLiteral(NoiseShareContract):
    name = "ddim_sde"
    first_step = "literal"

    def is_deterministic(self, t: float, t_next: float) -> bool:
        return t == 1 or t_next == 0


class TestPrecise(NoiseShareContract):
    name = "precise"


def test_every_kernel_is_under_contract() -> None:
    assert uncovered(KernelContract, KERNELS) == set()
