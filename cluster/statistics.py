"""Means with bootstrap intervals. Lines that share a prompt are resampled together.

Two images of one prompt are not independent, so the unit that is drawn again is the prompt (a
cluster of lines), not the line. One resample draws as many prompts as there are, with replacement,
and takes the mean over all of their lines. The interval is Hesterberg's *expanded* percentile
interval ("What Teachers Should Know About the Bootstrap", 2015): with n clusters a plain percentile
interval is too narrow by about sqrt(n / (n - 1)) * t / z, so its two percentiles are moved outwards
by that factor. At 200 prompts this changes nothing visible; at the 8 prompts of a small category a
95 % interval covers the truth in 94 % of simulated normal cases where the plain one does in 88 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

DRAWS_PER_CHUNK = 2_000_000
"""Random indices held in memory at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and the ends of its interval."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """The three numbers as summary.json holds them."""
        return {"mean": self.mean, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interval(
    values: Sequence[float] | np.ndarray,
    prompts: Sequence[str],
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """The mean of `values` [n] with its interval; `prompts` [n] names each line's cluster.

    With a single prompt there is nothing to choose between, so its lines are drawn instead: that
    interval speaks about noise alone.
    """
    sums, counts = _clusters(values, prompts)
    means = _resampled_means(sums, counts, num_resamples, np.random.default_rng(seed))
    return _expanded_percentile(float(sums.sum() / counts.sum()), means, len(sums), level)


def paired_interval(
    before: Sequence[float] | np.ndarray,
    after: Sequence[float] | np.ndarray,
    prompts: Sequence[str],
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """The mean of `after - before`: both [n], same prompts and same noise in the same order."""
    before, after = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if before.shape != after.shape:
        raise ValueError(
            f"pairs need equally many values, got before {before.shape} and after {after.shape}"
        )
    return interval(after - before, prompts, level=level, num_resamples=num_resamples, seed=seed)


def unpaired_interval(
    before: Sequence[float] | np.ndarray,
    before_prompts: Sequence[str],
    after: Sequence[float] | np.ndarray,
    after_prompts: Sequence[str],
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """The difference of two means whose lines have nothing to do with each other."""
    rng = np.random.default_rng(seed)
    first, second = _clusters(before, before_prompts), _clusters(after, after_prompts)
    difference = float(second[0].sum() / second[1].sum() - first[0].sum() / first[1].sum())
    means = _resampled_means(*second, num_resamples, rng) - _resampled_means(
        *first, num_resamples, rng
    )
    return _expanded_percentile(difference, means, min(len(first[0]), len(second[0])), level)


def by_category(
    values: Sequence[float] | np.ndarray,
    tags: Sequence[str],
    prompts: Sequence[str],
    *,
    level: float = 0.95,
    num_resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Estimate]:
    """`interval` within every tag, in order of first appearance."""
    values, names = np.asarray(values, dtype=np.float64), np.asarray(tags, dtype=object)
    if len(names) != len(values) or len(prompts) != len(values):
        raise ValueError(
            f"got {len(values)} values, {len(names)} tags and {len(prompts)} prompts; "
            "each line has one of each"
        )
    estimates = {}
    for tag in dict.fromkeys(tags):
        chosen = np.flatnonzero(names == tag)
        estimates[tag] = interval(
            values[chosen],
            [prompts[int(line)] for line in chosen],
            level=level,
            num_resamples=num_resamples,
            seed=seed,
        )
    return estimates


def _clusters(
    values: Sequence[float] | np.ndarray, prompts: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Sum [C] and number [C] of each prompt's values; of each line's where there is one prompt."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"a mean needs a non-empty list of numbers, got shape {values.shape}")
    if len(prompts) != len(values):
        raise ValueError(
            f"got {len(values)} values and {len(prompts)} prompts; each value needs its prompt"
        )
    if not np.isfinite(values).all():
        line = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(
            f"value {values[line]} on line {line} (prompt {prompts[line]!r}) is not finite"
        )
    _, cluster_of = np.unique(np.asarray(prompts, dtype=str), return_inverse=True)
    if cluster_of.max() == 0:
        cluster_of = np.arange(len(values))
    return np.bincount(cluster_of, weights=values), np.bincount(cluster_of).astype(np.float64)


def _resampled_means(
    sums: np.ndarray, counts: np.ndarray, num_resamples: int, rng: np.random.Generator
) -> np.ndarray:
    """Means [num_resamples] over lines; each draws as many clusters as there are, with repeats."""
    num_clusters = len(sums)
    rows_per_chunk = max(1, DRAWS_PER_CHUNK // num_clusters)
    means = np.empty(num_resamples)
    for start in range(0, num_resamples, rows_per_chunk):
        rows = slice(start, min(start + rows_per_chunk, num_resamples))
        shape = (rows.stop - rows.start, num_clusters)
        drawn = rng.integers(num_clusters, size=shape, dtype=np.int32)
        means[rows] = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return means


def _expanded_percentile(
    mean: float, means: np.ndarray, num_clusters: int, level: float
) -> Estimate:
    if not 0 < level < 1:
        raise ValueError(f"level = {level} must lie between 0 and 1, for example 0.95")
    if np.ptp(means) <= 1e-12 * max(1.0, abs(mean)):  # constant values: no width from rounding
        return Estimate(mean=mean, low=mean, high=mean)
    widening = math.sqrt(num_clusters / (num_clusters - 1))
    quantile = widening * stats.t.ppf((1 + level) / 2, num_clusters - 1)
    tail = float(stats.norm.cdf(-quantile))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(mean=mean, low=float(low), high=float(high))
