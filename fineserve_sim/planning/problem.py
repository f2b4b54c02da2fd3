"""What a search for a plan is given, and what it looks for.

A *layout* says how each model runs and on which GPUs. How: by one of its options, a precision and a tensor-parallel degree.
Where: on one group of GPUs for each of its instances. Everything else of a plan, such as the scheduler, belongs to the system.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
from fineserve_traces import Trace

from fineserve_sim.catalog import PrecisionSpec
from fineserve_sim.cluster import Gpu, Scenario, ServedModel
from fineserve_sim.cluster.compose.facts import demand_of
from fineserve_sim.cluster.compose.memory import slots_of
from fineserve_sim.cluster.scenario import Ints
from fineserve_sim.policy.interfaces import ModelDemand
from fineserve_sim.policy.memory.ledger import MemoryLedger

Group = tuple[int, ...]


class Option(NamedTuple):
    """A way to run a model."""

    precision: PrecisionSpec
    tp: int


class Home(NamedTuple):
    """How a model runs (the number of its option) and the GPUs of each of its instances, in order."""

    option: int
    groups: tuple[Group, ...]


Layout = tuple[Home, ...]
"""The home of each model, in their order."""


class Limits(NamedTuple):
    """What a request must keep, in seconds: the TTFT limit of each model, the time per later token and the time to the last
    token (None: no limit)."""

    ttft_s: tuple[float, ...]
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """What every layout keeps. ``apart``: pairs of models that share no GPU. ``pinned``: the GPUs on which the instances of a
    model may stand. ``most_per_gpu``: engines on one GPU. ``survives``: each model keeps an instance when any one GPU, or any
    one node, is lost."""

    apart: frozenset[frozenset[str]] = frozenset()
    pinned: Mapping[str, frozenset[int]] = field(default_factory=dict)
    most_per_gpu: int | None = None
    survives: Literal["gpu", "node"] | None = None


class Part(NamedTuple):
    """Requests by which layouts are judged, and what a late one counts. All parts of a problem name the same models."""

    trace: Trace
    weight: float = 1.0


DEALT_ANEW = 0.2
"""The share of the requests that go to another model in another mix."""


def another_mix(trace: Trace, seed: int) -> Trace:
    """The trace with a part of the requests at one of the models, whichever."""
    rng = np.random.default_rng(seed)
    dealt = rng.random(len(trace)) < DEALT_ANEW
    return replace(trace, model=np.where(dealt, rng.integers(0, len(trace.models), len(trace)), trace.model))


@dataclass(frozen=True)
class Problem:
    """What a search is given.

    ``scenario``: models, GPUs and the system; its own placement and trace count for nothing. ``options``: the ways in which
    each model may run, the best first. ``parts``: the requests. ``limits`` and ``rules`` are what a plan must keep.
    """

    scenario: Scenario
    options: tuple[tuple[Option, ...], ...]
    parts: tuple[Part, ...]
    limits: Limits
    rules: Rules = Rules()

    @property
    def models(self) -> tuple[ServedModel, ...]:
        return self.scenario.models

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.scenario.gpus

    @cached_property
    def number_of(self) -> Mapping[str, int]:
        """The number of each model."""
        return {served.id: number for number, served in enumerate(self.models)}

    @cached_property
    def _rows(self) -> tuple[tuple[Ints, ...], ...]:
        """By part and model, the rows of its requests."""
        return tuple(
            tuple(np.flatnonzero(part.trace.model == part.trace.models.index(served.id)) for served in self.models)
            for part in self.parts
        )

    def requests(self, part: int, model: int, number: int = 0, of: int = 1) -> Ints:
        """Rows of the requests of instance ``number`` of ``of`` of a model: they take turns."""
        return self._rows[part][model][number::of]

    @cached_property
    def lost(self) -> tuple[float, ...]:
        """By model, what it counts to serve none of its requests."""
        return tuple(
            sum(part.weight * len(self.requests(number, model)) for number, part in enumerate(self.parts))
            for model in range(len(self.models))
        )

    def exposed(self, layout: Layout) -> list[int]:
        """The models that ``rules.survives`` is broken for, those with instances that one loss takes all."""
        found = []
        for model, home in enumerate(layout):
            places = [set(group) for group in home.groups]
            if self.rules.survives == "node":
                places = [{self.gpus[gpu].node for gpu in group} for group in home.groups]
            if self.rules.survives and places and set.intersection(*places):
                found.append(model)
        return found

    def unserved(self, layout: Layout) -> list[float]:
        """By model, what it counts that it has no GPU, or would have none after the loss that it must survive."""
        lost = [0.0 if home.groups else lost for lost, home in zip(self.lost, layout, strict=True)]
        for model in self.exposed(layout):
            lost[model] += self.lost[model]
        return lost

    @cached_property
    def worth(self) -> float:
        """What all requests count together."""
        return sum(self.lost)

    def served(self, model: int, option: int) -> ServedModel:
        """A model as it runs under one of its options."""
        how = self.options[model][option]
        return replace(self.models[model], precision=how.precision, tp=how.tp)

    @cached_property
    def demands(self) -> tuple[tuple[ModelDemand, ...], ...]:
        """By model and option, what an engine takes."""
        base = self.scenario
        return tuple(
            tuple(
                demand_of(self.served(model, option), base.gpus[0].spec, base.engine, slope=False)
                for option in range(len(options))
            )
            for model, options in enumerate(self.options)
        )

    @cached_property
    def first(self) -> tuple[int, ...]:
        """By model, the first option of which a GPU holds an engine: how it runs until a move says otherwise."""
        room_bytes = slots_of(self.scenario)[0].memory_bytes
        return tuple(
            next((number for number, each in enumerate(demands) if each.engine_bytes <= room_bytes), len(demands) - 1)
            for demands in self.demands
        )

    def ledger(self, layout: Layout) -> MemoryLedger | None:
        """What the engines of a layout claim; None where they do not fit."""
        ledger = MemoryLedger.of(slots_of(self.scenario))
        for model, home in enumerate(layout):
            engine_bytes = self.demands[model][home.option].engine_bytes
            for number, group in enumerate(home.groups):
                if not ledger.has_room(group, engine_bytes):
                    return None
                ledger.claim((model, number), group, engine_bytes)
        return ledger

    def allows(self, layout: Layout) -> bool:
        """Whether the engines of a layout fit their GPUs and keep the rules."""
        rules, here = self.rules, residents(layout)
        if self.ledger(layout) is None:
            return False
        if rules.most_per_gpu is not None and any(len(each) > rules.most_per_gpu for each in here.values()):
            return False
        if any(
            frozenset((self.models[a].id, self.models[b].id)) in rules.apart
            for each in here.values()
            for a, b in combinations(sorted(set(each)), 2)
        ):
            return False
        return all(
            rules.pinned[served.id].issuperset(group)
            for served, home in zip(self.models, layout, strict=True)
            if served.id in rules.pinned
            for group in home.groups
        )


def impossible(problem: Problem) -> str | None:
    """Why no layout can give every model a GPU, in one line; None where nothing simple forbids it."""
    slots = slots_of(problem.scenario)
    if len({slot.kind for slot in slots}) > 1:
        return "a plan is searched on GPUs of one kind; these are of several"
    least = [min(demands, key=lambda demand: demand.tp * demand.engine_bytes) for demands in problem.demands]
    for served, demands in zip(problem.models, problem.demands, strict=True):
        if not any(demand.engine_bytes <= slots[0].memory_bytes for demand in demands):
            takes = min(demand.engine_bytes for demand in demands) / 2**30
            has = slots[0].memory_bytes / 2**30
            return f"model {served.id} takes {takes:.1f} GiB of a GPU beside KV, which has {has:.1f} GiB usable"
    takes, has = sum(each.tp * each.engine_bytes for each in least), sum(slot.memory_bytes for slot in slots)
    if takes > has:
        return f"the models take {takes / 2**30:.0f} GiB beside KV, {len(slots)} GPUs have {has / 2**30:.0f} GiB usable"
    if why := _cannot_survive(problem, takes, has):
        return why
    engines = sum(min(demand.tp for demand in demands) for demands in problem.demands)
    most = problem.rules.most_per_gpu
    if most is not None and engines > most * len(slots):
        needed = -(-engines // most)
        return (
            f"{engines} engines do not stand on {len(slots)} GPUs with at most {most} on each; {needed} GPUs would do"
        )
    return None


def _cannot_survive(problem: Problem, takes: float, has: float) -> str | None:
    """Why no layout survives the loss of a GPU or a node, where an engine of each model takes so many bytes."""
    gpus, what = problem.gpus, problem.rules.survives
    if what and 2 * takes > has:
        return (
            f"two engines of each model, to survive the loss of a {what}, take {2 * takes / 2**30:.0f} GiB beside KV, "
            f"{len(gpus)} GPUs have {has / 2**30:.0f} GiB usable"
        )
    if what == "node" and len({gpu.node for gpu in gpus}) < 2:
        return f"{len(gpus)} GPUs are one node, whose loss nothing survives"
    return None


def residents(layout: Layout) -> dict[int, list[int]]:
    """The models on each GPU, an entry an engine."""
    here: dict[int, list[int]] = {}
    for model, home in enumerate(layout):
        for group in home.groups:
            for gpu in group:
                here.setdefault(gpu, []).append(model)
    return here
