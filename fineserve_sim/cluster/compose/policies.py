"""Builds policy objects from a system's specification: one builder for each policy, one table for each axis.

A new policy of ours is its class in the core, its options in ``systems/spec.py``, and its line here. One from outside is its
class and one call of ``register_scheduler`` or ``register_placement`` (docs/extending.md). Its source is part of the key of its
runs, as ours is.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from fineserve_sim.catalog import loaders
from fineserve_sim.cluster.fleet.loader import SWITCH_S, ActivationCost, activation_cost
from fineserve_sim.policy.fleet.drifting import DriftingHomes
from fineserve_sim.policy.fleet.prism import PrismResidency
from fineserve_sim.policy.fleet.qlm import QlmSwapping
from fineserve_sim.policy.fleet.sleepers import Sleepers, Tier
from fineserve_sim.policy.fleet.timetable import Timetable
from fineserve_sim.policy.fleet.views import ResidencyPolicy
from fineserve_sim.policy.interfaces import (
    EngineFacts,
    GpuSlot,
    LocalScheduler,
    ModelDemand,
    PlacementPolicy,
    PrefillLatency,
)
from fineserve_sim.policy.placement.balanced import BalancedPlacement
from fineserve_sim.policy.placement.fineserve import FineServePlacement
from fineserve_sim.policy.placement.kvpr import KvprPlacement
from fineserve_sim.policy.placement.muxserve import MuxServePlacement
from fineserve_sim.policy.placement.static import (
    DedicatedPlacement,
    PinnedPlacement,
    ReplicasPlacement,
    RoundRobinPlacement,
)
from fineserve_sim.policy.scheduling.adaptive import AdaptiveBatching
from fineserve_sim.policy.scheduling.moore_hodgson import MooreHodgson
from fineserve_sim.systems import spec as specs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFactsheet(EngineFacts):
    """The constant facts about an engine for its local scheduler: its ``EngineFacts``, its first GPU, the prefill latency of
    its model, and whether other engines draw on its memory."""

    engine: int
    gpu: int
    prefill: PrefillLatency
    shares_memory: bool


def options(spec: specs.Spec, *other: str) -> dict[str, Any]:
    """The options of a policy, which have the same names in its class. ``other`` options, for other parts, are left out."""
    return spec.model_dump(exclude={"policy", *other})


_PLACEMENTS: dict[type, Callable[[Any], PlacementPolicy]] = {
    specs.FineServePlacementSpec: lambda spec: FineServePlacement(**options(spec, "mme")),
    specs.KvprPlacementSpec: lambda spec: KvprPlacement(**options(spec)),
    specs.PinnedPlacementSpec: lambda spec: PinnedPlacement(spec.groups),
    specs.DedicatedPlacementSpec: lambda spec: DedicatedPlacement(),
    specs.ReplicasPlacementSpec: lambda spec: ReplicasPlacement(),
    specs.MuxServePlacementSpec: lambda spec: MuxServePlacement(),
    specs.RoundRobinPlacementSpec: lambda spec: RoundRobinPlacement(),
    specs.BalancedPlacementSpec: lambda spec: BalancedPlacement(),
}


def build_placement(spec: specs.PlacementSpec) -> PlacementPolicy:
    return _PLACEMENTS[type(spec)](spec)


def _adaptive(spec: specs.AdaptiveSpec, engines: Sequence[EngineFactsheet]) -> LocalScheduler:
    (only,) = engines
    return AdaptiveBatching(only.slo_s, only.prefill, **options(spec), block_tokens=only.block_tokens)


def _moore_hodgson(spec: specs.MooreHodgsonSpec, engines: Sequence[EngineFactsheet]) -> LocalScheduler:
    return MooreHodgson({sheet.engine: sheet for sheet in engines}, **options(spec), shared_kv=engines[0].shares_memory)


def _clairvoyant(spec: specs.ClairvoyantSpec, engines: Sequence[EngineFactsheet]) -> LocalScheduler:
    raise ValueError("clairvoyant is a bound, not a scheduler: only a simulator knows the requests to come")


SchedulerBuilder = Callable[[Any, Sequence[EngineFactsheet]], LocalScheduler | None]
Scope = Literal["engine", "gpu"]

_SCHEDULERS: dict[type, tuple[Scope, SchedulerBuilder]] = {
    specs.FcfsSpec: ("engine", lambda spec, engines: None),
    specs.AdaptiveSpec: ("engine", _adaptive),
    specs.MooreHodgsonSpec: ("gpu", _moore_hodgson),
    specs.ClairvoyantSpec: ("engine", _clairvoyant),
}
"""For each local scheduler: what the factsheets of a scope have in common, and how to build it for them (None: nothing is held
back, the engine's own queue is first come first served)."""


_SOURCES: dict[type, str] = {}
"""The hash of the sources of each policy that was registered from outside, as they were then."""


def register_scheduler(spec: type[specs.Spec], build: SchedulerBuilder, *, scope: Scope = "engine") -> None:
    """Make a local scheduler one that every system can name: ``build(spec, sheets)`` gives the scheduler of one scope.

    ``scope``: one scheduler an engine, or one for all engines whose first GPU is the same. Raises ValueError for a name
    that is taken or missing.
    """
    specs.add_choice("scheduler", spec)
    _SCHEDULERS[spec] = (scope, build)
    _SOURCES[spec] = sources_digest(spec.__module__, build.__module__)


def register_placement(spec: type[specs.Spec], build: Callable[[Any], PlacementPolicy]) -> None:
    """As ``register_scheduler``, for a placement: ``build(spec)`` gives the policy."""
    specs.add_choice("placement", spec)
    _PLACEMENTS[spec] = build
    _SOURCES[spec] = sources_digest(spec.__module__, build.__module__)


def registered_sources(system: specs.SystemSpec) -> list[str]:
    """A hash of the sources of each policy of the system that was registered from outside."""
    return [_SOURCES[type(spec)] for spec in (system.placement, system.scheduler) if type(spec) in _SOURCES]


def build_schedulers(
    spec: specs.SchedulerSpec, engines: Sequence[EngineFactsheet]
) -> Mapping[tuple[int, ...], LocalScheduler | None]:
    """One scheduler a scope; the key names the scope's engines."""
    scope, build = _SCHEDULERS[type(spec)]
    scopes: dict[int, list[EngineFactsheet]] = {}
    for sheet in engines:
        scopes.setdefault(getattr(sheet, scope), []).append(sheet)
    return {tuple(sheet.engine for sheet in members): build(spec, members) for members in scopes.values()}


_LOADING = {"engine_pool", "parallel_loading", "engine_start_s", "loader", "sleep"}
"""Options of a residency that say how long an activation takes."""


def build_residency(
    spec: specs.ResidencySpec,
    placement: specs.PlacementSpec,
    models: Mapping[str, ModelDemand],
    gpus: Sequence[GpuSlot],
) -> ResidencyPolicy:
    """``models``: by id, ``weight_bytes`` being all that an engine takes beside KV. Prism's scores follow ``placement`` where
    that is KVPR too."""
    if isinstance(spec, specs.QlmResidencySpec):
        return QlmSwapping(models, gpus, **options(spec, "tick_s"))
    if isinstance(spec, specs.TimetableResidencySpec):
        return Timetable(models, [(entry.from_s, _spots(entry)) for entry in spec.entries])
    if isinstance(spec, specs.DriftingResidencySpec):
        rate = build_activation_cost(spec).gpu_bytes_per_s
        return DriftingHomes(models, gpus, load_bytes_per_s=rate, **options(spec, "tick_s", *_LOADING))
    kvpr = build_placement(placement if isinstance(placement, specs.KvprPlacementSpec) else specs.KvprPlacementSpec())
    assert isinstance(kvpr, KvprPlacement)
    return PrismResidency(models, gpus, kvpr, **options(spec, "tick_s", *_LOADING))


def _spots(entry: specs.TimetableEntry) -> list[tuple[str, tuple[int, ...]]]:
    return [(model, gpus) for model, groups in entry.groups.items() for gpus in groups]


def build_activation_cost(spec: specs.ResidencySpec) -> ActivationCost:
    """The time that ``Activate`` takes; where engines sleep, from host memory."""
    return build_activation_costs(spec)[Tier.HOST]


def build_activation_costs(spec: specs.ResidencySpec) -> Mapping[Tier, ActivationCost]:
    """The time that ``Activate`` takes, by where the weights are. A QLM swap takes equally long for every model."""
    if isinstance(spec, specs.QlmResidencySpec):
        return dict.fromkeys(Tier, ActivationCost(spec.swap_s, float("inf"), float("inf")))
    if spec.sleep is not None:
        host, disk = (_loading(f"{spec.sleep.loader}-{medium}", SWITCH_S) for medium in ("host", "disk"))
        started = replace(disk, overhead_s=disk.overhead_s + spec.engine_start_s)
        return {Tier.HOST: host, Tier.DISK: disk, Tier.GONE: started}
    cost = activation_cost(**spec.model_dump(include=_LOADING - {"loader", "sleep"}))
    return dict.fromkeys(Tier, cost if spec.loader is None else _loading(spec.loader, cost.overhead_s))


def _loading(name: str, overhead_s: float) -> ActivationCost:
    """By a loader of the catalog."""
    loader = loaders()[name]
    node = loader.node_bytes_per_s
    return ActivationCost(overhead_s, loader.bytes_per_s.value, node.value if node else float("inf"))


def build_sleepers(spec: specs.ResidencySpec, node_of: Mapping[int, int]) -> Sleepers:
    """Without ``sleep`` in the spec no engine sleeps."""
    if isinstance(spec, specs.QlmResidencySpec) or spec.sleep is None:
        return Sleepers(node_of, 0, 0)
    return Sleepers(node_of, int(spec.sleep.host_gib * 2**30), spec.sleep.processes)


def sources_digest(*names: str) -> str:
    """Hash of the modules ``names`` and of all modules loaded from the same folders or packages: a policy may import parts of
    itself. Where a module has no file (a notebook's cell), no other process gets the same hash."""
    own = [sys.modules[name] for name in names if not _is_known(name)]
    digest = hashlib.sha256()
    for module in own:
        if getattr(module, "__file__", None) is None:
            return os.urandom(32).hex()
        folder = _folder(module)
        for path in sorted(set(_loaded_below(folder))):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _is_known(name: str) -> bool:
    """Whether a module is Python's or ours: neither changes with a policy from outside."""
    top = name.partition(".")[0]
    return top != "__main__" and (top in sys.stdlib_module_names or top.startswith("fineserve_"))


def _folder(module: ModuleType) -> Path:
    """The folder of a module, or of the package that it is a part of."""
    levels = (module.__package__ or "").count(".")
    return Path(str(module.__file__)).resolve().parents[levels]


def _loaded_below(folder: Path) -> Iterator[Path]:
    """The files of loaded modules, installed libraries left out."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and not _is_known(name):
            path = Path(file).resolve()
            if path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts and path.is_file():
                yield path
