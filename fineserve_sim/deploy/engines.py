"""From an experiment to the engines that its system places: which GPUs, how much memory, which part of the SMs.

Stock vLLM has no memory that engines share. Where a system shares the KV memory of a GPU, each engine gets a fixed part of it
here, by footprints as FineServe's private pools have it. What a plan loses by that is for the simulator to say: the same file
with ``memory: {policy: private}`` in its system.

A share is what ``gpu_memory_utilization`` means: weights, activations, context, graphs and KV of one engine over the memory of
the GPU.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from fineserve_sim.catalog import PrecisionSpec, deployment
from fineserve_sim.cluster import EngineSettings, Gpu, Scenario, ServedModel
from fineserve_sim.cluster.compose.facts import demands_of
from fineserve_sim.cluster.compose.memory import offloads
from fineserve_sim.cluster.compose.models import Builder
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.cluster.compose.profiling import sharing_of, sm_share
from fineserve_sim.cluster.engine.state import Seat
from fineserve_sim.experiment import Experiment
from fineserve_sim.experiment.file.errors import nearest
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.packaged import read_yaml
from fineserve_sim.policy.interfaces import Instance
from fineserve_sim.systems.spec import PrivatePoolsSpec

PORT = 8000
"""The port of the first engine; the others have the next ones."""

REAL_MODES = ("exclusive", "time_slice", "mps", "mig")


@cache
def facts() -> Mapping[str, Any]:
    """What other programs call things, with sources."""
    found: Mapping[str, Any] = read_yaml(files("fineserve_sim.deploy").joinpath("facts.yaml"))
    return found


class Device(NamedTuple):
    """A GPU as its node numbers them, or a slice of it by MIG: number ``slice`` there, of a ``profile`` such as 3g.40gb."""

    board: int
    slice: int | None = None
    profile: str | None = None

    def __str__(self) -> str:
        """Its number, or a variable that holds the UUID of the slice."""
        return str(self.board) if self.slice is None else f"${{MIG_{self.board}_{self.slice}}}"


@dataclass(frozen=True, slots=True)
class Deployed:
    """One engine. ``name`` is its model's id, with a number where a model has several, in the letters of host names. Its
    checkpoint is at ``weights``; ``models`` is the folder of all checkpoints.

    ``devices`` are GPUs of type ``gpu`` on a node. ``mode`` is the way in which they are shared; an engine that has them for
    itself is ``exclusive``. ``memory_share`` is of each GPU's memory, of which ``kv_bytes`` are for KV. ``sm_percent``: of the
    SMs, at most; None: all of them. ``whole_experts``: experts are spread over the devices, not split.
    """

    name: str
    model: str
    weights: str
    models: str
    precision: PrecisionSpec
    gpu: str
    node: int
    devices: tuple[Device, ...]
    mode: str
    memory_share: float
    kv_bytes: int
    max_model_len: int
    settings: EngineSettings
    port: int
    sm_percent: int | None = None
    whole_experts: bool = False

    @property
    def tp(self) -> int:
        return len(self.devices)

    @property
    def eager(self) -> bool:
        """Whether the engine was simulated without CUDA graphs."""
        return not deployment(self.settings.deployment).replays_graphs


def engines_of(
    experiment: Experiment,
    system: str | None = None,
    *,
    models: str = "/models",
    weights: Mapping[str, str] | None = None,
) -> tuple[Deployed, ...]:
    """The engines of a system of the file, its first one if none is named. ``models`` is the folder of all checkpoints, by
    their names in the catalog; ``weights`` says otherwise by model id.

    Raises ValueError, ConfigError or ScenarioError in one line for a system or a placement that stock vLLM cannot be.
    """
    described = _scenario(experiment, system)
    _check_models(experiment)
    placed = place(described, demands_of(described))
    if placed[0].unplaced:
        raise ValueError(f"system {described.system.name}: no room for {', '.join(placed[0].unplaced)}")
    built, instances = Builder(described, placed), placed[0].instances
    residents = Counter(gpu for instance in instances for gpu in instance.gpus)
    known = _known_weights(described, models, weights or {})
    names = _names([instance.model for instance in instances])
    return tuple(
        _deployed(described, built, seat, instance, name, (known[instance.model], models), residents)
        for seat, instance, name in zip(built.seats(), instances, names, strict=True)
    )


def _check_models(experiment: Experiment) -> None:
    """Raises ConfigError for a model with a draft, whose checkpoint the file does not name, and for data-parallel ranks."""
    for index, model in enumerate(experiment.setup.models):
        if model.spec.speculation is not None:
            path = ("models", index, "speculative")
            raise experiment.document.error(
                path, "the draft's checkpoint is not known; leave it out, and add vLLM's flag"
            )
        if model.entry.ranks > 1:
            raise experiment.document.error(
                ("models", index, "dp"),
                "no engines are written for ranks; leave it out, and add vLLM's --data-parallel-size",
            )


def _deployed(
    described: Scenario,
    built: Builder,
    seat: Seat,
    instance: Instance,
    name: str,
    weights: tuple[str, str],
    residents: Mapping[int, int],
) -> Deployed:
    model = built.served[instance.model]
    gpus = [gpu for gpu in described.gpus if gpu.id in instance.gpus]
    if not seat.able or seat.kv.capacity_blocks() < 2:
        raise ValueError(
            f"model {model.id} on GPU {gpus[0].id}: its fixed share leaves no KV memory; put fewer models there, or raise "
            "engine.memory_utilization"
        )
    (tenant,) = (each for each in built.tenants[gpus[0].id] if each.engine == seat.engine)
    kv_bytes = seat.kv.capacity_blocks() * tenant.block.block_bytes
    percent = _percent(described, model, gpus)
    return Deployed(
        name=name,
        model=model.id,
        weights=weights[0],
        models=weights[1],
        precision=model.precision,
        gpu=gpus[0].spec.whole or gpus[0].spec.name,
        node=gpus[0].node,
        devices=tuple(
            known for gpu, known in zip(described.gpus, _devices(described.gpus), strict=True) if gpu in gpus
        ),
        mode=_mode(described, gpus, residents, percent),
        memory_share=math.ceil(1000 * (tenant.fixed_bytes + kv_bytes) / gpus[0].spec.memory_bytes) / 1000,
        kv_bytes=kv_bytes,
        max_model_len=min(seat.max_tokens, seat.kv.capacity_tokens() - seat.settings.block_tokens),
        settings=replace(seat.settings, kv_offloading=offloads(described)),
        port=PORT + seat.engine,
        sm_percent=percent,
        whole_experts=model.model.experts is not None and model.model.experts.spread == "whole" and len(gpus) > 1,
    )


def _scenario(experiment: Experiment, system: str | None) -> Scenario:
    """The first point of the system, with memory that stock engines can have."""
    named = system or experiment.points[0].system
    found = [point for point in experiment.points if point.system == named]
    if not found:
        there = dict.fromkeys(point.system for point in experiment.points)
        raise ValueError(f"--system {named}: no such system in the file; {nearest(named, there)}")
    point, setup = found[0], experiment.setup_of(found[0])
    limits_s = [model.entry.ttft_slo_s or setup.slo.ttft_s for model in setup.models]
    if None in limits_s:
        raise ValueError("slo.ttft: these limits come from simulated runs; give numbers of seconds as slo.ttft_s")
    known_s = tuple(limit_s * point.slo_scale for limit_s in limits_s if limit_s is not None)
    described = scenario(Run(setup, point.overrides, named, point.load, point.rate_scale, 0, known_s))
    spec = described.system
    for axis in ("residency", "dispatch", "execution"):
        if getattr(spec, axis) is not None:
            raise ValueError(
                f"system {named}: its {axis} changes engines as they run; deploy takes placements that stay"
            )
    if isinstance(spec.memory, PrivatePoolsSpec):
        return described
    return replace(described, system=spec.model_copy(update={"memory": PrivatePoolsSpec()}))


def shares_memory(experiment: Experiment, system: str | None) -> bool:
    """Whether the system's engines share the KV memory of a GPU, which stock engines do not."""
    memory = experiment.setup.systems[system or experiment.points[0].system].memory
    return not isinstance(memory, PrivatePoolsSpec)


