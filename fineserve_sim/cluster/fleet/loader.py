"""Weights on their way to GPUs: engine work first, then transfers that share links max-min fairly.

The rates are those of ``policy/fleet/activation_cost.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.policy.fleet.activation_cost import ActivationCost


@dataclass(slots=True)
class Loading:
    """The transfer of one engine's weights: ``left_bytes`` are still to come on each of its GPUs, all of one node. It begins at
    ``begins_s``, and advances at ``rate`` bytes per second then."""

    gpus: tuple[int, ...]
    left_bytes: float
    begins_s: float = 0.0
    rate: float = 0.0


def transfer_rates(cost: ActivationCost, loadings: Sequence[Loading], node_of: Mapping[int, int]) -> list[float]:
    """Bytes per second at which every shard of each loading advances now, all sharing links max-min fairly.

    A GPU's link carries ``gpu_bytes_per_s``, a node's host memory ``node_bytes_per_s``. Max-min by progressive filling: all
    rates grow alike until a link is full; what goes over it keeps its rate, the others go on.
    """
    users = [  # how many shards of each loading go over which link
        {("node", node_of[loading.gpus[0]]): len(loading.gpus)} | {("gpu", gpu): 1 for gpu in loading.gpus}
        for loading in loadings
    ]
    links = {
        link: cost.node_bytes_per_s if link[0] == "node" else cost.gpu_bytes_per_s for use in users for link in use
    }
    rates = [0.0] * len(loadings)
    growing = set(range(len(loadings)))
    while growing:
        load = Counter[tuple[str, int]]()
        for index in growing:
            load.update(users[index])
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
    next, and moves it on to that time or an earlier one."""

    def __init__(self, cost: ActivationCost, node_of: Mapping[int, int]) -> None:
        self._cost = cost
        self._node_of = dict(node_of)
        self._now = 0.0
        self._loadings: dict[int, Loading] = {}  # by engine

    def begin(self, now: float, engine: int, gpus: tuple[int, ...], shard_bytes: int) -> None:
        """An activation starts at ``now``. Raises ValueError for an engine that loads already."""
        if engine in self._loadings:
            raise ValueError(f"engine {engine} loads already")
        self._move_on(now)
        self._loadings[engine] = Loading(gpus, shard_bytes, now + self._cost.overhead_s)

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
        """Bring all transfers up to now. Those that are there are returned, the others share the links from here."""
        elapsed_s, self._now = now - self._now, now
        there, moving = [], []
        for engine, loading in self._loadings.items():
            if loading.rate and elapsed_s > 0:  # a rate may be infinite
                loading.left_bytes -= loading.rate * elapsed_s
            if loading.rate and now + loading.left_bytes / loading.rate <= now:  # less than the clock can tell
                there.append(engine)
            elif loading.begins_s <= now:
                moving.append(loading)
        for loading, rate in zip(moving, transfer_rates(self._cost, moving, self._node_of), strict=True):
            loading.rate = rate
        return there
