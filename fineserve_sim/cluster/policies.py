"""From a system's specification to policy objects: one builder a policy, in one table an axis.

A new policy is its class in the core, its options in ``systems/spec.py``, and its line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fineserve_sim.policy.adaptive import AdaptiveBatching
from fineserve_sim.policy.fcfs import FcfsScheduler
from fineserve_sim.policy.fineserve_placement import FineServePlacement
from fineserve_sim.policy.interfaces import LocalScheduler, PlacementPolicy, PrefillLatency
from fineserve_sim.policy.kvpr import KvprPlacement
from fineserve_sim.policy.moore_hodgson import EngineFacts, MooreHodgson
from fineserve_sim.policy.static_placement import DedicatedPlacement, PinnedPlacement
from fineserve_sim.systems.spec import (
    AdaptiveSpec,
    DedicatedPlacementSpec,
    FcfsSpec,
    FineServePlacementSpec,
    KvprPlacementSpec,
    MooreHodgsonSpec,
    PinnedPlacementSpec,
    PlacementSpec,
    SchedulerSpec,
)


@dataclass(frozen=True, slots=True)
class EngineFactsheet:
    """What a local scheduler is told about an engine once: its first GPU, its model's SLO and prefill latency, its memory."""

    engine: int
    gpu: int
    slo_s: float
    prefill: PrefillLatency
    prefill_tokens_per_s: float
    kv_capacity_tokens: int
    block_tokens: int
    shares_memory: bool


_PLACEMENTS: dict[type, Callable[[Any], PlacementPolicy]] = {
    FineServePlacementSpec: lambda spec: FineServePlacement(spec.score, spec.colocation, spec.replicas),
    KvprPlacementSpec: lambda spec: KvprPlacement(spec.evaluate),
    PinnedPlacementSpec: lambda spec: PinnedPlacement(spec.groups),
    DedicatedPlacementSpec: lambda spec: DedicatedPlacement(),
}


def build_placement(spec: PlacementSpec) -> PlacementPolicy:
    return _PLACEMENTS[type(spec)](spec)


def _adaptive(spec: AdaptiveSpec, engines: Sequence[EngineFactsheet]) -> LocalScheduler:
    (only,) = engines
    return AdaptiveBatching(
        only.slo_s, only.prefill, when_prefilling=spec.when_prefilling, block_tokens=only.block_tokens
    )


def _moore_hodgson(spec: MooreHodgsonSpec, engines: Sequence[EngineFactsheet]) -> LocalScheduler:
    facts = {
        e.engine: EngineFacts(e.prefill_tokens_per_s, e.slo_s, e.kv_capacity_tokens, e.block_tokens) for e in engines
    }
    return MooreHodgson(
        facts,
        late=spec.late,
        clock=spec.clock,
        reserve=spec.reserve,
        reserve_fraction=spec.reserve_fraction,
        shared_kv=engines[0].shares_memory,
    )


def _own(sheet: EngineFactsheet) -> int:
    return sheet.engine


def _first_gpu(sheet: EngineFactsheet) -> int:
    return sheet.gpu


_SCHEDULERS: dict[
    type, tuple[Callable[[EngineFactsheet], int], Callable[[Any, Sequence[EngineFactsheet]], LocalScheduler]]
]
_SCHEDULERS = {
    FcfsSpec: (_own, lambda spec, engines: FcfsScheduler()),
    AdaptiveSpec: (_own, _adaptive),
    MooreHodgsonSpec: (_first_gpu, _moore_hodgson),
}
"""For each local scheduler: what its engines have in common (its scope), and how to build it for them."""


def build_schedulers(
    spec: SchedulerSpec, engines: Sequence[EngineFactsheet]
) -> Mapping[tuple[int, ...], LocalScheduler]:
    """One scheduler a scope; the key names the scope's engines."""
    scope_of, build = _SCHEDULERS[type(spec)]
    scopes: dict[int, list[EngineFactsheet]] = {}
    for sheet in engines:
        scopes.setdefault(scope_of(sheet), []).append(sheet)
    return {tuple(sheet.engine for sheet in members): build(spec, members) for members in scopes.values()}
