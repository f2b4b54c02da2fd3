"""A run falls apart where nothing is shared.

Under a static placement a request's engine depends on the earlier requests alone, never on the state of engines. Engines
affect each other only through shared GPUs. So the engines that share GPUs, with their requests, are *components* that never
speak: each is a run of its own, at any time and on any machine. Together they give the bits of the whole run, for in each of
them the same events come in the same order. A run in components saves the memory of all components but one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from fineserve_traces import Trace, totals
from numpy.typing import NDArray

from fineserve_sim.cluster.compose.facts import demands_of
from fineserve_sim.cluster.compose.memory import charged_bytes
from fineserve_sim.cluster.compose.models import Builder
from fineserve_sim.cluster.compose.place import Placed, place
from fineserve_sim.cluster.engine.state import Seat
from fineserve_sim.cluster.looks import Looks, Note, fractions, looks_at, shares_of
from fineserve_sim.cluster.run import WholeTrace
from fineserve_sim.cluster.samples import PER_COLUMN, PER_GPU
from fineserve_sim.cluster.scenario import OUTCOMES, Ended, GpuUse, Ints, RunResult, Scenario, Timeline
from fineserve_sim.cluster.sharing.domain import connected
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.controller import Controller
from fineserve_sim.policy.interfaces import Placement
from fineserve_sim.systems.spec import ClairvoyantSpec, KvCachedSpec, VTensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    """Some of a run's engines, which share GPUs with no others, as a scenario of its own in which each engine is a model.

    ``engines`` are their numbers in the whole run, in order. ``requests`` are rows of its trace. ``looks`` say how the whole
    run is looked at.
    """

    scenario: Scenario
    placed: Placed
    engines: tuple[int, ...]
    requests: Ints
    looks: Looks

    @property
    def gpus(self) -> list[int]:
        return [gpu.id for gpu in self.scenario.gpus]


class Piece(NamedTuple):
    """The outcome of one component. The last row of its timeline, beyond its samples, is its state after its end.
    ``uses``: sums over the looks at its GPUs."""

    result: RunResult
    notes: Sequence[Note]
    uses: Mapping[int, GpuUse]


class Apart(NamedTuple):
    """A run taken apart: its components, in the order of their first engines, and the facts that ``merged`` needs. ``steps``
    has the step times of each engine."""

    scenario: Scenario
    placement: Placement
    steps: Mapping[int, StepModel]
    components: Sequence[Component]

    def merged(self, pieces: Iterable[Piece]) -> RunResult:
        """The result of the whole from the pieces of all components, in their order."""
        whole = WholeTrace(len(self.scenario.whole_trace))
        capacity_of: dict[int, int] = {}
        notes: list[Note] = []
        timelines: list[Timeline] = []
        end_s = loop_cpu_s = 0.0
        iterations = events = 0
        uses: dict[int, GpuUse] = {}
        for component, (result, own_notes, own_uses) in zip(self.components, pieces, strict=True):
            engines = np.array([*component.engines, -1], dtype=np.int32)  # -1 stays -1
            own = {name: getattr(result, name) for name in OUTCOMES} | {"engine": engines[result.engine]}
            visits = replace(
                result.visits,
                request=component.requests[result.visits.request],
                engine=engines[result.visits.engine],
                stages={engine: (engine,) for engine in component.engines},
            )
            whole(Ended(component.requests, **own, visits=visits))
            notes += [(sample, component.engines[engine], batch) for sample, engine, batch in own_notes]
            capacity_of |= dict(zip(component.gpus, result.kv_capacity_bytes, strict=True))
            uses |= own_uses
            timelines.append(result.timeline)
            end_s = max(end_s, result.end_s)
            iterations, events = iterations + result.iterations, events + result.events
            loop_cpu_s += result.loop_cpu_s
        notes.sort(key=lambda note: note[:2])
        gpus = sorted(capacity_of)
        timeline = self._timeline(timelines, gpus)
        looks = int(np.count_nonzero(timeline.time_s <= self.scenario.whole_trace.arrival_s[-1]))
        return RunResult(
            **whole.columns,
            placement=self.placement,
            kv_capacity_bytes=tuple(capacity_of[gpu] for gpu in gpus),
            timeline=timeline,
            end_s=end_s,
            iterations=iterations,
            events=events,
            loop_cpu_s=loop_cpu_s,
            step_times=shares_of(notes, self.steps),
            step_samples=len(notes),
            gpu_use=fractions(uses, looks),
        )

    def _timeline(self, timelines: Sequence[Timeline], gpus: Sequence[int]) -> Timeline:
        longest = max((timeline.time_s for timeline in timelines), key=len)[:-1]
        engines = [np.array(component.engines) for component in self.components]
        places = [np.searchsorted(gpus, component.gpus) for component in self.components]

        def table(name: str, columns: Sequence[NDArray[np.intp]]) -> Ints:
            whole = np.zeros((len(longest), sum(map(len, columns))), dtype=np.int64)
            for timeline, own in zip(timelines, columns, strict=True):
                part: Ints = getattr(timeline, name)
                whole[: len(part) - 1, own] = part[:-1]
                whole[len(part) - 1 :, own] = part[-1]
            return whole

        return Timeline(
            time_s=longest,
            engine_models=tuple(instance.model for instance in self.placement.instances),
            **{name: table(name, engines) for name in PER_COLUMN},
            **{name: table(name, places) for name in PER_GPU},
        )


def why_whole(scenario: Scenario) -> str | None:
    """The reason why this scenario cannot be simulated in components; None where it can."""
    system = scenario.system
    if system.dispatch is not None or system.residency is not None:
        return "its policies look at all engines"
    if isinstance(system.scheduler, ClairvoyantSpec):
        return "its bound looks at all requests"
    if isinstance(system.memory, KvCachedSpec | VTensorSpec):
        return "its memory changes with time, after the last request of a GPU too"
    if not isinstance(scenario.trace, Trace):
        return "its requests stream in, and each component would have to read them all"
    if scenario.clients is not None:
        return "its clients send when they are answered, wherever that is"
    return _why_one_piece(scenario)


def _why_one_piece(scenario: Scenario) -> str | None:
    if any(served.ranks > 1 for served in scenario.models):
        return "its data-parallel ranks step together"
    if scenario.log is not None:
        return "its decision log is one, in the order of events"
    return "its faults are for other systems" if scenario.faults else None


def taken_apart(scenario: Scenario, placed: Placed | None = None) -> Apart | None:
    """The components of ``scenario``, for which ``why_whole`` is None; None where there are fewer than two. Engines without
    any request, and requests of models that are placed nowhere, go with the first. Raises ScenarioError as ``simulate``."""
    placed = placed or place(scenario, demands_of(scenario))
    groups = connected({engine: instance.gpus for engine, instance in enumerate(placed[0].instances)})
    if len(groups) < 2:
        return None
    build = Builder(scenario, placed)
    seats = build.seats()
    engine_of = _engine_of_each(scenario.whole_trace, seats, build)
    busy = np.bincount(engine_of[engine_of >= 0], minlength=len(seats)) > 0
    with_work = [members for members in groups if busy[list(members)].any()]
    if len(with_work) < 2:
        return None
    idle = [engine for members in groups if members not in with_work for engine in members]
    with_work[0] = tuple(sorted([*with_work[0], *idle]))
    number_of = np.zeros(len(seats) + 1, dtype=np.int64)  # by engine; the last one, -1, is nowhere
    for number, members in enumerate(with_work):
        number_of[list(members)] = number
    numbers, looks = number_of[engine_of], looks_at(totals(scenario.trace), scenario.trace.models)
    in_turn = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[in_turn], np.arange(1, len(with_work)))
    components = [
        _component(scenario, placed, members, requests, engine_of[requests], looks)
        for members, requests in zip(with_work, np.split(in_turn, ends), strict=True)
    ]
    return Apart(scenario, placed[0], {seat.engine: seat.step for seat in seats}, components)


def _engine_of_each(trace: Trace, seats: Sequence[Seat], build: Builder) -> Ints:
    """The engine that each request waits for, shape (n,): the next in turn of its model, -1 where the model has no engine. A
    prompt that no engine of its model can hold goes to the first, which refuses it."""
    engine_of = np.full(len(trace), -1, dtype=np.int64)
    controller = Controller(build.routes(seats))
    for number, model in enumerate(trace.models):
        own = [seat for seat in seats if seat.model == model]
        able = [seat for seat in own if seat.able] or own[:1]
        if not able:
            continue
        rows = np.flatnonzero(trace.model == number)
        engine_of[rows] = able[0].engine
        if len(able) > 1:
            chosen = [controller.route(model, prompt) for prompt in trace.prompt_tokens[rows].tolist()]
            engine_of[rows] = [able[0].engine if route is None else route.engine for route in chosen]
    return engine_of


def _component(
    scenario: Scenario, placed: Placed, engines: tuple[int, ...], requests: Ints, engine_of: Ints, looks: Looks
) -> Component:
    """``engine_of`` are the engines of its ``requests``. Each engine becomes a model of its own, since turns are taken
    already. The last model stands for all models that are placed nowhere."""
    (placement, demands), gpus = placed, {gpu.id: gpu for gpu in scenario.gpus}
    served = {model.id: model for model in scenario.models}
    instances = {f"{placement.instances[engine].model}#{engine}": placement.instances[engine] for engine in engines}
    model_of = {id: instance.model for id, instance in instances.items()}
    nowhere = replace(scenario.models[0], id="#")
    own_instances = [
        replace(instance, model=id, footprint_bytes=charged_bytes(instance, demands, scenario.gpus))
        for id, instance in instances.items()
    ]
    own = [gpus[id] for id in sorted({gpu for instance in instances.values() for gpu in instance.gpus})]
    prompts = looks.prompt_tokens
    return Component(
        scenario=replace(
            scenario,
            system=scenario.system.model_copy(update={"sharing": scenario.system.sharing.renamed(model_of)}),
            models=(*(replace(served[model], id=id) for id, model in model_of.items()), nowhere),
            gpus=tuple(replace(gpu, sharing=gpu.sharing and gpu.sharing.renamed(model_of)) for gpu in own),
            trace=replace(
                scenario.whole_trace.take(requests),
                model=np.where(engine_of < 0, len(engines), np.searchsorted(engines, engine_of)).astype(np.int32),
                models=(*instances, nowhere.id),
            ),
        ),
        placed=(
            Placement(tuple(own_instances)),
            {id: replace(demands[model], id=id) for id, model in model_of.items()},
        ),
        engines=engines,
        requests=requests,
        looks=looks._replace(prompt_tokens={id: prompts[model] for id, model in model_of.items() if model in prompts}),
    )
