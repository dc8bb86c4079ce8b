"""What `evaluate` and `sample` may be pointed at: a run folder, one of its checkpoints, or a model folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.actors import adapter_spec
from cluster.actors_backend import RayBackend
from cluster.actors_cluster import connect
from cluster.backend import WeightsAnswer
from cluster.config import ConfigError, RunConfig, load, resolve_paths, user_mistakes
from cluster.costs import step_plan
from cluster.fleet import Fleet, make_fleet, start_fleet
from cluster.remote_folder import run_fetched
from cluster.remote_path import place_at
from cluster.run_checkpoints import weights_in
from cluster.run_folder import CHECKPOINTS, CONFIG
from learner.checkpoint import MANIFEST, check, described, latest
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


@contextmanager
def found_target(
    name: str, config_path: Path | None, overrides: list[str], base: bool
) -> Iterator[Target]:
    """Tell what `name`, a path or the URL of a run or checkpoint, is; a URL's is downloaded while the block lasts."""
    where = place_at(name)
    if isinstance(where, Path):
        yield find_target(Path(name), config_path, overrides, base)
        return
    with run_fetched(where) as path:
        try:
            target = find_target(path, config_path, overrides, base)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(path), name)) from error
        yield replace(target, description=target.description.replace(str(path), name))


def find_target(path: Path, config_path: Path | None, overrides: list[str], base: bool) -> Target:
    """Tell what `path` is. `base` leaves a run's trained weights out. ConfigError when it is nothing of the kind."""
    if (path / MODEL_INDEX).is_file():
        config = load(config_path or DEFAULT_CONFIG, [f'model.path="{path}"', *overrides])
        return Target(config=config, checkpoint=None, description=f"model {path}")
    is_checkpoint = (path / MANIFEST).is_file()
    folder = path.parent.parent if is_checkpoint else path
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{path} is neither a run folder ({CONFIG}), nor one of its checkpoints ({MANIFEST}), "
            f"nor a model in diffusers layout ({MODEL_INDEX})"
        )
    config = load(config_path or folder / CONFIG, overrides)
    if base:
        return Target(config=config, checkpoint=None, description=f"base model of {folder}")
    checkpoint = path if is_checkpoint else latest(folder / CHECKPOINTS)
    if checkpoint is None:
        raise ConfigError(f"{folder} has no checkpoint yet; add --base to use its model untrained")
    _check_fits(checkpoint, config)
    return Target(
        config=config,
        checkpoint=checkpoint,
        description=f"{described(checkpoint)} ({config.evaluation.weights})",
    )


def _check_fits(checkpoint: Path, config: RunConfig) -> None:
    """Refuse a config under which the checkpoint's tensors would mean something else."""
    manifest = check(checkpoint)
    identity, settings = manifest["identity"], config.learner
    wanted = {"adapter": settings.adapter}
    if settings.adapter == "lora":
        wanted |= {"rank": settings.lora_rank, "alpha": settings.lora_alpha}
    if identity != wanted:
        raise ConfigError(f"{checkpoint} was trained with {identity}, the config says {wanted}")
    if config.evaluation.weights == "ema" and "ema.safetensors" not in manifest["files"]:
        raise ConfigError(f"{checkpoint} holds no averaged weights; add evaluation.weights=raw")


@contextmanager
def opened(
    target: Target, address: str | None, *, with_rewards: bool
) -> Iterator[tuple[RunConfig, Fleet, WeightsAnswer | None]]:
    """Start workers (and reward servers); give them, and the weights that a call on them has to name."""
    with user_mistakes():
        config = resolve_paths(target.config, str(place_at(target.config.run.dir or "runs")))
        connect(config, address)
        _, rule = step_plan(config)
        adapter = adapter_spec(config) if target.checkpoint else AdapterSpec(adapter="none")
        backend = RayBackend(config, rule.scored_states, "", adapter=adapter)
    try:
        fleet = make_fleet(config, backend)
        with user_mistakes():
            start_fleet(config, fleet, with_rewards=with_rewards)
        weights = None
        if target.checkpoint:
            weights = weights_in(target.checkpoint, config.evaluation.weights, config, backend)
        yield config, fleet, weights
    finally:
        backend.close()
