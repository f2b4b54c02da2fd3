"""From the names in a file to the things they mean: GPUs, models, precisions, systems.

Every failure names the line that asked for the thing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fineserve_sim import catalog
from fineserve_sim.catalog import ModelSpec, PrecisionSpec, kernel_rates
from fineserve_sim.cluster import EngineSettings, Fault, Gpu
from fineserve_sim.cluster.compose.memory import SGLANG_CHUNK_TOKENS, static_fraction
from fineserve_sim.cluster.offloading import KVOffloading
from fineserve_sim.cluster.scenario import MeasuredSteps
from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.document import Document, KeyPath
from fineserve_sim.experiment.file.gpus import Bought, bought, gpus_of, look_up
from fineserve_sim.experiment.file.variants import systems_of
from fineserve_sim.systems import SystemSpec

T = TypeVar("T")
Stamp = tuple[int, int]
"""When a file was written, in ns, and how many bytes it has. A file that is written again has another one."""
Overrides = tuple[tuple[str, Any], ...]
"""Dotted keys of a file and the values that replace its own, sorted by key."""


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
    """The content of a file, without sweeps: the hardware, the models, the workload and every system by name.

    Models are placed on ``gpus``: the GPUs of the file, or their slices where MIG divides them. ``kinds``: what is
    bought of each kind.
    ``systems`` has the file's systems first and then all built-in ones, which references may name.
    ``folder`` is where relative paths of the file start. ``trace_stamp``: of the trace file when this was read.
    """

    gpus: tuple[Gpu, ...]
    kinds: tuple[Bought, ...]
    engine: EngineSettings
    models: tuple[ResolvedModel, ...]
    systems: dict[str, SystemSpec]
    workload: schema.Workload
    loads: dict[str, schema.Load]
    slo: schema.Slo
    faults: tuple[Fault, ...]
    folder: Path
    trace_stamp: Stamp = (0, 0)

    @property
    def bought(self) -> int:
        """GPUs of all kinds."""
        return sum(kind.count for kind in self.kinds)

    @property
    def gpu_name(self) -> str:
        """The whole purchase: a catalog name, or ``GPUs (8 h100-sxm, 4 l40s)``."""
        if len(self.kinds) == 1:
            return self.kinds[0].gpu
        return f"GPUs ({', '.join(f'{kind.count} {kind.gpu}' for kind in self.kinds)})"

    @property
    def names_files(self) -> bool:
        """Whether it depends on files beside the experiment file."""
        work, configs = self.workload, (model.entry.model for model in self.models)
        named = work.trace or work.data_dir or self.engine.step_times
        return named is not None or any(not isinstance(config, str) for config in configs)


def resolve(document: Document, file: schema.ExperimentFile, folder: Path) -> Setup:
    """Look everything up. ``folder``: that of the file. Raises ConfigError for a name that means nothing."""
    folder = folder / (file.folder or "")
    gpus = gpus_of(document, file.cluster)
    return Setup(
        gpus=gpus,
        kinds=bought(document, file.cluster),
        engine=_engine(file, gpus, _step_times(document, file.engine, folder)),
        models=tuple(_model(document, index, entry, folder) for index, entry in enumerate(file.models)),
        systems=systems_of(document, file),
        workload=file.workload,
        loads=file.loads,
        slo=file.slo,
        faults=tuple(map(_fault, file.faults)),
        folder=folder,
        trace_stamp=(0, 0) if file.workload.trace is None else stamp_of(folder / file.workload.trace),
    )


def _engine(file: schema.ExperimentFile, gpus: Sequence[Gpu], steps: MeasuredSteps | None) -> EngineSettings:
    """The settings of the file. Where it leaves SGLang's chunks and static part open, they are SGLang's own, the part that of
    the smallest GPU and the largest TP group. SGLang's rule for this part leaves room for one engine a GPU. Where several
    models may share one, each engine counts all that it needs within the memory utilization, as with vLLM."""
    offloading = file.engine.kv_offloading
    below = None if offloading is None else KVOffloading(**dict(offloading))
    chosen = dict(file.engine) | {"step_times": steps, "kv_offloading": below}
    if file.engine.batching != "vllm":
        said = file.engine.model_fields_set
        if "token_budget" not in said:
            chosen["token_budget"] = SGLANG_CHUNK_TOKENS
        chosen["static_part"] = "memory_utilization" in said or len(file.models) == 1
        if "memory_utilization" not in said and len(file.models) == 1:
            largest = max((model.tp for model in file.models if isinstance(model.tp, int)), default=1)
            least_bytes = min(gpu.spec.memory_bytes for gpu in gpus)
            chosen["memory_utilization"] = static_fraction(least_bytes, chosen["token_budget"], largest)
    return EngineSettings(**chosen)


def stamp_of(path: Path) -> Stamp:
    """(0, 0) where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _fault(fault: schema.Fault) -> Fault:
    if fault.gpu is not None:
        return Fault(fault.time_s, fault.gpu, fault.repair_s, "gpu")
    return Fault(fault.time_s, fault.instance or 0, fault.repair_s)


