"""The line of metrics.jsonl that one iteration leaves behind (docs/formats.md)."""

from typing import Any

import numpy as np

from cluster.iteration import IterationRecord
from rollout.trajectory import read_group


def metrics_row(record: IterationRecord, policy_lag: int, elapsed_s: float) -> dict[str, Any]:
    """Return the line that metrics.jsonl holds for one iteration (docs/formats.md)."""
    learned, sampled = record.learner_stats, record.rollout_stats
    groups = [read_group(batch) for batch in record.batches]
    finals = np.concatenate([group.rewards[:, -1] for group in groups])
    parts = {
        name: np.concatenate([g.parts[name][:, -1] for g in groups]) for name in groups[0].parts
    }
    return {
        "iteration": record.iteration,
        "policy_version": groups[0].policy_version,
        "group_ids": [group.group_id for group in groups],
        "policy_lag": policy_lag,
        "elapsed_s": elapsed_s,
        "counts": {
            "images": sampled.num_images,
            "transitions": sampled.num_transitions,
            "network_calls": sampled.num_network_calls + learned.num_network_calls,
            "reward_calls": record.num_scored,
            "dropped_groups": record.num_dropped,
            "reward_failures": record.failures,
        },
        "seconds": record.seconds,
        "worker_seconds": {
            name.removesuffix("_s"): getattr(sampled, name)
            for name in ("encode_s", "sample_s", "estimate_s", "decode_s", "record_s")
        },
        "learner_seconds": learned.seconds,
        "push_s": record.push_s,
        "weight_bytes": record.weight_bytes,
        "images_per_s": sampled.num_images / record.seconds["total"],
        "reward": {
            "mean": float(finals.mean()),
            "std": float(finals.std()),
            "parts": {name: float(values.mean()) for name, values in parts.items()},
        },
        "gain_per_step": learned.gain_per_step,
        "abs_advantage_per_step": learned.abs_advantage_per_step,
        "zero_variance_frac": learned.zero_variance_frac,
        "loss": learned.loss,
        "kl": learned.kl,
        "clipped_frac": learned.clipped_frac,
        "truncated_frac": learned.truncated_frac,
        "max_abs_log_ratio": learned.max_abs_log_ratio,
        "grad_norm": float(np.mean(learned.grad_norm)),
    }
