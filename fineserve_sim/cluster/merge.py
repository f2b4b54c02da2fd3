"""What became of a run's components, put together to the result of the whole run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.cluster.components import Component
from fineserve_sim.cluster.gpu_use import fractions
from fineserve_sim.cluster.result import WholeTrace
from fineserve_sim.cluster.samples import PER_COLUMN, PER_GPU
from fineserve_sim.cluster.scenario import GpuUse, Ints, RunResult, Scenario, Timeline
from fineserve_sim.cluster.step_times import Note, shares_of
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.interfaces import Placement


class Piece(NamedTuple):
    """What became of one component. The last row of its timeline, beyond its samples, is how it stays when it has ended.
    ``uses``: sums over the looks at its GPUs."""

    result: RunResult
    notes: Sequence[Note]
    uses: Mapping[int, GpuUse]


def merged(
    scenario: Scenario, placement: Placement, steps: Mapping[int, StepModel], pieces: Iterable[tuple[Component, Piece]]
) -> RunResult:
    """The result of ``scenario`` from the pieces of its components. ``steps`` are the engines' step times."""
    whole = WholeTrace(len(scenario.whole_trace))
    capacity_of: dict[int, int] = {}
    notes: list[Note] = []
    parts: list[tuple[Component, Timeline]] = []
    end_s = loop_cpu_s = 0.0
    iterations = events = 0
    uses: dict[int, GpuUse] = {}
    for component, (result, own_notes, own_uses) in pieces:
        for name, column in whole.columns().items():
            column[component.requests] = getattr(result, name)
        engines = np.array([*component.engines, -1])  # -1 stays -1
        whole.engine[component.requests] = engines[result.engine]
        notes += [(sample, component.engines[engine], batch) for sample, engine, batch in own_notes]
        capacity_of |= dict(zip(_gpus(component), result.kv_capacity_bytes, strict=True))
        uses |= own_uses
        parts.append((component, result.timeline))
        end_s = max(end_s, result.end_s)
        iterations, events = iterations + result.iterations, events + result.events
        loop_cpu_s += result.loop_cpu_s
    notes.sort(key=lambda note: note[:2])
    timeline = _timeline(parts, placement, sorted(capacity_of))
    looks = int(np.count_nonzero(timeline.time_s <= scenario.whole_trace.arrival_s[-1]))
    return RunResult(
        **whole.columns(),
        placement=placement,
        kv_capacity_bytes=tuple(capacity_of[gpu] for gpu in sorted(capacity_of)),
        timeline=timeline,
        end_s=end_s,
        iterations=iterations,
        events=events,
        loop_cpu_s=loop_cpu_s,
        step_times=shares_of(notes, steps),
        step_samples=len(notes),
        gpu_use=fractions(uses, looks),
    )


def _timeline(parts: Sequence[tuple[Component, Timeline]], placement: Placement, gpus: Sequence[int]) -> Timeline:
    longest = max((timeline for _, timeline in parts), key=lambda timeline: len(timeline.time_s)).time_s[:-1]
    engines = [np.array(component.engines) for component, _ in parts]
    places = [np.searchsorted(gpus, _gpus(component)) for component, _ in parts]

    def table(name: str, columns: Sequence[NDArray[np.intp]]) -> Ints:
        whole = np.zeros((len(longest), sum(map(len, columns))), dtype=np.int64)
        for (_, timeline), own in zip(parts, columns, strict=True):
            part: Ints = getattr(timeline, name)
            whole[: len(part) - 1, own] = part[:-1]
            whole[len(part) - 1 :, own] = part[-1]
        return whole

    return Timeline(
        time_s=longest,
        engine_models=tuple(instance.model for instance in placement.instances),
        **{name: table(name, engines) for name in PER_COLUMN},
        **{name: table(name, places) for name in PER_GPU},
    )


def _gpus(component: Component) -> list[int]:
    return [gpu.id for gpu in component.scenario.gpus]
