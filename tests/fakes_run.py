"""A finished run folder with invented, deterministic numbers, as `docs/formats.md` describes it."""

from pathlib import Path
from typing import Any

import numpy as np

from cluster.evaluation_table import Columns, build_section
from cluster.pictures import trajectory_strip, write_evaluation_pictures
from cluster.run_folder import (
    CONFIG,
    ENVIRONMENT,
    METRICS,
    SUMMARY,
    append_jsonl,
    evaluation_lines,
    trajectory_picture,
    write_json,
    write_jsonl,
)

COLUMNS = Columns(graded="shapes", strict="shapes_strict")
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLOURS = ("red", "green", "blue", "yellow", "purple")
COUNTS = {"images": 256, "transitions": 1536, "network_calls": 12, "reward_calls": 5}


def lines(*, lift: float = 0.0, per_tag: int = 10, seed: int = 0) -> list[dict[str, Any]]:
    """Evaluation lines, two for each prompt; `lift` is added to every graded score."""
    rng = np.random.default_rng(seed)
    base = 0.3 + 0.4 * rng.random(len(TAGS) * per_tag)
    noise = np.random.default_rng(seed + 1000 + int(abs(lift) * 1e6)).normal(size=len(base)) * 0.02
    graded = np.clip(base + lift + (noise if lift else 0), 0, 1)
    return [
        {
            "index": index,
            "prompt": f"a photo of a {COLOURS[index // 2 % 5]} shape, number {index // 2}",
            "tag": TAGS[index // per_tag],
            "rewards": {"shapes": round(float(score), 6), "shapes_strict": float(score > 0.55)},
        }
        for index, score in enumerate(graded)
    ]


def iteration(number: int, *, num_steps: int = 6, gain: bool = True) -> dict[str, Any]:
    """One line of metrics.jsonl: the reward rises and saturates; an outcome run has no gains."""
    rng = np.random.default_rng(number)
    reward = 0.62 - 0.12 * float(np.exp(-number / 12)) + 0.006 * float(rng.normal())
    steps = np.arange(num_steps)
    gains = 0.03 * np.exp(-steps / 2.0) + 0.001 * rng.normal(size=num_steps)
    return {
        "iteration": number,
        "policy_version": number - 1,
        "policy_lag": 0,
        "elapsed_s": 5.0 * number + 3.0,
        "counts": {**COUNTS, "dropped_groups": 0, "reward_failures": {}},
        "seconds": {
            "rollout": 3.5,
            "learn": 1.3,
            "publish": 0.1,
            "total": 5.0,
        },
        "worker_seconds": {
            "encode": 0.0,
            "sample": 2.4,
            "estimate": 0.3,
            "decode": 0.4,
            "record": 0.1,
        },
        "learner_seconds": {"read": 0.1, "credit": 0.0, "accumulate": 1.1, "optimizer": 0.1},
        "push_s": 0.05,
        "weight_bytes": 200_000,
        "images_per_s": 51.2 + float(rng.normal()),
        "reward": {"mean": reward, "std": 0.2, "parts": {"shapes": reward, "shapes_strict": 0.4}},
        "gain_per_step": [float(value) for value in gains] if gain else [None] * num_steps,
        "abs_advantage_per_step": [float(value) for value in 0.5 + np.abs(gains)],
        "zero_variance_frac": 0.0,
        "loss": 1e-4 * float(rng.normal()),
        "kl": 0.0,
        "clipped_frac": 0.02 + 0.01 * float(rng.random()),
        "max_abs_log_ratio": 3e-3,
        "grad_norm": 0.05 + 0.02 * float(rng.random()),
    }


def images(count: int, *, seed: int = 0, size: int = 32) -> np.ndarray:
    """Coloured squares on grey, uint8 [count, size, size, 3]."""
    rng = np.random.default_rng(seed)
    pictures = np.full((count, size, size, 3), 230, dtype=np.uint8)
    for picture in pictures:
        x, y, side = rng.integers(2, size // 2, 3)
        picture[y : y + side, x : x + side] = rng.integers(0, 255, 3)
    return pictures


def build_run(
    run_dir: Path, *, num_iterations: int = 40, lift: float = 0.05, seed: int = 0, gain: bool = True
) -> Path:
    """Write the whole folder and return it."""
    run_dir.mkdir(parents=True)
    (run_dir / CONFIG).write_text(
        f'[run]\nname = "fake"\nseed = {seed}\n\n[evaluation]\n'
        'graded = "shapes"\nstrict = "shapes_strict"\n'
    )
    write_json(run_dir / ENVIRONMENT, {"python": "3.11.2", "torch": "2.13.0+cpu", "num_cpus": 2})
    for number in range(1, num_iterations + 1):
        append_jsonl(run_dir / METRICS, iteration(number, gain=gain))
    before, after = lines(), lines(lift=lift + 0.001 * seed)
    shown = range(0, len(before), 5)
    for number, (name, evaluated) in enumerate({"before": before, "after": after}.items()):
        write_jsonl(evaluation_lines(run_dir, name), evaluated)
        captions = [evaluated[index]["prompt"] for index in shown]
        pictures = images(len(shown), seed=number)
        write_evaluation_pictures(run_dir, name, pictures, shown, captions)
    for number in range(10, num_iterations, 10):
        path = evaluation_lines(run_dir, f"iteration_{number:06d}")
        write_jsonl(path, lines(lift=lift * number / num_iterations))
    strip = trajectory_strip(images(7), [0.1, 0.2, 0.25, 0.3, 0.5, 0.55, 0.6], prompt="a red shape")
    trajectory_picture(run_dir, num_iterations).parent.mkdir()
    strip.save(trajectory_picture(run_dir, num_iterations))
    write_json(run_dir / SUMMARY, summary(before, after, num_iterations))
    return run_dir


def summary(
    before: list[dict[str, Any]], after: list[dict[str, Any]], num_iterations: int
) -> dict[str, Any]:
    """What summary.json holds after a finished run."""
    return {
        "status": "finished",
        "iterations": num_iterations,
        "weights": "ema",
        "config_digest": "0123456789abcdef",
        "evaluation": build_section(before, after, COLUMNS, num_resamples=2000),
        "counts": {key: value * num_iterations for key, value in COUNTS.items()},
        "evaluation_counts": {"images": 120, "network_calls": 1200, "reward_calls": 120},
        "seconds": {
            "startup": 9.5,
            "evaluation_before": 6.0,
            "training": 5.0 * num_iterations,
            "evaluation_after": 6.0,
            "export": 0.5,
            "total": 22.0 + 5.0 * num_iterations,
        },
    }
