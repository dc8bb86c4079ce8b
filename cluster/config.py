"""The whole run's configuration: the packages' tables put together, loaded from TOML, checked. Imports no torch."""

import difflib
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import tomli_w
from pydantic import Field, ValidationError, model_validator

from learner.config import CreditConfig, LearnerConfig, ObjectiveConfig
from rewards.config import RewardsConfig
from rollout.config import ModelConfig, PromptConfig, RolloutConfig, SamplingConfig, Section


class RunSection(Section):
    """What the run is called, how long it goes, and what it leaves behind."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Every noise and every prompt order follows from it."""
    num_iterations: int = Field(ge=1)
    """Batches consumed; each one publishes one policy version."""
    dir: str | None = None
    """Run folder, a path or an fsspec URL (docs/formats.md); none means runs/<name>/<date-time>."""
    resume: Literal["never", "auto"] = "never"
    """auto: a folder that already holds this run is continued from its last checkpoint."""
    max_policy_lag: int = Field(default=0, ge=0)
    """k: batch b is sampled with policy version max(0, b - k); 0 is strictly on-policy."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Iterations between checkpoints; the last iteration always writes one."""
    keep_checkpoints: int = Field(default=2, ge=1)
    wait_for_nodes_s: float = Field(default=0.0, ge=0)
    """How long to wait, at the start, for a cluster that has too little room: an autoscaler may be bringing nodes."""
    record_trajectories: bool = False
    """Mirror every consumed batch to trajectories/*.arrow (latents included: mind the disk)."""


class EvaluationConfig(Section):
    """Held-out prompts, sampled without noise in between, before and after training on the same latents."""

    path: str
    """JSONL of prompts; a line's number fixes its noise, so repeated prompts get different noise."""
    num_prompts: int | None = Field(default=None, ge=1)
    """Only the first so many lines; none means all."""
    num_steps: int = Field(default=10, ge=1)
    guidance_scale: float = Field(default=1.0, ge=1)
    seed: int = Field(default=20_260, ge=0)
    """Noise of the held-out latents; not the run's seed, so that runs are comparable."""
    weights: Literal["ema", "raw"] = "ema"
    """Which weights the evaluation after training uses, and which are exported."""
    every: int = Field(default=0, ge=0)
    """Also evaluate after every so many iterations, and keep the best checkpoint; 0 means before and after only."""
    both_kinds: bool = False
    """In between, evaluate the weights that `weights` does not name as well."""
    batch: int = Field(default=92, ge=1)
    """Images of one network call."""
    graded: str = "shapes"
    """Reward column shown as the graded score."""
    strict: str = "shapes_strict"
    """Reward column shown as the strict (0 or 1) score; empty if there is none."""


LONGEST_PAUSE_S = 60.0


class FaultsConfig(Section):
    """What counts as lost, and how much loss a run bears before it gives up."""

    call_timeout_s: float = Field(default=3600.0, gt=0)
    """A rollout worker that has not answered a call for so long is ended and replaced."""
    score_timeout_s: float = Field(default=300.0, gt=0)
    """The same for a reward server: its process, not the reward's own rewards.components.timeout_s."""
    learner_timeout_s: float = Field(default=3600.0, gt=0)
    """A learner that has not ended a step, a checkpoint or another call for so long is lost: the run goes back to the
    last checkpoint. Longer than the longest step."""
    start_timeout_s: float = Field(default=3600.0, gt=0)
    """An actor that is not ready so long after it was asked for (no room on the cluster, a model that does not load)
    is given up and asked for again."""
    straggler_factor: float = Field(default=4.0, gt=1)
    """A call that takes so many times the median is also given to a worker that idles; the first answer wins."""
    call_attempts: int = Field(default=3, ge=1)
    """A call that raises an error, or loses its worker, so often ends the run: it is the call's fault."""
    losses_in_a_row: int = Field(default=10, ge=1)
    """So many workers (or servers of one reward) in a row, each the other's replacement, that are lost before they have
    done anything, while no other has, end the run; so do so many learners that are lost while they start."""
    rollbacks_in_a_row: int = Field(default=3, ge=1)
    """So many roll-backs to the same checkpoint end the run."""
    restart_delay_s: float = Field(default=1.0, ge=0)
    """Pause before a replacement that follows a replacement lost at once; doubles up to a minute."""

    def pause_s(self, lost_in_a_row: int) -> float:
        """Return how long to wait with the next replacement: nothing after the first loss."""
        if lost_in_a_row <= 1:
            return 0.0
        return min(self.restart_delay_s * 2 ** (lost_in_a_row - 2), LONGEST_PAUSE_S)


