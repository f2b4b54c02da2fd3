"""The input of a search for a plan, and its goal.

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

from fineserve_sim.catalog import GpuSpec, PrecisionSpec
from fineserve_sim.cluster import Gpu, Scenario, ServedModel
from fineserve_sim.cluster.compose.facts import demand_on
from fineserve_sim.cluster.compose.memory import kinds_of, slots_of
from fineserve_sim.cluster.scenario import Ints
from fineserve_sim.policy.controller import Turns
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.placement import split_rate, tp_groups

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


class Member(NamedTuple):
    """An engine as its island sees it: instance ``number`` of a model whose instances are on GPUs of these ``kinds``.
    ``gpus``: the GPUs of its island."""

    model: int
    option: int
    number: int
    kinds: tuple[int, ...]
    gpus: Group

    @property
    def kind(self) -> int:
        """The kind of its GPUs."""
        return self.kinds[self.number]


class Limits(NamedTuple):
    """Limits of a request in seconds: the TTFT of each model, the time per later token and the time to the last token (None:
    no limit)."""

    ttft_s: tuple[float, ...]
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that every layout keeps. ``apart``: pairs of models that share no GPU. ``pinned``: the GPUs on which the instances
    of a model may stand. ``most_per_gpu``: engines on one GPU. ``survives``: each model keeps an instance when any one GPU, or
    any one node, is lost."""

    apart: frozenset[frozenset[str]] = frozenset()
    pinned: Mapping[str, frozenset[int]] = field(default_factory=dict)
    most_per_gpu: int | None = None
    survives: Literal["gpu", "node"] | None = None


class Part(NamedTuple):
    """Requests that judge layouts, and the weight of a late one. All parts of a problem name the same models."""

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
    """The input of a search.

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

    def requests(self, part: int, model: int) -> Ints:
        """Rows of the requests of a model."""
        return self._rows[part][model]

    def requests_of(self, part: int, member: Member) -> Ints:
        """Rows of the requests of an engine: instances take turns, by the most that each can serve."""
        rows, rates = self._rows[part][member.model], self.rates(member)
        if len(set(rates)) == 1:
            return rows[member.number :: len(rates)]
        turns = Turns(rates)
        whose = np.array([turns.next() for _ in rows], dtype=np.int64)
        own: Ints = rows[whose == member.number]
        return own

    def rates(self, member: Member) -> list[float]:
        """Requests a second of each instance of the member's model."""
        return split_rate(self.demands[member.model][member.option], member.kinds)

    def share(self, member: Member) -> float:
        """The part of its model's requests that an engine has."""
        rates = self.rates(member)
        return rates[member.number] / sum(rates)

    @cached_property
    def lost(self) -> tuple[float, ...]:
        """The loss of each model when none of its requests is served."""
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
    def slots(self) -> tuple[GpuSlot, ...]:
        """The GPUs as placement sees them, in their order."""
        return tuple(slots_of(self.scenario))

    @cached_property
    def kinds(self) -> tuple[GpuSpec, ...]:
        """The kinds of GPU, by number."""
        return tuple(kinds_of(self.gpus))

    @cached_property
    def kind_of(self) -> Mapping[int, int]:
        """The number of the kind of each GPU."""
        return {slot.id: slot.kind for slot in self.slots}

    @cached_property
    def demands(self) -> tuple[tuple[ModelDemand, ...], ...]:
        """The memory that an engine takes, by model and option."""
        return tuple(
            tuple(
                demand_on(self.served(model, option), self.kinds, self.scenario.engine, slope=False)
                for option in range(len(options))
            )
            for model, options in enumerate(self.options)
        )

    @cached_property
    def first(self) -> tuple[int, ...]:
        """By model, the first option for which there are GPUs that hold an engine: how it runs until a move says otherwise."""
        room_bytes = max(slot.memory_bytes for slot in self.slots)
        return tuple(
            next(
                (
                    number
                    for number, each in enumerate(demands)
                    if each.engine_bytes <= room_bytes and tp_groups(self.slots, each.tp)
                ),
                len(demands) - 1,
            )
            for demands in self.demands
        )

    def ledger(self, layout: Layout) -> MemoryLedger | None:
        """The memory claims of a layout's engines; None where they do not fit."""
        ledger = MemoryLedger.of(self.slots)
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


def residents(layout: Layout) -> dict[int, list[int]]:
    """The models on each GPU, an entry an engine."""
    here: dict[int, list[int]] = {}
    for model, home in enumerate(layout):
        for group in home.groups:
            for gpu in group:
                here.setdefault(gpu, []).append(model)
    return here
