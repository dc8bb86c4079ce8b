"""The versions of the policy's weights that a run may still need. How a worker proves one: `cluster.pool`."""

from cluster.backend import WeightsAnswer

EVALUATION_VERSION = -1
"""What a worker reports while it holds averaged weights for an evaluation, which no group is sampled with."""


class WeightStore:
    """The last k + 1 published versions; older ones are forgotten, which frees their objects."""

    def __init__(self, max_policy_lag: int):
        self._keep = max_policy_lag + 1
        self._versions: dict[int, WeightsAnswer] = {}

    @property
    def latest(self) -> int:
        """The newest published version; -1 before the first."""
        return max(self._versions, default=-1)

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

    def older(self) -> list[WeightsAnswer]:
        """Return the kept versions but the newest, in order: what a checkpoint needs beside the learner's own."""
        return [self._versions[version] for version in sorted(self._versions)[:-1]]
