"""Weights on their way to GPUs: engine work first, then transfers that share links max-min fairly.

The rates are those of ``policy/fleet/activation_cost.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.policy.fleet.activation_cost import ActivationCost


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
        load = dict.fromkeys(links, 0)
        for index in growing:
            for link, shards in users[index].items():
                load[link] += shards
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
