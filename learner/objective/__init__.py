"""Objectives: log-probs and advantages -> a loss per transition. Pure maths; one small file each.

A new objective: one file with a class that satisfies `Objective`, and one line in OBJECTIVES (or
`name = "my.module:Class"` in the run's TOML).
"""

from learner.config import ObjectiveConfig
from learner.objective.base import Objective, ObjectiveOutput
from learner.objective.ppo import PpoClip
from rollout.registry import load_object

OBJECTIVES: dict[str, type[Objective]] = {"ppo_clip": PpoClip}


def make_objective(config: ObjectiveConfig) -> Objective:
    """The objective that `config` names. Raises ValueError on an unknown name."""
    name = config.name
    if ":" not in name and name not in OBJECTIVES:
        raise ValueError(
            f"unknown objective {name!r}: choose from {sorted(OBJECTIVES)} or 'my.module:Class'"
        )
    objective_class: type[Objective] = OBJECTIVES[name] if name in OBJECTIVES else load_object(name)
    return objective_class.from_config(config)


__all__ = ["OBJECTIVES", "Objective", "ObjectiveOutput", "PpoClip", "make_objective"]
