"""Placement: what a config needs, and what a cluster lacks. The judge is a slow search over single actors."""

import random
from collections.abc import Mapping, Sequence

import pytest

from cluster import placement
from cluster.config import load
from cluster.placement import UNIT, Need, missing, needs

QUICKSTART = "configs/quickstart.toml"
POOLS = [
    "rollout.workers={min=3, start=4}",
    "rollout.threads_per_worker=2",
    "rollout.gpus_per_worker=1",
    "rollout.resources={rollout=1}",
    'rewards.components=[{name="jpeg", replicas=2, threads=3, gpus=0.25, resources={reward=0.5}}, {name="shapes"}]',
    "learner.num_ranks=2",
    "learner.threads_per_rank=4",
    "learner.gpus_per_rank=1",
    "learner.resources={learner=1, spare=0}",
]


def need(part: str = "parts", count: int = 1, **resources: float) -> Need:
    keys = {name: f"key.{name}" for name in resources}
    return Need(part=part, count=count, count_key="key.count", resources=resources, keys=keys)


def node(CPU: float = 8, **more: float) -> dict[str, float]:
    """As ray.nodes() has it, with what Ray adds by itself."""
    ray_s_own = {"memory": 1e9, "object_store_memory": 1e9, "node:10.0.0.1": 1.0}
    ray_s_own |= {"CPU_group_0_" + "0a" * 18: 1.0, "bundle_group_" + "0a" * 18: 1000.0}
    return {"CPU": CPU, **more, **ray_s_own}