def _known_weights(described: Scenario, models: str, weights: Mapping[str, str]) -> dict[str, str]:
    """Where the checkpoint of each model is. Raises ValueError for a precision that vLLM has not, or an unknown model."""
    ids, precisions = [model.id for model in described.models], facts()["vllm"]["precisions"]
    for name in weights:
        if name not in ids:
            raise ValueError(f"--weights {name}: unknown model; {nearest(name, ids)}")
    for model in described.models:
        if model.precision.name not in precisions:
            known = ", ".join(precisions)
            raise ValueError(
                f"model {model.id}: no arguments of vLLM are known for {model.precision.name}; take one of {known}"
            )
    return {
        model.id: weights.get(model.id, f"{models.rstrip('/')}/{model.model.name}{_ending(model, precisions)}")
        for model in described.models
    }


def _ending(model: ServedModel, precisions: Mapping[str, Mapping[str, str]]) -> str:
    """How its checkpoint folder ends; the published one has the plain name."""
    published = model.precision.name == model.model.checkpoint
    return "" if published else precisions[model.precision.name].get("ending", "")


def _devices(gpus: Sequence[Gpu]) -> Iterator[Device]:
    """Each GPU as its node calls it: slices of one GPU follow one another, and have one number there."""
    boards: dict[int, int] = Counter()
    before: Gpu | None = None
    slices = 0
    for gpu in gpus:
        same = before is not None and gpu.board is not None and gpu.board == before.board
        slices = slices + 1 if same else 0
        boards[gpu.node] += not same
        number = boards[gpu.node] - 1
        yield Device(number) if gpu.board is None else Device(number, slices, _profile(gpu))
        before = gpu


