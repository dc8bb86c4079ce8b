"""Whether a cluster has room for a run's actors, and what it lacks. Pure: nodes come as plain tables.

    needs(config) -> what each part asks for      missing(needs, nodes) -> one sentence for each part without room

Room is looked for in the nodes' totals, first-fit-decreasing first and then by search. The answer is exact for one
part alone and for every search that ends within MAX_TRIES. Beyond, it may be pessimistic: a tight mix of parts that
only an odd packing could hold is called unplaceable. It is no promise either: Ray places actors one by one where they
fit at the time, other jobs use the same nodes, and one node's share of a scarce resource may go to a part that could
live elsewhere. Custom resources, one for each pool, keep the parts apart.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, mul, sub
from typing import Any

from cluster.config import RunConfig

UNIT = 10_000
"""Ray counts resources in ten-thousandths."""
MAX_TRIES, MAX_NODES = 20_000, 400
"""Bounds of the search: node fillings tried, nodes looked at."""
UNNAMED = ("memory", "object_store_memory")
"""Every node has them; no part of ours asks for them."""
RAY_S_OWN = re.compile(r"^node:|_group_([0-9]+_)?[0-9a-f]{20,}$")
"""A node's address; what a placement group holds of a node."""

Amounts = Mapping[str, int]
"""Resource -> ten-thousandths."""
Load = Sequence[tuple[Amounts, int]]
"""Kinds of actors: what one takes, and how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one part of a run asks of the cluster before it can begin."""

    part: str
    """learner ranks | reward NAME | rollout workers."""
    count: int
    """Actors."""
    count_key: str
    """The config's key of `count`."""
    resources: dict[str, float]
    """What one actor takes of each resource, by Ray's name; zeros are left out."""
    keys: dict[str, str]
    """Resource -> the config's key that asks for it."""


def needs(config: RunConfig) -> list[Need]:
    """Return what the parts need, in the order in which room is given to them: the elastic workers come last.

    Raises ValueError, naming the key, for amounts that Ray would refuse.
    """
    servers = [
        _need(
            f"reward {reward.name}",
            f"rewards.components.{i}",
            reward,
            "replicas",
            "threads",
            "gpus",
        )
        for i, reward in enumerate(config.rewards.components)
    ]
    return [
        _need("learner ranks", "learner", config.learner, "num_ranks", "threads_per_rank", "gpus_per_rank"),
        *servers,
        _need("rollout workers", "rollout", config.rollout, "workers.min", "threads_per_worker", "gpus_per_worker"),
    ]  # fmt: skip


def _need(part: str, table: str, settings: Any, count: str, threads: str, gpus: str) -> Need:
    """Read a part's need off its table of the config, where `count`, `threads` and `gpus` are keys."""
    named = [
        (name, f"{table}.{key}", getattr(settings, key))
        for name, key in (("CPU", threads), ("GPU", gpus))
    ]
    for name, amount in settings.resources.items():
        key = f"{table}.resources.{name}"
        if name in ("CPU", "GPU", *UNNAMED):
            raise ValueError(
                f"{key} = {amount:g}: {name} is no custom resource; threads and gpus have their own keys"
            )
        named.append((name, key, amount))
    for name, key, amount in named:
        _check_amount(name, key, amount)
    return Need(
        part=part,
        count=attrgetter(count)(settings),
        count_key=f"{table}.{count}",
        resources={name: float(amount) for name, _, amount in named if amount},
        keys={name: key for name, key, amount in named if amount},
    )


def _check_amount(name: str, key: str, amount: float) -> None:
    if amount < 0 or 0 < amount < 1 / UNIT:
        raise ValueError(f"{key} = {amount:g} must be 0 or at least {1 / UNIT:g}")
    if name == "GPU" and amount > 1 and amount != int(amount):
        raise ValueError(f"{key} = {amount:g}: Ray gives out a part of one GPU, or whole GPUs")


