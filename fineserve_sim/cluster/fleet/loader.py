"""Weights on their way to GPUs: engine work first, then transfers that share links max-min fairly.

Weights come from host memory. A plain copy to one GPU runs far below the rate of its PCIe link. Prism loads a shard over
all GPUs of the node at once: each stages a part and passes it on over NVLink. The host memory of the node then sets
the limit. The three rates below follow from the latencies that the paper reports for BF16 weights:

    8B on one GPU in 0.7 s, 14B in 1.3 s:   29.5 GB / 1.3 s  = 22.7 GB/s to one GPU
    70B on eight GPUs in 1.5 s:             141 GB / 1.5 s   = 94 GB/s over the node
    14B by plain copy in 7.1 s:             29.5 GB / 7.1 s  = 4.2 GB/s to one GPU

Tensor-parallel ranks load at the same time with or without parallel loading. Activations that overlap on a node share its
rate; a GPU that receives two shards shares its own. Without an engine pool a new engine starts before it loads.

Weights may come from several media at once. Media share the link of a GPU, which is as fast as the fastest of them there.
Each has its own rates to a GPU and to a node beside it: weights from disk leave the rest of the link to those from host memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GPU_BYTES_PER_S = 22.7e9
NODE_BYTES_PER_S = 94e9
PLAIN_BYTES_PER_S = 4.2e9
SWITCH_S = 0.02  # an engine from the pool, its address space aligned; our assumption, the paper has no figure
ENGINE_START_S = 30.0  # Prism: "tens of seconds"; our reading, the same as QLM's swap (systems.md 6.4)


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """Seconds from ``Activate`` to ``EngineReady``: ``overhead_s`` of engine work, then the transfer of the weights at no more
    than these rates, which may be infinite (then the overhead is all)."""

    overhead_s: float
    gpu_bytes_per_s: float
    node_bytes_per_s: float

    def alone_s(self, shard_bytes: int, ranks: int = 1) -> float:
        """A model of ``ranks`` shards that loads while nothing else loads on its node."""
        return self.overhead_s + max(shard_bytes / self.gpu_bytes_per_s, ranks * shard_bytes / self.node_bytes_per_s)

    @property
    def medium(self) -> tuple[float, float]:
        """Where the weights come from, known by its rates."""
        return self.gpu_bytes_per_s, self.node_bytes_per_s


def activation_cost(
    *, engine_pool: bool = True, parallel_loading: bool = True, engine_start_s: float = ENGINE_START_S
) -> ActivationCost:
    """The cost with Prism's two optimisations switched on or off."""
    overhead_s = SWITCH_S + (0.0 if engine_pool else engine_start_s)
    return ActivationCost(overhead_s, GPU_BYTES_PER_S if parallel_loading else PLAIN_BYTES_PER_S, NODE_BYTES_PER_S)


@dataclass(slots=True)
class Loading:
    """The transfer of one engine's weights at this cost: ``left_bytes`` are still to come on each of its GPUs, all of one node.
    It begins at ``begins_s``, and advances at ``rate`` bytes per second then."""

    cost: ActivationCost
    gpus: tuple[int, ...]
    left_bytes: float
    begins_s: float = 0.0
    rate: float = 0.0


Link = tuple[str, int] | tuple[str, int, tuple[float, float]]
"""What GPUs or nodes receive over, by its number; of one medium, or of all."""


def _links(loading: Loading, node: int) -> dict[Link, tuple[int, float]]:
    """The links that a loading goes over: how many of its shards do, and what it gets there alone."""
    cost, medium = loading.cost, loading.cost.medium
    found: dict[Link, tuple[int, float]] = {("node", node, medium): (len(loading.gpus), cost.node_bytes_per_s)}
    for gpu in loading.gpus:
        found["gpu", gpu, medium] = found["gpu", gpu] = 1, cost.gpu_bytes_per_s
    return found


def transfer_rates(loadings: Sequence[Loading], node_of: Mapping[int, int]) -> list[float]:
    """Bytes per second at which every shard of each loading advances now, all sharing links max-min fairly.

    From one medium a GPU gets ``gpu_bytes_per_s``, a node ``node_bytes_per_s``; from all media a GPU gets what the fastest
    gives. Max-min by progressive filling: all rates grow alike until a link is full; what goes over it keeps its rate, the
    others go on.
    """
    users = [_links(loading, node_of[loading.gpus[0]]) for loading in loadings]
    links: dict[Link, float] = {}  # the fastest medium over each
    for use in users:
        for link, (_, most) in use.items():
            links[link] = max(most, links.get(link, 0.0))
    rates = [0.0] * len(loadings)
    growing = set(range(len(loadings)))
    while growing:
        load = Counter[Link]()
        for index in growing:
            load.update({link: shards for link, (shards, _) in users[index].items()})
        step = min(links[link] / shards for link, shards in load.items())
        full = {link for link, shards in load.items() if links[link] / shards <= step * (1 + 1e-12)}
        for link, shards in load.items():
            links[link] -= step * shards
        for index in growing:
            rates[index] += step
        growing = {index for index in growing if not full & users[index].keys()}
    return rates


class Loader:
    """The activations under way on all nodes: engine work first, then the transfer. Its owner asks when something changes
    next, and advances it to that time or an earlier one."""

    def __init__(self, node_of: Mapping[int, int]) -> None:
        self._node_of = dict(node_of)
        self._now = 0.0
        self._loadings: dict[int, Loading] = {}  # by engine

    def begin(self, now: float, engine: int, gpus: tuple[int, ...], shard_bytes: int, cost: ActivationCost) -> None:
        """An activation of this cost starts at ``now``. Raises ValueError for an engine that loads already."""
        if engine in self._loadings:
            raise ValueError(f"engine {engine} loads already")
        self._move_on(now)
        self._loadings[engine] = Loading(cost, gpus, shard_bytes, now + cost.overhead_s)

    def cancel(self, now: float, engine: int) -> None:
        """The engine does not load any more; nothing happens if it did not."""
        self._loadings.pop(engine, None)
        self._move_on(now)

    def next_change_s(self) -> float:
        """When the next transfer begins or ends; infinity when nothing loads."""
        ends_s = [
            self._now + max(0.0, each.left_bytes / each.rate) if each.rate else each.begins_s
            for each in self._loadings.values()
        ]
        return min(ends_s, default=float("inf"))

    def advance(self, now: float) -> list[int]:
        """Engines whose weights are there at ``now``, in the order of their ids. ``now`` must not lie beyond
        ``next_change_s``."""
        there = sorted(self._move_on(now))
        for engine in there:
            del self._loadings[engine]
        return there

    def _move_on(self, now: float) -> list[int]:
        """Bring all transfers up to now. Returns the engines whose weights are there; the others share the links from here."""
        elapsed_s, self._now = now - self._now, now
        there, moving = [], []
        for engine, loading in self._loadings.items():
            if loading.rate and elapsed_s > 0:  # a rate may be infinite
                loading.left_bytes -= loading.rate * elapsed_s
            if loading.rate and now + loading.left_bytes / loading.rate <= now:  # less than the clock can tell
                there.append(engine)
            elif loading.begins_s <= now:
                moving.append(loading)
        for loading, rate in zip(moving, transfer_rates(moving, self._node_of), strict=True):
            loading.rate = rate
        return there
