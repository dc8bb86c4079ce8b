"""What a config will run, counted before anything starts: `flowcredit plan`, and the run's own counts agree."""

import math
from dataclasses import dataclass

import torch
from rich.table import Table

from cluster.config import RunConfig
from cluster.evaluation import held_out
from learner.credit import CreditAssigner, make_credit
from learner.objective import make_objective
from rollout.families.registry import load_family
from rollout.families.trainable import attach_lora, make_trainable_full
from rollout.plan import StepPlan, make_plan, network_calls_per_group, scored_images_per_group


def step_plan(config: RunConfig) -> tuple[StepPlan, CreditAssigner]:
    """Return the run's step plan and credit rule; reads the model's schedule, loads no weights.

    ValueError when model, sampling, credit or objective say what cannot be, before anything starts.
    """
    rule = make_credit(config.credit)
    make_objective(config.objective)
    family = load_family(config.model, torch.device("cpu"), parts=())
    times = family.times(config.sampling.num_steps)
    return make_plan(config.sampling, times, rule.scored_states), rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Exact counts of a run in which no group is dropped and no scoring repeated."""

    images: int
    transitions: int
    network_calls_rollout: int
    network_calls_learner: int
    reward_calls: int
    evaluation_images: int
    evaluation_network_calls: int

    @property
    def network_calls(self) -> int:
        """Latents that go through the network while training."""
        return self.network_calls_rollout + self.network_calls_learner


def iteration_costs(config: RunConfig, plan: StepPlan) -> Costs:
    """Count one iteration; the evaluation's counts are those of one evaluation."""
    settings = config.rollout
    groups, samples = settings.groups_per_batch, settings.samples_per_group
    images = groups * samples
    guided = 1 if plan.guidance_scale == 1.0 else 2
    passes = 2 if config.objective.kl_weight else 1
    lines = held_out(config.evaluation.path, config.evaluation.num_prompts, config.evaluation.seed)
    evaluated = len(lines.prompts)
    return Costs(
        images=images,
        transitions=images * plan.num_steps,
        network_calls_rollout=groups
        * network_calls_per_group(plan, samples, settings.slices_per_group),
        network_calls_learner=images * sum(plan.trained) * guided * passes,
        reward_calls=groups
        * scored_images_per_group(plan, samples)
        * len(config.rewards.components),
        evaluation_images=evaluated,
        evaluation_network_calls=evaluated
        * config.evaluation.num_steps
        * (1 if config.evaluation.guidance_scale == 1.0 else 2),
    )


def busiest_workers(config: RunConfig) -> int:
    """Return how many rollout workers can compute at once: the calls of the (k + 1) batches that may be under way."""
    settings = config.rollout
    calls = settings.groups_per_batch * settings.slices_per_group // settings.slices_per_call
    return (config.run.max_policy_lag + 1) * calls


def describe(config: RunConfig) -> list[Table]:
    """Return the tables that `flowcredit plan` prints."""
    plan, _ = step_plan(config)
    costs = iteration_costs(config, plan)
    return [_actors(config), _steps(plan), _counts(config, costs), _memory(config, plan, costs)]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _actors(config: RunConfig) -> Table:
    table = _table("Actors", "part", "processes", "threads each", "GPUs each")
    settings, learner_settings = config.rollout, config.learner
    table.add_row(
        f"rollout workers (of {busiest_workers(config)} that could be busy)",
        str(settings.workers.start),
        str(settings.threads_per_worker),
        f"{settings.gpus_per_worker:g}",
    )
    for reward in config.rewards.components:
        table.add_row(
            f"reward server: {reward.name}",
            str(reward.replicas),
            str(reward.threads),
            f"{reward.gpus:g}",
        )
    table.add_row(
        f"learner ranks (ZeRO-{learner_settings.zero_stage})",
        str(learner_settings.num_ranks),
        str(learner_settings.threads_per_rank),
        f"{learner_settings.gpus_per_rank:g}",
    )
    return table


def _steps(plan: StepPlan) -> Table:
    title = f"Transitions: {plan.kernel}, eta {plan.eta:g}, trained where std >= {plan.min_std:g}"
    table = _table(title, "step", "t", "t'", "std", "trained", "scored state")
    for step, std in enumerate(plan.std):
        table.add_row(
            str(step),
            f"{plan.times[step]:.4f}",
            f"{plan.times[step + 1]:.4f}",
            f"{std:.4f}",
            "yes" if plan.trained[step] else "no",
            "yes" if step + 1 in plan.scored else "no",
        )
    return table


def _counts(config: RunConfig, costs: Costs) -> Table:
    iterations, settings = config.run.num_iterations, config.rollout
    batch = f"{settings.groups_per_batch} groups x {settings.samples_per_group} samples"
    title = f"Work: {iterations} iterations of {batch}"
    table = _table(title, "count", "an iteration", "training in all", "an evaluation")
    rows: list[tuple[str, int, int | str]] = [
        ("images", costs.images, costs.evaluation_images),
        ("transitions", costs.transitions, ""),
        ("network calls", costs.network_calls, costs.evaluation_network_calls),
        ("  of the rollout", costs.network_calls_rollout, costs.evaluation_network_calls),
        ("  of the learner", costs.network_calls_learner, ""),
        (
            "reward calls",
            costs.reward_calls,
            costs.evaluation_images * len(config.rewards.components),
        ),
    ]
    for name, one, evaluated in rows:
        table.add_row(
            name, f"{one:,}", f"{one * iterations:,}", f"{evaluated:,}" if evaluated != "" else "-"
        )
    return table


def _memory(config: RunConfig, plan: StepPlan, costs: Costs) -> Table:
    """Bytes that follow from the config alone: weights, training state, and one batch in the object store."""
    family = load_family(config.model, torch.device("cpu"), parts=())
    network = family.network
    frozen = sum(parameter.numel() for parameter in network.parameters())
    settings = config.learner
    if settings.adapter == "lora":
        targets = settings.lora_targets or family.lora_targets
        attach_lora(network, settings.lora_rank, settings.lora_alpha, targets, seed=0)
    else:
        make_trainable_full(network)
    trained = sum(
        parameter.numel() for parameter in network.parameters() if parameter.requires_grad
    )
    width = {"float32": 4, "bfloat16": 2, "float16": 2}[config.model.dtype]
    latent = math.prod(family.latent_shape)
    version = trained * (4 if settings.adapter == "lora" else width)
    states = costs.images * (plan.num_steps + 1) * latent * 4
    in_flight = config.run.max_policy_lag + 1
    copied = settings.adapter == "full" and config.objective.kl_weight > 0
    rows = {
        f"network, {frozen:,} parameters": frozen * width,
        f"trained, {trained:,} parameters: weights in float32": trained * 4,
        "  their gradients, in float32": trained * 4,
        "  their Adam moments, in float32": trained * 8,
        "  their average (EMA), in float32": trained * 4 if settings.ema_decay else 0,
        "  the network that KL refers to": frozen * width if copied else 0,
        f"published versions, {in_flight} in flight": in_flight * version,
        f"batches' states in the object store, {in_flight} in flight": in_flight * states,
    }
    table = _table("Memory estimate", "what", "MB")
    for name, num_bytes in rows.items():
        table.add_row(name, f"{num_bytes / 1e6:,.2f}")
    return table