def missing(needs: Sequence[Need], nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """Return a sentence for each part that finds no room beside those before it: what is missing, and what to do.

    `nodes`: the total resources of each live node, as `ray.nodes()` has them under "Resources". Empty when all fit.
    """
    if not nodes:
        return ["the cluster has no live node; start one"]
    bins = [_units(node) for node in nodes]
    bins.sort(key=lambda node: (len(node), sum(node.values())))  # what few can use, last
    sentences: list[str] = []
    placed: list[tuple[Amounts, int]] = []
    beside: list[str] = []
    for need in needs:
        said = _never(need, nodes)
        if said:
            sentences.append(said)
            continue
        item = _units(need.resources)
        room = _room(placed, item, need.count, bins)
        if room < need.count:
            alone = _room([], item, need.count, bins)
            others = f" beside {_and(beside)}" if alone == need.count else ""
            sentences.append(
                f"{need.part}: {need.count} need {_amounts(need.resources)} each, and there is room for "
                f"{room if others else alone}{others}; add nodes, or lower {need.count_key}"
            )
        placed.append((item, room))
        beside.append(need.part)
    return sentences


def _never(need: Need, nodes: Sequence[Mapping[str, float]]) -> str | None:
    """Why not even one of the part's actors could be placed; None if one could."""
    for name, amount in need.resources.items():
        largest = max(node.get(name, 0) for node in nodes)
        if largest == 0:
            return (
                f"{need.part}: no node has the resource {name!r} ({need.keys[name]}); "
                f"nodes offer {', '.join(_offers(nodes))}"
            )
        if round(amount * UNIT) > round(largest * UNIT):
            return (
                f"{need.part}: one needs {amount:g} {name} ({need.keys[name]}), "
                f"the largest node has {largest:g}"
            )
    if not any(_holds(_units(node), [(_units(need.resources), 1)]) for node in nodes):
        keys = _and(list(need.keys.values()))
        return (
            f"{need.part}: one needs {_amounts(need.resources)}, and no node has all of it ({keys})"
        )
    return None


def _offers(nodes: Sequence[Mapping[str, float]]) -> list[str]:
    """Names that a config could ask for, CPU and GPU first; without those that Ray makes for itself."""
    names = {name for node in nodes for name, amount in node.items() if amount}
    shown = {name for name in names if not RAY_S_OWN.search(name)} - {*UNNAMED}
    return sorted(shown, key=lambda name: (name not in ("CPU", "GPU"), name))


def _amounts(resources: Mapping[str, float]) -> str:
    return _and([f"{amount:g} {name}" for name, amount in resources.items()]) or "nothing"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _units(resources: Mapping[str, float]) -> dict[str, int]:
    """In ten-thousandths, rounded as Ray does; zeros and what no part asks for are left out."""
    amounts = {name: round(amount * UNIT) for name, amount in resources.items()}
    return {name: amount for name, amount in amounts.items() if amount and name not in UNNAMED}


# packing


def _room(placed: Load, item: Amounts, count: int, nodes: Sequence[Amounts]) -> int:
    """The most of `count` such actors that fit beside what is placed; bisection, since fewer always fit too."""
    if _packs([*placed, (item, count)], nodes):
        return count
    fits, too_many = 0, count
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _packs([*placed, (item, middle)], nodes):
            fits = middle
        else:
            too_many = middle
    return fits


def _packs(load: Load, nodes: Sequence[Amounts]) -> bool:
    """Whether the nodes hold the load."""
    return _first_fit(load, nodes) or _search(load, nodes)


def _holds(node: Amounts, load: Load) -> bool:
    """Whether one node holds the load: no sum exceeds its total, and no GPU is shared beyond itself."""
    for name in {name for item, count in load if count for name in item}:
        if sum(count * item.get(name, 0) for item, count in load) > node.get(name, 0):
            return False
    shares = [
        ({"share": item["GPU"]}, count) for item, count in load if 0 < item.get("GPU", 0) < UNIT
    ]
    if not any(count for _, count in shares):
        return True
    whole = sum(count * item.get("GPU", 0) for item, count in load if item.get("GPU", 0) >= UNIT)
    devices = (node["GPU"] - whole) // UNIT
    return _packs(shares, [{"share": UNIT}] * devices)


def _most(node: Amounts, inside: Load, item: Amounts, count: int) -> int:
    """The most of `count` such actors that the node holds beside what is inside already."""
    for name, amount in item.items():
        used = sum(number * other.get(name, 0) for other, number in inside)
        count = min(count, (node.get(name, 0) - used) // amount)
    while count > 0 and not _holds(node, [*inside, (item, count)]):
        count -= 1  # a GPU's rest is too small for another share
    return count


def _first_fit(load: Load, nodes: Sequence[Amounts]) -> bool:
    """Largest kinds first, each on the first nodes with room."""
    largest: dict[str, int] = {}
    for node in nodes:
        for name, amount in node.items():
            largest[name] = max(largest.get(name, 0), amount)
    inside: list[list[tuple[Amounts, int]]] = [[] for _ in nodes]

    def size(kind: tuple[Amounts, int]) -> float:
        return max((amount / largest.get(name, 1) for name, amount in kind[0].items()), default=0)

    for item, count in sorted(load, key=size, reverse=True):
        for node, held in zip(nodes, inside, strict=True):
            number = _most(node, held, item, count)
            held.append((item, number))
            count -= number
        if count:
            return False
    return True


def _search(load: Load, nodes: Sequence[Amounts]) -> bool:
    """Depth first over the nodes' fillings; False also when it gives up."""
    if len(nodes) > MAX_NODES:
        return False
    load = sorted(load, key=lambda kind: kind[1])  # the most numerous kind last: see _fillings
    kinds = [item for item, _ in load]
    bounds = list(_bounds(load, nodes))
    lost: set[tuple[int, tuple[int, ...]]] = set()
    tries = 0

    def place(index: int, left: tuple[int, ...]) -> bool:
        """Whether the nodes from `index` on hold what is left of each kind."""
        nonlocal tries
        if not any(left):
            return True
        if (index, left) in lost or any(
            sum(map(mul, weights, left)) > sums[index] for weights, sums in bounds
        ):
            return False
        for filling in _fillings(nodes[index], kinds, left):
            tries += 1
            if tries > MAX_TRIES:
                return False
            if place(index + 1, tuple(map(sub, left, filling))):
                return True
        lost.add((index, left))
        return False

    return place(0, tuple(count for _, count in load))


def _bounds(load: Load, nodes: Sequence[Amounts]) -> Iterator[tuple[list[int], list[int]]]:
    """(weights, sums) such that nodes i, i + 1, ... hold left[k] of each kind k only if

        sum_k weights[k] left[k] <= sums[i].

    One inequality for each resource, and one for each kind as if it were alone.
    """
    for name in {name for item, _ in load for name in item}:
        yield [item.get(name, 0) for item, _ in load], _sums([n.get(name, 0) for n in nodes])
    for kind, (item, count) in enumerate(load):
        rooms = [_most(node, [], item, count) for node in nodes]
        yield [int(other == kind) for other in range(len(load))], _sums(rooms)


def _sums(numbers: Sequence[int]) -> list[int]:
    """Sums from each place to the end, the empty one included."""
    return [*accumulate([0, *reversed(numbers)])][::-1]


def _fillings(
    node: Amounts, kinds: Sequence[Amounts], left: Sequence[int], inside: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """How many of each kind to put on one node, fullest first; of the last kind always as many as it holds."""
    number = len(inside)
    held = list(zip(kinds[:number], inside, strict=True))
    most = _most(node, held, kinds[number], left[number])
    if number == len(kinds) - 1:
        yield (*inside, most)
        return
    for count in range(most, -1, -1):
        yield from _fillings(node, kinds, left, (*inside, count))
