"""A run falls apart where nothing is shared.

Under a static placement a request's engine follows from the requests before it alone, never from the state of engines, and
engines touch each other on their GPUs alone. So the engines that share GPUs, with their requests, are *components* that never
speak: each is a run of its own, at any time and on any machine. Together they give the bits of the whole run, for each of
them the same events come in the same order; what is kept is the memory of all but one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from fineserve_traces import Trace, totals

from fineserve_sim.cluster.compose.memory import charged_bytes
from fineserve_sim.cluster.engine.seat import Seat
from fineserve_sim.cluster.gpu_use import Looks, looks_at
from fineserve_sim.cluster.scenario import Gpu, Ints, Scenario
from fineserve_sim.cluster.sharing.domain import connected
from fineserve_sim.policy.controller import Controller, Route
from fineserve_sim.policy.interfaces import Instance, ModelDemand, Placement
from fineserve_sim.systems.spec import ClairvoyantSpec, KvCachedSpec, VTensorSpec

Placed = tuple[Placement, dict[str, ModelDemand]]
"""A placement, and the demand of each model that led to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    """Some of a run's engines, which share GPUs with no others, as a scenario of its own in which each is a model: their
    numbers in the whole run, in order, their requests (rows of its trace), when the whole run ends at the latest, and how it is
    looked at."""

    scenario: Scenario
    placed: Placed
    engines: tuple[int, ...]
    requests: Ints
    horizon_s: float
    looks: Looks


def why_whole(scenario: Scenario) -> str | None:
    """What keeps this scenario from being simulated in components; None where nothing does."""
    system = scenario.system
    if system.dispatch is not None or system.residency is not None:
        return "its policies look at all engines"
    if isinstance(system.scheduler, ClairvoyantSpec):
        return "its bound looks at all requests"
    if isinstance(system.memory, KvCachedSpec | VTensorSpec):
        return "its memory changes with time, after the last request of a GPU too"
    if not isinstance(scenario.trace, Trace):
        return "its requests stream in, and each component would have to read them all"
    if scenario.log is not None:
        return "its decision log is one, in the order of events"
    return "its faults are for other systems" if scenario.faults else None


def groups_of(instances: Sequence[Instance]) -> list[tuple[int, ...]]:
    """Engines, by their number, that share GPUs, directly or through others; groups in the order of their first engines."""
    return connected({engine: instance.gpus for engine, instance in enumerate(instances)})


def components(scenario: Scenario, placed: Placed, seats: Sequence[Seat]) -> list[Component]:
    """The components of ``scenario``, whose engines are ``seats``, in the order of their first engines. Engines without any
    request, and requests of models that are placed nowhere, go with the first."""
    engine_of = _engine_of_each(scenario.whole_trace, seats, placed[0].instances)
    busy = np.bincount(engine_of[engine_of >= 0], minlength=len(seats)) > 0
    groups = groups_of(placed[0].instances)
    with_work = [members for members in groups if busy[list(members)].any()]
    if not with_work:
        return []
    idle = [engine for members in groups if members not in with_work for engine in members]
    with_work[0] = tuple(sorted([*with_work[0], *idle]))
    number_of = np.zeros(len(seats) + 1, dtype=np.int64)  # by engine; the last one, -1, is nowhere
    for number, members in enumerate(with_work):
        number_of[list(members)] = number
    numbers, looks = number_of[engine_of], looks_at(totals(scenario.trace), scenario.trace.models)
    in_turn = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[in_turn], np.arange(1, len(with_work)))
    return [
        _component(scenario, placed, members, requests, engine_of[requests], looks)
        for members, requests in zip(with_work, np.split(in_turn, ends), strict=True)
    ]


def _engine_of_each(trace: Trace, seats: Sequence[Seat], instances: Sequence[Instance]) -> Ints:
    """The engine that each request waits for, shape (n,): that of the turns of its model, -1 where there is none. A prompt that
    no engine of its model can hold goes to the first, which refuses it."""
    engine_of = np.full(len(trace), -1, dtype=np.int64)
    for number, model in enumerate(trace.models):
        own = [seat for seat in seats if seat.model == model]
        able = [seat for seat in own if seat.able] or own[:1]
        if not able:
            continue
        rows = np.flatnonzero(trace.model == number)
        engine_of[rows] = able[0].engine
        if len(able) > 1:
            routes = [Route(seat.engine, instances[seat.engine].rate_per_s, seat.max_tokens) for seat in able]
            controller = Controller({model: routes})
            chosen = [controller.route(model, prompt) for prompt in trace.prompt_tokens[rows].tolist()]
            engine_of[rows] = [able[0].engine if route is None else route.engine for route in chosen]
    return engine_of


def _component(
    scenario: Scenario, placed: Placed, engines: tuple[int, ...], requests: Ints, engine_of: Ints, looks: Looks
) -> Component:
    """``engine_of`` are those of its ``requests``. A model's engines become models of their own, for turns are taken already;
    the last model stands for all that are placed nowhere."""
    (placement, demands), gpus = placed, {gpu.id: gpu for gpu in scenario.gpus}
    served = {model.id: model for model in scenario.models}
    instances = [placement.instances[engine] for engine in engines]
    ids = [f"{instance.model}#{engine}" for instance, engine in zip(instances, engines, strict=True)]
    prompts = looks.prompt_tokens
    model_of = {id: instance.model for id, instance in zip(ids, instances, strict=True)}
    nowhere = replace(scenario.models[0], id="#")
    return Component(
        scenario=replace(
            scenario,
            system=scenario.system.model_copy(update={"sharing": scenario.system.sharing.renamed(model_of)}),
            models=(*(replace(served[i.model], id=id) for i, id in zip(instances, ids, strict=True)), nowhere),
            gpus=tuple(_renamed(gpus[id], model_of) for id in sorted({gpu for i in instances for gpu in i.gpus})),
            trace=replace(
                scenario.whole_trace.take(requests),
                model=np.where(engine_of < 0, len(engines), np.searchsorted(engines, engine_of)).astype(np.int32),
                models=(*ids, nowhere.id),
            ),
        ),
        placed=(
            Placement(
                tuple(
                    replace(i, model=id, footprint_bytes=charged_bytes(i, demands, len(gpus)))
                    for i, id in zip(instances, ids, strict=True)
                )
            ),
            {id: replace(demands[i.model], id=id) for i, id in zip(instances, ids, strict=True)},
        ),
        engines=engines,
        requests=requests,
        horizon_s=looks.until_s + scenario.drain_s,
        looks=looks._replace(prompt_tokens={id: prompts[model] for id, model in model_of.items() if model in prompts}),
    )


def _renamed(gpu: Gpu, model_of: Mapping[str, str]) -> Gpu:
    return replace(gpu, sharing=gpu.sharing and gpu.sharing.renamed(model_of))
