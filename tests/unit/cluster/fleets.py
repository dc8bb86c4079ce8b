"""A controller over the fake backend, small enough that a whole run takes milliseconds."""

from cluster.config import load
from cluster.controller import Controller
from cluster.fleet import make_fleet, start_fleet
from rollout.flow.schedule import shifted_times
from rollout.plan import make_plan
from rollout.prompts import PromptSource
from tests.fake_backend import FakeBackend

SETTINGS = [
    "run.num_iterations=4",
    "sampling.num_steps=3",
    "rollout.groups_per_batch=4",
    "rollout.samples_per_group=4",
    "rollout.slices_per_call=2",
]


def controller_of(
    tmp_path, *overrides, num_workers=2, seed=0, start=None, on_iteration=None, before=None
):
    config = load(
        "configs/quickstart.toml",
        [*SETTINGS, f"rollout.workers={num_workers}", *overrides],
    )
    plan = make_plan(config.sampling, shifted_times(config.sampling.num_steps, 3.0), "all")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    backend = FakeBackend(plan, seed)
    if start is not None:
        backend.version = start.consumed
    if before is not None:
        before(backend)
    seen = []
    fleet = make_fleet(config, backend)
    start_fleet(config, fleet)
    controller = Controller(
        config, plan, fleet, PromptSource(prompts), on_iteration or seen.append, start
    )
    return controller, backend, seen
