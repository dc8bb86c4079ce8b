"""What `evaluate` and `sample` may be pointed at: a run folder, one of its checkpoints, or a model folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.actors import RayBackend, adapter_spec, connect
from cluster.backend import WeightsAnswer
from cluster.config import ConfigError, RunConfig, load, resolve_paths
from cluster.costs import step_plan
from cluster.evaluation import load_everywhere
from cluster.folder import CHECKPOINTS
from cluster.run_folder import CONFIG
from cluster.weights import EVALUATION_VERSION
from learner.checkpoint import MANIFEST, latest
from learner.checkpoint import load as load_checkpoint
from rollout.families.trainable import checksum
from rollout.records import AdapterSpec

MODEL_INDEX = "model_index.json"
DEFAULT_CONFIG = Path("configs/quickstart.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model to draw with: a config, and trained weights on top of its model, or none."""

    config: RunConfig
    checkpoint: Path | None
    """None: the model as it is."""
    description: str


def find_target(path: Path, config_path: Path | None, overrides: list[str], base: bool) -> Target:
    """Tell what `path` is. `base` leaves a run's trained weights out. ConfigError when it is nothing of the kind."""
    if (path / MODEL_INDEX).is_file():
        config = load(config_path or DEFAULT_CONFIG, [f'model.path="{path}"', *overrides])
        return Target(config=config, checkpoint=None, description=f"model {path}")
    checkpoint: Path | None
    if (path / MANIFEST).is_file():
        checkpoint, folder = path, path.parent.parent
    else:
        folder = path
        checkpoint = latest(path / CHECKPOINTS) if (path / CHECKPOINTS).is_dir() else None
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{path} is neither a run folder ({CONFIG}), nor one of its checkpoints ({MANIFEST}), "
            f"nor a model in diffusers layout ({MODEL_INDEX})"
        )
    config = load(config_path or folder / CONFIG, overrides)
    if base:
        return Target(config=config, checkpoint=None, description=f"base model of {folder}")
    if checkpoint is None:
        raise ConfigError(f"{folder} has no checkpoint yet; add --base to use its model untrained")
    return Target(
        config=config,
        checkpoint=checkpoint,
        description=f"{checkpoint} ({config.evaluation.weights})",
    )


def open_target(
    target: Target, address: str | None, *, with_rewards: bool
) -> tuple[RunConfig, RayBackend]:
    """Start workers (and reward servers) that hold the target's weights."""
    config = resolve_paths(target.config, Path(target.config.run.dir or "runs").absolute())
    connect(config, address)
    _, rule = step_plan(config)
    adapter = adapter_spec(config) if target.checkpoint else AdapterSpec(adapter="none")
    backend = RayBackend(
        config,
        rule.scored_states,
        "",
        with_learner=False,
        with_rewards=with_rewards,
        adapter=adapter,
    )
    if target.checkpoint:
        found = load_checkpoint(target.checkpoint)
        averaged = config.evaluation.weights == "ema" and found.ema is not None
        tensors: dict[str, Any] = dict(found.ema if averaged and found.ema else found.weights)
        load_everywhere(
            backend,
            WeightsAnswer(
                tensors=backend.store(tensors),
                version=EVALUATION_VERSION,
                checksum=checksum(tensors),
                num_bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
            ),
        )
    return config, backend
