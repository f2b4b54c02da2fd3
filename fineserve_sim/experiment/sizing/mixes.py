"""The cheapest mix of two kinds of GPU on which a system keeps the targets.

Each kind alone has been searched, so a mix with some GPUs of both is of interest only below the cheapest of these
(``bisection.cheapest_pair``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from fineserve_sim.catalog import list_prices
from fineserve_sim.experiment.file.schema import Cluster
from fineserve_sim.experiment.sizing.bisection import cheapest_pair
from fineserve_sim.experiment.sizing.probe import Attained, Prober, SizingError, named
from fineserve_sim.experiment.sizing.search import GPUS, Answer, Axis, most_of, runnable
from fineserve_sim.experiment.sizing.variants import Variant

Found = Sequence[tuple[Answer, Prober]]


class Kind(NamedTuple):
    """A kind of GPU, and dollars an hour of one (None: not known)."""

    gpu: str
    usd_per_gpu_hour: float | None


def kinds_of(gpus: Sequence[str], prices: Mapping[str, float], axis: Axis) -> list[Kind]:
    """The kinds to mix, by ``prices`` as ``variants`` has them or by the list. Raises SizingError for fewer than two kinds, and
    where no number of GPUs is searched."""
    if axis is not GPUS or len(gpus) < 2:
        raise SizingError("--mix: needs --over gpus and two --gpu at least, such as --gpu h100-sxm --gpu l40s")
    listed = list_prices().usd_per_gpu_hour
    return [Kind(gpu, prices.get(gpu, prices.get("", listed.get(gpu)))) for gpu in gpus]


def size_mixed(
    prober: Prober, found: Found, kinds: Sequence[Kind], degrees: Sequence[int | None], *, most_gpus: int | None
) -> Iterator[tuple[Answer, Prober]]:
    """By degree, system and pair of kinds the cheapest mix, where it costs less than each of them alone in ``found``. Where a
    price is not known, GPUs are counted."""
    for tp in (degrees or [None]) if kinds else ():
        own = Variant(tp=tp).of(prober)
        for system in runnable(prober.file()):
            alone = [answer for answer, _ in found if (answer.system, answer.tp) == (system, tp)]
            for pair in combinations(kinds, 2):
                if (mixed := _Mix(own, system, pair, most_of(prober, most_gpus)).cheapest(alone)) is not None:
                    yield replace(mixed[0], tp=tp), mixed[1]


class _Mix:
    """The search of one system among the mixes of one pair of kinds."""

    def __init__(self, prober: Prober, system: str, pair: Sequence[Kind], most: int) -> None:
        self._prober, self._system, self._pair, self._most = prober, system, pair, most
        priced = all(kind.usd_per_gpu_hour is not None for kind in pair)
        self._costs = [(kind.usd_per_gpu_hour or 0.0) if priced else 1.0 for kind in pair]
        self._probes: dict[tuple[int, int], Attained] = {}

    def cheapest(self, alone: Sequence[Answer]) -> tuple[Answer, Prober] | None:
        """The cheapest mix below the ``alone`` ones, with its prober; None where there is none."""
        cost_of = dict(zip((kind.gpu for kind in self._pair), self._costs, strict=True))
        costs = [answer.best.value * cost_of[answer.gpu] for answer in alone if answer.best and answer.gpu in cost_of]
        below, most = min(costs, default=math.inf), self._most
        found = cheapest_pair((self._costs[0], self._costs[1]), (most, most), below, self._holds, together=most)
        if found is None:
            return None
        prober = self._of(*found)
        setup = prober.file().setup
        title, probes = setup.systems[self._system].title, tuple(self._probes.values())
        return Answer(self._system, title, self._probes[found], probes, setup.gpu_name), prober

    def _holds(self, first: int, second: int) -> bool:
        own, count = self._of(first, second), first + second
        found = own.ask(self._system, GPUS.key, count)
        if found.holds and found.early:
            found = own.ask(self._system, GPUS.key, count, fully=True)
        self._probes[first, second] = found
        return found.holds

    def _of(self, first: int, second: int) -> Prober:
        """Asks about so many of each kind."""
        file = self._prober.file().file.cluster
        nodes: list[dict[str, Any]] = [
            {"gpu": kind.gpu, "count": count, "usd_per_gpu_hour": kind.usd_per_gpu_hour}
            for kind, count in zip(self._pair, (first, second), strict=True)
        ]
        if isinstance(file, Cluster) and file.sharing is not None and not isinstance(file.sharing, list):
            nodes = [node | {"sharing": file.sharing.model_dump(mode="json")} for node in nodes]
        links = {"gpus_per_node": file.gpus_per_node, "network_bytes_per_s": file.network_bytes_per_s}
        name = " + ".join(f"{node['count']} {node['gpu']}" for node in nodes)
        return replace(
            self._prober,
            overrides=[*self._prober.overrides, ("cluster", json.dumps({"nodes": nodes} | links))],
            given=True,
            told=named(self._prober.told, name),
        )
