"""Leads from the present engines to the engines that a placement wants, by a few suggestions at a time.

A policy that knows where models should be calls ``toward`` at every look. An engine that is wanted and missing starts. It
replaces an engine of its model that is not wanted, which serves until the new one is ready. Where its GPUs have no room,
engines that are not wanted leave them first. Once all wanted engines are there, the others go.

``toward`` remembers nothing between looks: it repeats suggestions that the controller could not carry out yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fineserve_sim.policy.fleet.views import EngineView, FleetView, Start, Status, Stop, Suggestion

Spot = tuple[str, tuple[int, ...]]
"""A model and the GPUs of one of its engines."""


def toward(wanted: Iterable[Spot], view: FleetView, weight_bytes: Mapping[str, int]) -> Iterator[Suggestion]:
    """The engines to start and to stop now. ``weight_bytes``: by model, the bytes that an engine takes of each of its GPUs
    beside KV."""
    missing, surplus = _compared(wanted, view.engines)
    free_bytes, coming = dict(view.free_bytes), {model for model, _ in missing}
    for model, gpus in missing:
        if not free_bytes.keys() >= set(gpus):
            continue  # a GPU is lost
        room = all(free_bytes[gpu] >= weight_bytes[model] for gpu in gpus)
        if not room:
            yield from _cleared(surplus, gpus)
            continue
        for gpu in gpus:
            free_bytes[gpu] -= weight_bytes[model]
        replaced = next((engine for engine in surplus if engine.model == model), None)
        if replaced is not None:
            surplus.remove(replaced)
        yield Start(model, gpus, None if replaced is None else replaced.engine)
    yield from [Stop(engine.engine) for engine in surplus if engine.model not in coming]


def _compared(wanted: Iterable[Spot], engines: Sequence[EngineView]) -> tuple[list[Spot], list[EngineView]]:
    """The spots without an engine, and the engines without a spot; engines that leave already do not count."""
    left = Counter(wanted)
    surplus = []
    for engine in engines:
        spot = engine.model, engine.gpus
        if engine.status is Status.DRAINING:
            continue
        if left[spot] > 0:
            left[spot] -= 1
        else:
            surplus.append(engine)
    return sorted(left.elements()), surplus


def _cleared(surplus: list[EngineView], gpus: tuple[int, ...]) -> list[Suggestion]:
    """The engines that are not wanted leave these GPUs."""
    going = [engine for engine in surplus if set(engine.gpus) & set(gpus)]
    for engine in going:
        surplus.remove(engine)
    return [Stop(engine.engine) for engine in going]
