"""From the names in a file to the things they mean: GPUs, models, precisions, systems.

Every failure names the line that asked for the thing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from fineserve_sim import catalog
from fineserve_sim.catalog import GpuSpec, ModelSpec, PrecisionSpec
from fineserve_sim.cluster.scenario import EngineSettings, Fault, Gpu, MeasuredSteps
from fineserve_sim.experiment import schema
from fineserve_sim.experiment.errors import ConfigError, nearest
from fineserve_sim.experiment.validation import as_config_error
from fineserve_sim.experiment.yaml_file import Document, KeyPath
from fineserve_sim.systems import SystemSpec, load_systems
from fineserve_sim.systems.spec import PinnedPlacementSpec

T = TypeVar("T")
Overrides = tuple[tuple[str, Any], ...]
"""Dotted keys of a file and the values that replace its own, sorted by key."""
_AXES = tuple(
    axis
    for axis in SystemSpec.model_fields
    if axis in schema.SystemVariant.model_fields and axis not in ("name", "title")
)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model of the file with its geometry and precision."""

    entry: schema.Model
    spec: ModelSpec
    precision: PrecisionSpec

    @property
    def id(self) -> str:
        return self.entry.id


@dataclass(frozen=True, slots=True)
class Setup:
    """What a file describes, without sweeps: the hardware, the models, the workload and every system by name.

    ``systems`` has the file's systems first and then all built-in ones, which references may name.
    ``folder`` is where relative paths of the file start.
    """

    gpus: tuple[Gpu, ...]
    engine: EngineSettings
    models: tuple[ResolvedModel, ...]
    systems: dict[str, SystemSpec]
    workload: schema.Workload
    loads: dict[str, schema.Load]
    slo: schema.Slo
    faults: tuple[Fault, ...]
    folder: Path