def _profile(gpu: Gpu) -> str:
    """What NVIDIA calls the slice, such as 3g.40gb."""
    whole, _, profile = gpu.spec.name.rpartition(" ")
    return str(facts()["mig_profiles"][whole][profile])


def host_name(name: str) -> str:
    """The name in small letters, digits and dashes, at most 50 of them."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-") or "model"


def _names(models: Sequence[str]) -> list[str]:
    """Of the engines of these models: letters, digits and dashes, each once."""
    several, seen = Counter(models), Counter[str]()
    found: list[str] = []
    for model in models:
        seen[model] += 1
        name = f"{model}-{seen[model]}" if several[model] > 1 else model
        plain = host_name(name)
        found.append(plain if plain not in found else f"{plain}-{len(found)}")
    return found


def _mode(described: Scenario, gpus: Sequence[Gpu], residents: Mapping[int, int], percent: int | None) -> str:
    """How the GPUs of an engine are shared. Raises ValueError for a way that stock engines cannot share in."""
    (mode,) = {sharing_of(gpu, described).mode for gpu in gpus}
    if mode == "mig" or percent is not None:
        return mode
    if all(residents[gpu.id] == 1 for gpu in gpus):
        return "exclusive"
    if mode not in REAL_MODES:
        raise ValueError(
            f"GPU {gpus[0].id}: processes cannot share it as {mode}; set cluster.sharing to time_slice or mps"
        )
    return mode


def _percent(described: Scenario, model: ServedModel, gpus: Sequence[Gpu]) -> int | None:
    share = sm_share(described, model, gpus)
    return None if share == 1.0 else math.floor(100 * share + 1e-9)
