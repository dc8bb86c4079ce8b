"""The config of the runs that are disturbed: a model of milliseconds, a node for each pool, short deadlines."""

import json
from pathlib import Path

from tests.chaos.plan import Leg

CONFIG = "configs/quickstart.toml"
GROUPS_PER_BATCH = 4
WORKERS = 2


def overrides(leg: Leg, folder: Path, marks: Path | None) -> list[str]:
    """Return the words after `flowcredit train`: a run in `folder` / run; without marks nothing lingers."""
    prompts = folder / "prompts.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    prompts.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in "abcdefg"))
    place = "" if marks is None else str(marks)
    reward = (
        f'{{name="tests.chaos.parts:LingeringReward", options={{marks="{place}"}}, '
        f"replicas={leg.replicas}, resources={{reward=1}}}}"
    )
    return [
        'model.family="tests.chaos.parts:LingeringFamily"',
        f'model.path="linger:{place}"',
        f'run.dir="{folder}/run"',
        f'prompts.path="{prompts}"',
        f'evaluation.path="{prompts}"',
        f"run.num_iterations={leg.num_iterations}",
        f"run.max_policy_lag={leg.max_policy_lag}",
        "run.resume=auto",
        "run.checkpoint_every=2",
        "run.wait_for_nodes_s=60",
        "sampling.num_steps=4",
        f"rollout.workers={WORKERS}",
        f"rollout.groups_per_batch={GROUPS_PER_BATCH}",
        "rollout.samples_per_group=4",
        "rollout.slices_per_call=2",
        "rollout.resources={rollout=1}",
        f"rewards.components=[{reward}]",
        f"learner.num_ranks={leg.num_ranks}",
        f"learner.zero_stage={3 if leg.num_ranks > 1 else 0}",
        "learner.resources={learner=1}",
        "learner.threads_per_rank=1",
        "learner.lora_rank=16",  # 200 kB a version: in a node's object store, and lost with it
        "learner.updates_per_batch=2",
        'evaluation.graded="brightness"',
        'evaluation.strict=""',
        "faults.call_timeout_s=60",
        "faults.score_timeout_s=10",
        "faults.restart_delay_s=0.2",
    ]