def _step_times(document: Document, engine: schema.Engine, folder: Path) -> MeasuredSteps | None:
    if engine.step_times is None:
        return None
    path = (folder / engine.step_times).resolve()
    try:
        return MeasuredSteps(str(path), hashlib.sha256(path.read_bytes()).hexdigest())
    except OSError as problem:
        raise document.error(("engine", "step_times"), f"{path} cannot be read: {problem.strerror}") from None


def _geometry(reference: str | schema.ConfigJson, folder: Path) -> ModelSpec:
    if isinstance(reference, str):
        return catalog.model(reference)
    return catalog.model_from_hf_config(folder / reference.config)


def _behind_a_draft(
    document: Document, path: KeyPath, asked: schema.Speculative, spec: ModelSpec, folder: Path
) -> ModelSpec:
    """The model with what drafts for it."""
    reference, draft = asked.draft, None
    if reference is not None:
        draft = look_up(document, (*path, "draft"), lambda: _geometry(reference, folder))
    return look_up(
        document,
        (*path, "acceptance"),
        lambda: catalog.with_speculation(spec, asked.tokens, asked.acceptance, draft),
    )


def _model(document: Document, index: int, entry: schema.Model, folder: Path) -> ResolvedModel:
    path: KeyPath = ("models", index)
    reference = entry.model
    spec = look_up(document, (*path, "model"), lambda: _geometry(reference, folder))
    if entry.experts is not None:
        spec = look_up(document, (*path, "experts"), lambda: catalog.with_experts(spec, entry.experts or "split"))
    if entry.speculative is not None:
        spec = _behind_a_draft(document, (*path, "speculative"), entry.speculative, spec, folder)
    published = entry.precision == catalog.PUBLISHED

    def format_() -> PrecisionSpec:
        if published and not isinstance(reference, str):
            return catalog.checkpoint_precision(folder / reference.config)
        return catalog.precision_of(entry.precision, spec)

    precision = look_up(document, (*path, "precision"), format_)
    if not isinstance(reference, str) and not published:
        checkpoint = folder / reference.config
        look_up(document, (*path, "precision"), lambda: catalog.check_checkpoint_precision(checkpoint, precision))
    if isinstance(entry.tp, int):
        look_up(document, (*path, "tp"), lambda tp=entry.tp: catalog.check_tp(spec, tp))  # type: ignore[misc]
    if entry.ranks > 1:
        spec = look_up(document, (*path, "dp"), lambda: _in_ranks(spec, entry))
    return ResolvedModel(entry, spec, precision)


def _in_ranks(spec: ModelSpec, entry: schema.Model) -> ModelSpec:
    """The model in data-parallel ranks. Raises ValueError where it has none, or its experts do not split over them."""
    known = (1, *kernel_rates().all_reduce)
    if entry.ranks not in known:
        raise ValueError(f"no exchange among {entry.ranks} ranks was measured; known: {', '.join(map(str, known))}")
    if not isinstance(entry.tp, int):
        raise ValueError(f"needs a number for tp, not {entry.tp}")
    if spec.speculation is not None:
        raise ValueError("not with speculative: ranks have no draft model yet; leave one of them out")
    ranked = catalog.with_ranks(spec, entry.ranks)
    catalog.check_tp(ranked, entry.tp)
    return ranked