def test_needs_are_those_of_the_config_the_elastic_part_last() -> None:
    ranks, jpeg, shapes, workers = needs(load(QUICKSTART, POOLS))
    assert ranks == Need(
        part="learner ranks",
        count=2,
        count_key="learner.num_ranks",
        resources={"CPU": 4.0, "GPU": 1.0, "learner": 1.0},
        keys={
            "CPU": "learner.threads_per_rank",
            "GPU": "learner.gpus_per_rank",
            "learner": "learner.resources.learner",
        },
    )
    assert (jpeg.part, jpeg.count) == ("reward jpeg", 2)
    assert jpeg.resources == {"CPU": 3.0, "GPU": 0.25, "reward": 0.5}
    assert jpeg.count_key == "rewards.components.0.replicas"
    assert jpeg.keys["reward"] == "rewards.components.0.resources.reward"
    assert (shapes.part, shapes.count, shapes.resources) == ("reward shapes", 1, {"CPU": 1.0})
    assert shapes.keys == {"CPU": "rewards.components.1.threads"}
    assert (workers.part, workers.count) == ("rollout workers", 3), "min, not start"
    assert workers.resources == {"CPU": 2.0, "GPU": 1.0, "rollout": 1.0}
    assert workers.count_key == "rollout.workers.min"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rollout.resources={CPU=1}", "rollout.resources.CPU = 1: CPU is no custom resource"),
        ("learner.resources={memory=1e9}", "learner.resources.memory = 1e\\+09: memory is no"),
        ("rollout.resources={a=-1}", "rollout.resources.a = -1 must be 0 or at least 0.0001"),
        ("rollout.gpus_per_worker=0.00001", "rollout.gpus_per_worker = 1e-05 must be 0 or"),
        ("learner.gpus_per_rank=1.5", "learner.gpus_per_rank = 1.5: Ray gives out a part"),
    ],
)
def test_what_ray_would_refuse_is_refused_by_key(setting: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        needs(load(QUICKSTART, [setting]))


def test_separate_pools_that_are_large_enough_miss_nothing() -> None:
    asked = needs(load(QUICKSTART, POOLS))
    pools = [
        node(8, GPU=2, learner=2),
        node(8, GPU=1, reward=1),
        *[node(2, GPU=1, rollout=1)] * 3,
    ]
    assert missing(asked, pools) == []
    assert missing(asked, [*pools, node(64)]) == [], "further nodes do no harm"
    assert missing(asked, pools[1:]) == [
        "learner ranks: no node has the resource 'learner' (learner.resources.learner); "
        "nodes offer CPU, GPU, reward, rollout"
    ]
    assert missing(asked, pools[:-1]) == [
        "rollout workers: 3 need 2 CPU, 1 GPU and 1 rollout each, and there is room for 2; "
        "add nodes, or lower rollout.workers.min"
    ]


def test_each_part_that_lacks_something_says_so() -> None:
    asked = [need("a", 1, CPU=4, GPU=4), need("b", 2, CPU=1, magic=1), need("c", 1, CPU=1)]
    assert missing(asked, [node(8, GPU=2), node(16, GPU=1)]) == [
        "a: one needs 4 GPU (key.GPU), the largest node has 2",
        "b: no node has the resource 'magic' (key.magic); nodes offer CPU, GPU",
    ]


def test_resources_that_lie_on_different_nodes_are_not_added_up() -> None:
    asked = [need("a", 1, CPU=4, GPU=1)]
    assert missing(asked, [node(8), node(2, GPU=1)]) == [
        "a: one needs 4 CPU and 1 GPU, and no node has all of it (key.CPU and key.GPU)"
    ]


def test_parts_that_fit_alone_but_not_together_say_beside_what() -> None:
    asked = [need("a", 2, CPU=2), need("b", 1, CPU=1), need("c", 5, CPU=1)]
    assert missing(asked, [node(4), node(4)]) == [
        "c: 5 need 1 CPU each, and there is room for 3 beside a and b; add nodes, or lower key.count"
    ]
    assert missing([need("a", 1, CPU=8), *asked[1:]], [node(8)]) == [
        "b: 1 need 1 CPU each, and there is room for 0 beside a; add nodes, or lower key.count",
        "c: 5 need 1 CPU each, and there is room for 0 beside a and b; add nodes, or lower key.count",
    ]


def test_no_node_is_said_as_such() -> None:
    assert missing([need(CPU=1)], []) == ["the cluster has no live node; start one"]


def test_a_part_that_takes_nothing_fits_on_an_empty_node() -> None:
    assert missing([need(count=100)], [{}]) == []
    assert missing([need(count=4, GPU=0.5)], [node(0, GPU=2)]) == []


@pytest.mark.parametrize(
    ("share", "gpus", "room"),
    [
        (0.5, 1, 2),
        (0.5, 3, 6),
        (0.6, 2, 2),  # 1.2 of 2 GPUs, but the rests don't join
        (0.3, 2, 6),
        (0.3334, 1, 2),
        (0.3333, 1, 3),  # exact in ten-thousandths
        (0.1, 1, 10),  # in floats ten times 0.1 is no 1
        (0.0001, 1, 10_000),
        (1.0, 2, 2),
        (2.0, 3, 1),
    ],
)
def test_shares_of_a_gpu_stay_on_one_device(share: float, gpus: int, room: int) -> None:
    pool = [node(8, GPU=gpus)]
    assert missing([need(count=room, GPU=share)], pool) == []
    (said,) = missing([need(count=room + 1, GPU=share)], pool)
    assert f"room for {room};" in said


def test_whole_gpus_and_shares_do_not_mix_on_a_device() -> None:
    whole, half = need("whole", 1, GPU=1), need("half", 3, GPU=0.5)
    assert missing([whole, half], [node(8, GPU=3)]) == []
    assert "room for 2 beside whole" in missing([whole, half], [node(8, GPU=2)])[0]


def test_rounding_is_ray_s_ten_thousandths() -> None:
    assert missing([need(count=3, a=0.1)], [{"a": 0.3}]) == []  # 3 * 0.1 > 0.3 in floats
    assert missing([need(count=3, a=0.1)], [{"a": 0.29999}]) == []
    assert missing([need(count=3, a=0.1)], [{"a": 0.2999}]) != []


@pytest.mark.parametrize("num_nodes", [1, 7, 64, 300])
def test_equal_nodes_hold_as_many_as_each_holds(num_nodes: int) -> None:
    """The common cluster, with one kind that fills nodes in part and one that goes in the gaps."""
    pool = [node(8, GPU=1)] * num_nodes
    workers, gaps = need("w", num_nodes, CPU=5, GPU=1), need("g", num_nodes, CPU=3)
    assert missing([workers, gaps], pool) == []
    assert missing([gaps, workers], pool) == []
    (said,) = missing([gaps, need("w", num_nodes + 1, CPU=5, GPU=1)], pool)
    assert f"room for {num_nodes};" in said


TIGHT = [need("a", 2, CPU=4), need("b", 4, CPU=3)]
"""4 + 3 + 3 fill each of two nodes of 10; largest first puts both 4s on one, and then a 3 is left over."""


def test_first_fit_decreasing_is_not_the_last_word() -> None:
    assert missing(TIGHT, [node(10)] * 2) == []


def test_a_search_that_gives_up_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_TRIES", 0)
    assert "room for 3 beside a;" in missing(TIGHT, [node(10)] * 2)[0]
    monkeypatch.undo()
    monkeypatch.setattr(placement, "MAX_NODES", 1)
    assert "room for 3 beside a;" in missing(TIGHT, [node(10)] * 2)[0]


def fits(actors: Sequence[Mapping[str, int]], nodes: list[dict[str, int]]) -> bool:
    """One actor after another on every node and every GPU; resources in ten-thousandths, GPUs "0", "1", ..."""
    if not actors:
        return True
    first, rest = actors[0], actors[1:]
    for place in nodes:
        devices = [name for name in place if name.isdigit()]
        gpu = first.get("GPU", 0)
        free = [name for name in devices if place[name] == UNIT]
        if gpu >= UNIT:
            chosen = [free[: gpu // UNIT]] if len(free) >= gpu // UNIT else []
        else:
            chosen = [[name] for name in devices if place[name] >= gpu] if gpu else [[]]
        for names in chosen:
            taken = {name: amount for name, amount in first.items() if name != "GPU"}
            taken |= {name: min(gpu, UNIT) for name in names}
            if any(place.get(name, 0) < amount for name, amount in taken.items()):
                continue
            before = dict(place)
            place.update({name: place[name] - amount for name, amount in taken.items()})
            found = fits(rest, nodes)
            place.update(before)
            if found:
                return True
    return False


@pytest.mark.parametrize("seed", range(150))
def test_small_clusters_are_judged_as_by_trying_every_placement(seed: int) -> None:
    draw = random.Random(seed)
    cpus, gpus = draw.choice([(4, 1), (6, 2), (7, 1)]), (0, 1, 2)
    pool = [
        node(draw.choice(cpus) + 2, GPU=draw.choice(gpus), a=draw.choice((0, 1)))
        for _ in range(draw.randint(1, 3))
    ]
    asked = [
        need(
            str(kind),
            draw.randint(1, 3),
            CPU=draw.randint(1, 4),
            **({"GPU": share} if (share := draw.choice((0, 0, 0.3, 0.4, 0.5, 0.7, 1, 2))) else {}),
            **({"a": 0.5} if draw.random() < 0.2 else {}),
        )
        for kind in range(draw.randint(1, 3))
    ]
    units = [
        {name: round(amount * UNIT) for name, amount in place.items() if name != "GPU"}
        | {str(device): UNIT for device in range(int(place["GPU"]))}
        for place in pool
    ]
    actors = [
        {name: round(amount * UNIT) for name, amount in kind.resources.items()}
        for kind in asked
        for _ in range(kind.count)
    ]
    assert (missing(asked, pool) == []) == fits(actors, units)
