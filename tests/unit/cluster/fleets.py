"""A controller over the fake backend, small enough that a whole run takes milliseconds."""

from cluster.backend import PartLost
from cluster.config import load
from cluster.controller import Controller, StartPoint
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


def run_with_roll_backs(controller, backend, every=1):
    """Run to the end as `cluster.training_run` does, with a checkpoint `every` so many iterations; return what was
    trained on in the surviving history, and the controller that came to the end (its incarnation: the roll-backs)."""

    def on_iteration(record):
        if record.iteration % every:
            return None
        state = {"consumed": record.iteration}
        return backend.save_checkpoint("step", state, controller.store.older())

    controller.on_iteration = on_iteration
    fleet, ledger = controller.fleet, []
    while True:
        try:
            controller.run()
            return ledger + backend.trained, controller
        except PartLost:
            fleet.abandon()
            assert fleet.events.answer(backend.start_learner()) is None
            state, older = {"consumed": 0}, []
            if backend.saved:
                state, older = fleet.events.answer(backend.load_checkpoint("step"))
            ledger = (ledger + backend.trained)[: state["consumed"]]
            backend.trained = []
            start = StartPoint(
                consumed=state["consumed"], incarnation=controller.incarnation + 1, older=older
            )
            config, plan, prompts = controller.config, controller.plan, controller.prompts
            controller = Controller(config, plan, fleet, prompts, on_iteration, start)
