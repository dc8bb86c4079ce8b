"""Versions of the policy's weights, and the handshake that proves a worker really holds one.

A worker answers a push with (version, checksum of the tensors that its module now computes with). A mismatch is
retried once; then the worker is quarantined. If no worker is left, the run stops: elsewhere,
runs have trained for weeks on weights that had never arrived.
"""

import logging

from cluster.backend import WeightsAnswer
from rollout.records import WeightReport

log = logging.getLogger(__name__)

EVALUATION_VERSION = -1
"""What a worker reports while it holds averaged weights for an evaluation, which no group is sampled with."""


class WeightStore:
    """The last k + 1 published versions; older ones are forgotten, which frees their objects."""

    def __init__(self, max_policy_lag: int):
        self._keep = max_policy_lag + 1
        self._versions: dict[int, WeightsAnswer] = {}

    @property
    def latest(self) -> int:
        """The newest published version."""
        return max(self._versions)

    def publish(self, answer: WeightsAnswer) -> None:
        """Add a version, which must be the next one, and forget the oldest beyond k + 1."""
        assert not self._versions or answer.version == self.latest + 1
        self._versions[answer.version] = answer
        for version in sorted(self._versions)[: -self._keep]:
            del self._versions[version]

    def has(self, version: int) -> bool:
        """Whether the version is published and kept."""
        return version in self._versions

    def get(self, version: int) -> WeightsAnswer:
        """Return a kept version."""
        return self._versions[version]


class WeightsNeverArrived(RuntimeError):
    """No worker holds the published weights, although all were sent them twice."""


class WorkerTable:
    """What the controller knows of each rollout worker: its version, its calls, its failed handshakes."""

    def __init__(self, worker_ids: list[int]):
        self.version: dict[int, int | None] = {worker: None for worker in worker_ids}
        """Proven version; None before the first handshake and while one is under way."""
        self.calls: dict[int, int] = {worker: 0 for worker in worker_ids}
        self.loading: set[int] = set()
        self.quarantined: set[int] = set()
        self._mismatches: dict[int, int] = {worker: 0 for worker in worker_ids}

    def usable(self) -> list[int]:
        """Workers that take calls, the least busy first."""
        return sorted(
            (w for w in self.version if w not in self.quarantined), key=lambda w: self.calls[w]
        )

    def sent(self, worker: int) -> None:
        """A push is under way: the worker takes no call until it has answered."""
        self.loading.add(worker)
        self.version[worker] = None

    def answered(self, worker: int, report: WeightReport, wanted: WeightsAnswer) -> bool:
        """Check an answer to a push; False on a mismatch. Raises WeightsNeverArrived when no worker is left."""
        self.loading.discard(worker)
        if (report.version, report.checksum) == (wanted.version, wanted.checksum):
            self.version[worker], self._mismatches[worker] = report.version, 0
            return True
        self._mismatches[worker] += 1
        log.warning(
            "rollout worker %d holds %s after a push of version %d (checksum %s)",
            worker, report, wanted.version, wanted.checksum,
        )  # fmt: skip
        if self._mismatches[worker] > 1:
            self.quarantined.add(worker)
            if not self.usable():
                raise WeightsNeverArrived(
                    f"no rollout worker holds policy version {wanted.version}: the last one answered {report}, "
                    f"but the learner's checksum is {wanted.checksum}. The adapter may have bound to other "
                    "modules (compare learner.lora_targets), or code or model differ between the machines."
                )
        return False
