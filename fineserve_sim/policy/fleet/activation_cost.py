"""How long it takes until an activated model serves (Prism, section 5.2 and Fig. 9).

Weights come from host memory. A plain copy to one GPU runs far below what its PCIe link could do. Prism loads a shard over
all GPUs of the node at once, each staging a part and passing it on over NVLink; the host memory of the node then sets
the limit. From the latencies that the paper reports for BF16 weights follow the three rates below:

    8B on one GPU in 0.7 s, 14B in 1.3 s:   29.5 GB / 1.3 s  = 22.7 GB/s to one GPU
    70B on eight GPUs in 1.5 s:             141 GB / 1.5 s   = 94 GB/s over the node
    14B by plain copy in 7.1 s:             29.5 GB / 7.1 s  = 4.2 GB/s to one GPU

Tensor-parallel ranks load at the same time with or without parallel loading. Activations that overlap on a node share its
rate; a GPU that receives two shards shares its own. Without an engine pool a new engine starts before it loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GPU_BYTES_PER_S = 22.7e9
NODE_BYTES_PER_S = 94e9
PLAIN_BYTES_PER_S = 4.2e9
SWITCH_S = (
    0.02  # taking an engine from the pool and aligning its address space; our assumption, the paper has no figure
)
ENGINE_START_S = 30.0  # Prism: "tens of seconds"; our reading, the same as QLM's swap (systems.md 6.4)


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """Seconds from ``Activate`` to ``EngineReady``: ``overhead_s`` of engine work, then the transfer of the weights at no more
    than these rates, which may be infinite (then the overhead is all)."""

    overhead_s: float
    gpu_bytes_per_s: float
    node_bytes_per_s: float

    def alone_s(self, shard_bytes: int, ranks: int = 1) -> float:
        """A model of ``ranks`` shards that loads with nobody beside it on its node."""
        return self.overhead_s + max(shard_bytes / self.gpu_bytes_per_s, ranks * shard_bytes / self.node_bytes_per_s)


def activation_cost(
    *, engine_pool: bool = True, parallel_loading: bool = True, engine_start_s: float = ENGINE_START_S
) -> ActivationCost:
    """The cost with Prism's two optimisations switched on or off."""
    overhead_s = SWITCH_S + (0.0 if engine_pool else engine_start_s)
    if parallel_loading:
        return ActivationCost(overhead_s, GPU_BYTES_PER_S, NODE_BYTES_PER_S)
    return ActivationCost(overhead_s, PLAIN_BYTES_PER_S, NODE_BYTES_PER_S)


@dataclass(slots=True)
class Loading:
    """The transfer of one engine's weights: ``left_bytes`` are still to come on each of its GPUs, all of one node."""

    gpus: tuple[int, ...]
    left_bytes: float


def transfer_rates(cost: ActivationCost, loadings: Sequence[Loading], node_of: Mapping[int, int]) -> list[float]:
    """Bytes per second at which every shard of each loading advances now, all sharing links max-min fairly.

    A GPU's link carries ``gpu_bytes_per_s``, a node's host memory ``node_bytes_per_s``. Max-min by progressive filling: all
    rates grow alike until a link is full; what goes over it keeps its rate, the others go on.
    """
    links: dict[tuple[str, int], float] = {}
    users: list[dict[tuple[str, int], int]] = []  # how many shards of each loading go over which link
    for loading in loadings:
        node = ("node", node_of[loading.gpus[0]])
        users.append({**{("gpu", gpu): 1 for gpu in loading.gpus}, node: len(loading.gpus)})
        links |= {link: cost.node_bytes_per_s if link[0] == "node" else cost.gpu_bytes_per_s for link in users[-1]}
    rates = [0.0] * len(loadings)
    growing = set(range(len(loadings)))
    while growing:
        load = {link: sum(users[index].get(link, 0) for index in growing) for link in links}
        step = min(links[link] / load[link] for link in links if load[link])
        full = {link for link in links if load[link] and links[link] / load[link] <= step * (1 + 1e-12)}
        for link in links:
            links[link] -= step * load[link]
        for index in growing:
            rates[index] += step
        growing = {index for index in growing if not full & users[index].keys()}
    return rates


class Loader:
    """The activations under way on all nodes: engine work first, then the transfer. Its owner asks when something changes
    next, and moves it on to that time or an earlier one."""

    def __init__(self, cost: ActivationCost, node_of: Mapping[int, int]) -> None:
        self._cost = cost
        self._node_of = dict(node_of)
        self._now = 0.0
        self._preparing: dict[int, tuple[float, Loading]] = {}  # until when
        self._moving: dict[int, Loading] = {}
        self._rates: list[float] = []  # of what moves, in its order
        self._done: list[int] = []

    def begin(self, now: float, engine: int, gpus: tuple[int, ...], shard_bytes: int) -> None:
        """An activation starts at ``now``. Raises ValueError for an engine that loads already."""
        if engine in self._preparing or engine in self._moving:
            raise ValueError(f"engine {engine} loads already")
        self._advance(now)
        self._preparing[engine] = (now + self._cost.overhead_s, Loading(gpus, shard_bytes))

    def cancel(self, now: float, engine: int) -> None:
        """The engine does not load any more; nothing happens if it did not."""
        self._advance(now)
        self._preparing.pop(engine, None)
        if self._moving.pop(engine, None) is not None:
            self._share()
        if engine in self._done:
            self._done.remove(engine)

    def next_change_s(self) -> float:
        """When the next transfer begins or ends; infinity when nothing loads."""
        if self._done:
            return self._now
        begins = [until_s for until_s, _ in self._preparing.values()]
        ends = [
            self._now + loading.left_bytes / rate
            for loading, rate in zip(self._moving.values(), self._rates, strict=True)
        ]
        return min([*begins, *ends], default=float("inf"))

    def advance(self, now: float) -> list[int]:
        """Engines whose weights are there at ``now``, in the order of their ids. ``now`` must not lie beyond
        ``next_change_s``."""
        self._advance(now)
        done, self._done = sorted(self._done), []
        return done

    def _advance(self, now: float) -> None:
        elapsed_s = now - self._now
        self._now = now
        ended = []
        for (engine, loading), rate in zip(self._moving.items(), self._rates, strict=True):
            if elapsed_s > 0:  # a rate may be infinite
                loading.left_bytes -= rate * elapsed_s
            if now + loading.left_bytes / rate <= now:  # less than the clock can tell
                ended.append(engine)
        ready = [engine for engine, (until_s, _) in self._preparing.items() if until_s <= now]
        for engine in ended:
            del self._moving[engine]
        for engine in ready:
            self._moving[engine] = self._preparing.pop(engine)[1]
        self._done += ended
        if ended or ready:
            self._share()

    def _share(self) -> None:
        self._rates = transfer_rates(self._cost, list(self._moving.values()), self._node_of)