class RunConfig(Section):
    """One run. `load` makes it from a TOML file."""

    run: RunSection
    model: ModelConfig
    prompts: PromptConfig
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    rewards: RewardsConfig
    credit: CreditConfig = Field(default_factory=CreditConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    evaluation: EvaluationConfig
    faults: FaultsConfig = Field(default_factory=FaultsConfig)

    @property
    def reward_names(self) -> list[str]:
        """The rewards' names in the config, in its order."""
        return [reward.name for reward in self.rewards.components]

    @model_validator(mode="after")
    def ema_evaluation_needs_an_ema(self) -> "RunConfig":
        if self.evaluation.weights == "ema" and self.learner.ema_decay == 0:
            raise ValueError(
                "evaluation.weights = 'ema' but learner.ema_decay = 0 keeps none; "
                "set evaluation.weights = 'raw' or learner.ema_decay > 0"
            )
        return self

    @model_validator(mode="after")
    def both_kinds_need_an_ema(self) -> "RunConfig":
        if self.evaluation.both_kinds and self.learner.ema_decay == 0:
            raise ValueError(
                "evaluation.both_kinds = true but learner.ema_decay = 0 keeps raw weights only"
            )
        return self

    @model_validator(mode="after")
    def updates_need_as_many_trajectories(self) -> "RunConfig":
        batch = self.rollout.groups_per_batch * self.rollout.samples_per_group
        if self.learner.updates_per_batch > batch:
            raise ValueError(
                f"learner.updates_per_batch = {self.learner.updates_per_batch} is more than the "
                f"{batch} trajectories of a batch"
            )
        if batch % (self.learner.updates_per_batch * self.learner.num_ranks):
            raise ValueError(
                f"a batch of {batch} trajectories (rollout.groups_per_batch x rollout.samples_per_group) "
                f"does not divide into learner.updates_per_batch = {self.learner.updates_per_batch} x "
                f"learner.num_ranks = {self.learner.num_ranks} equal parts; change one of the four"
            )
        return self


class ConfigError(ValueError):
    """A mistake in the user's configuration; the message names file, key, value and cure."""


@contextmanager
def user_mistakes() -> Generator[None]:
    """Turn a ValueError of start-up, an actor's too, into a ConfigError: it is about what the user asked for.

    Later ValueErrors are our own bugs and keep their traceback.
    """
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        cause = getattr(
            error, "cause", None
        )  # Ray raises its wrapping, which is a ValueError as well
        raise ConfigError(str(cause if isinstance(cause, ValueError) else error)) from error


def load(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a TOML file, apply `section.key=value` overrides, validate.

    Raises ConfigError, all mistakes at once, each with its key, its value and what would be right.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; see configs/ for the shipped ones")
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for override in overrides or []:
        _apply(table, override)
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        raise ConfigError(
            f"{path}:\n" + "\n".join(f"  {_explain(e)}" for e in error.errors())
        ) from error


def _apply(table: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    *parents, last = key.strip().split(".")
    for parent in parents:
        inner: object = table.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is not a table")
        table = cast("dict[str, Any]", inner)
    table[last] = value


def _explain(error: Any) -> str:
    """One line for one pydantic error: key, value, what would be right."""
    key = ".".join(str(part) for part in error["loc"]) or "config"
    kind, value = error["type"], error.get("input")
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(str(error["loc"][-1]), _known_keys(error["loc"][:-1]), n=1)
        hint = (
            f"; did you mean {near[0]!r}?"
            if near
            else f"; known: {', '.join(_known_keys(error['loc'][:-1]))}"
        )
        return f"{key} = {value!r}: unknown key{hint}"
    if kind == "missing":
        return f"{key}: required, but not set"
    if kind == "value_error":
        return f"{key}: {error['ctx']['error']}" if error["loc"] else str(error["ctx"]["error"])
    return f"{key} = {value!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _known_keys(loc: tuple[str | int, ...]) -> list[str]:
    model: Any = RunConfig
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        model = annotation if hasattr(annotation, "model_fields") else annotation.__args__[0]
    return list(model.model_fields)


def dump(config: RunConfig) -> str:
    """Return the resolved configuration as TOML text that `load` reads back to an equal config."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def resolve_paths(config: RunConfig, run_dir: str) -> RunConfig:
    """Return the config with local paths absolute, since actors may have another working directory."""

    def absolute(path: str) -> str:
        return str(Path(path).resolve()) if Path(path).exists() else path

    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": run_dir}),
            "model": config.model.model_copy(update={"path": absolute(config.model.path)}),
            "prompts": config.prompts.model_copy(update={"path": absolute(config.prompts.path)}),
            "evaluation": config.evaluation.model_copy(
                update={"path": absolute(config.evaluation.path)}
            ),
        }
    )