def resolve(document: Document, file: schema.ExperimentFile, folder: Path) -> Setup:
    """Look everything up. Raises ConfigError for a name that means nothing and for a model that no GPU can hold."""
    gpu = _gpu(document, file.cluster.gpu)
    count, per_node = file.cluster.count, file.cluster.gpus_per_node
    network_bytes_per_s = file.cluster.network_bytes_per_s
    setup = Setup(
        gpus=tuple(Gpu(number, number // per_node, gpu, network_bytes_per_s) for number in range(count)),
        engine=EngineSettings(**dict(file.engine) | {"step_times": _step_times(document, file.engine, folder)}),
        models=tuple(_model(document, index, entry, folder) for index, entry in enumerate(file.models)),
        systems=_systems(document, file),
        workload=file.workload,
        loads=file.loads,
        slo=file.slo,
        faults=tuple(Fault(fault.time_s, fault.instance, fault.repair_s) for fault in file.faults),
        folder=folder,
    )
    _check_hardware(document, setup)
    _check_pins(document, file, setup)
    return setup


def _look_up(document: Document, path: KeyPath, find: Callable[[], T]) -> T:
    try:
        return find()
    except ConfigError:
        raise
    except ValueError as problem:
        raise document.error(path, str(problem)) from None


def _gpu(document: Document, given: str | dict[str, Any]) -> GpuSpec:
    path: KeyPath = ("cluster", "gpu")
    if isinstance(given, str):
        return _look_up(document, path, lambda: catalog.gpu(given))
    for key in given:
        if key not in GpuSpec.model_fields:
            raise document.error((*path, key), f"unknown key; {nearest(key, GpuSpec.model_fields)}")
    try:
        return GpuSpec.model_validate({"name": "inline", "efficiency": "roofline-scaled", "source": "inline"} | given)
    except ValidationError as problem:
        raise as_config_error(document, path, problem.errors()[0]) from None


def _step_times(document: Document, engine: schema.Engine, folder: Path) -> MeasuredSteps | None:
    if engine.step_times is None:
        return None
    path = (folder / engine.step_times).resolve()
    try:
        return MeasuredSteps(str(path), hashlib.sha256(path.read_bytes()).hexdigest())
    except OSError as problem:
        raise document.error(("engine", "step_times"), f"{path} cannot be read: {problem.strerror}") from None


def _model(document: Document, index: int, entry: schema.Model, folder: Path) -> ResolvedModel:
    path: KeyPath = ("models", index)
    reference = entry.model

    def geometry() -> ModelSpec:
        if isinstance(reference, str):
            return catalog.model(reference)
        return catalog.model_from_hf_config(folder / reference.config)

    spec = _look_up(document, (*path, "model"), geometry)
    precision = _look_up(document, (*path, "precision"), lambda: catalog.precision(entry.precision))
    _look_up(document, (*path, "tp"), lambda: catalog.check_tp(spec, entry.tp))
    return ResolvedModel(entry, spec, precision)


def _check_hardware(document: Document, setup: Setup) -> None:
    """A TP group lies inside one node; one GPU holds its share of the weights; the GPU computes in the precision."""
    gpu = setup.gpus[0].spec
    usable_bytes = int(gpu.memory_bytes * setup.engine.memory_utilization) - setup.engine.context_bytes
    node_gpus = sum(other.node == 0 for other in setup.gpus)
    deployment = _look_up(document, ("engine", "deployment"), lambda: catalog.deployment(setup.engine.deployment))
    for index, model in enumerate(setup.models):
        path: KeyPath = ("models", index)
        tp, precision = model.entry.tp, model.precision
        if tp > node_gpus:
            raise document.error((*path, "tp"), f"must be at most the {node_gpus} GPUs of a node, not {tp}")
        weights = catalog.weight_bytes(model.spec, precision, tp)
        if weights >= usable_bytes:
            raise document.error(
                path,
                f"model {model.id} fits on no GPU: {weights / 2**30:.1f} GiB of weights a GPU at tp {tp}, but "
                f"{gpu.name} leaves {usable_bytes / 2**30:.1f} GiB; raise tp or take a precision with smaller weights",
            )
        _look_up(document, (*path, "precision"), lambda core=precision.tensor_core: gpu.peak_flops_per_s(core))  # type: ignore[misc]
        _look_up(document, (*path, "precision"), lambda name=precision.name: deployment.floor(name))  # type: ignore[misc]


def _systems(document: Document, file: schema.ExperimentFile) -> dict[str, SystemSpec]:
    found: dict[str, SystemSpec] = {}
    for index, item in enumerate(file.systems):
        path: KeyPath = ("systems", index)
        system = _built_in(document, path, item) if isinstance(item, str) else _variant(document, path, item)
        if system.name in found:
            raise document.error(path, f'a second system is called "{system.name}"; give it another name')
        found[system.name] = system
    return found | {name: system for name, system in load_systems().items() if name not in found}


def _built_in(document: Document, path: KeyPath, name: str) -> SystemSpec:
    systems = load_systems()
    if name not in systems:
        raise document.error(path, f'unknown system "{name}"; {nearest(name, systems)}')
    return systems[name]


def _variant(document: Document, path: KeyPath, item: schema.SystemVariant) -> SystemSpec:
    """The base system with the given axes: options of the same policy are added, another policy replaces it."""
    base = _built_in(document, (*path, "base"), item.base)
    raw = base.model_dump() | {"name": item.name, "title": item.title or item.name}
    for axis in _AXES:
        given = getattr(item, axis)
        if given is None:
            continue
        present = raw[axis] or {"policy": next(iter(_policies(axis)))}
        policy = given.get("policy", present["policy"])
        _check_options(document, (*path, axis), axis, policy, given)
        raw[axis] = (present if policy == present["policy"] else {}) | given
    try:
        return SystemSpec.model_validate(raw)
    except ValidationError as problem:
        raise as_config_error(document, path, problem.errors()[0]) from None


def _policies(axis: str) -> dict[str, type[BaseModel]]:
    """The classes of an axis by the names of their policies."""

    def kinds(annotation: Any) -> Iterator[type[BaseModel]]:
        if isinstance(annotation, type):
            if issubclass(annotation, BaseModel):
                yield annotation
            return
        for part in get_args(annotation):
            yield from kinds(part)

    return {str(kind.model_fields["policy"].default): kind for kind in kinds(SystemSpec.model_fields[axis].annotation)}


def _check_options(document: Document, path: KeyPath, axis: str, policy: object, given: dict[str, Any]) -> None:
    classes = _policies(axis)
    if policy not in classes:
        raise document.error((*path, "policy"), f"unknown {axis} policy {policy!r}; {nearest(policy, classes)}")
    for key in given:
        if key not in classes[policy].model_fields:
            hint = nearest(key, classes[policy].model_fields)
            raise document.error((*path, key), f"unknown option of {policy}; {hint}")


def _check_pins(document: Document, file: schema.ExperimentFile, setup: Setup) -> None:
    """A pinned placement gives every model of the file groups of existing GPUs, each as large as its TP degree."""
    models = {model.id: model.entry.tp for model in setup.models}
    for index, item in enumerate(file.systems):
        placement = setup.systems[item if isinstance(item, str) else item.name].placement
        if not isinstance(placement, PinnedPlacementSpec):
            continue
        path: KeyPath = ("systems", index, "placement", "groups")
        if missing := [name for name in models if not placement.groups.get(name)]:
            raise document.error(path, f"no GPU is given for model {missing[0]}")
        for name, groups in placement.groups.items():
            if name not in models:
                raise document.error((*path, name), f"unknown model; {nearest(name, models)}")
            for group in groups:
                _check_group(document, (*path, name), group, models[name], setup.gpus)


def _check_group(document: Document, path: KeyPath, group: tuple[int, ...], tp: int, gpus: tuple[Gpu, ...]) -> None:
    inside = [gpu for gpu in set(group) if 0 <= gpu < len(gpus)]
    if len(inside) != tp or len(group) != tp:
        raise document.error(path, f"expected {tp} different GPUs of 0 to {len(gpus) - 1} a replica, not {list(group)}")
    if len({gpus[gpu].node for gpu in group}) > 1:
        raise document.error(path, f"the GPUs of one replica must be in one node, not {list(group)}")


def plain(value: Any) -> Any:
    """Dataclasses and pydantic models as JSON-able data, for hashes and files."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value
