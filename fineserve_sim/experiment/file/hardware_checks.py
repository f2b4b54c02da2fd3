"""Whether the models fit the hardware: weights, TP groups, precisions and pinned placements."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fineserve_sim import catalog
from fineserve_sim.cluster import Gpu
from fineserve_sim.cluster.compose.memory import kinds_of
from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.degrees import AUTO, least_degree, pinned_degree, slots_of
from fineserve_sim.experiment.file.document import Document, KeyPath
from fineserve_sim.experiment.file.errors import nearest
from fineserve_sim.experiment.file.gpus import look_up
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.systems.spec import PinnedPlacementSpec


def check_hardware(document: Document, setup: Setup) -> None:
    """A TP group lies inside one node; one GPU holds its share of the weights; the GPU computes in the precision."""
    kinds = kinds_of(setup.gpus)
    gpu = max(kinds, key=lambda spec: spec.memory_bytes)
    usable_bytes = int(gpu.memory_bytes * setup.engine.memory_utilization) - setup.engine.context_bytes
    node_gpus = max(Counter(slot.node for slot in slots_of(setup)).values())
    alike = "" if len(kinds) == 1 else " of one kind"
    deployment = look_up(document, ("engine", "deployment"), lambda: catalog.deployment(setup.engine.deployment))
    for index, model in enumerate(setup.models):
        path: KeyPath = ("models", index)
        tp, precision = least_degree(setup, model), model.precision
        if model.entry.tp == AUTO and len(setup.kinds) > 1:
            problem = "auto chooses one degree for all GPUs, but cluster.nodes has several kinds; give a number"
            raise document.error((*path, "tp"), problem)
        if tp > 1 and all(spec.whole for spec in kinds):
            raise document.error(
                (*path, "tp"), f"must be 1 in a cluster with MIG, whose slices form no group; not {tp}"
            )
        if tp > node_gpus:
            raise document.error((*path, "tp"), f"must be at most the {node_gpus} GPUs{alike} of a node, not {tp}")
        if (dp := model.entry.ranks) > 1 and all(spec.whole for spec in kinds):
            problem = f"must be 1 in a cluster with MIG, whose slices form no group; not {dp}"
            raise document.error((*path, "dp"), problem)
        if tp * dp > node_gpus:
            problem = (
                f"{dp} ranks at tp {tp} take {tp * dp} GPUs of one node, which has {node_gpus}{alike}; lower dp or tp"
            )
            raise document.error((*path, "dp"), problem)
        weights = catalog.weight_bytes(model.spec, precision, tp)
        if weights >= usable_bytes:
            raise document.error(
                path,
                f"model {model.id} fits on no GPU: {weights / 2**30:.1f} GiB of weights a GPU at tp {tp}, but "
                f"{gpu.name} leaves {usable_bytes / 2**30:.1f} GiB; raise tp or take a precision with smaller weights",
            )
        for kind in kinds:
            core = precision.on(kind).tensor_core
            look_up(document, (*path, "precision"), lambda kind=kind, core=core: kind.peak_flops_per_s(core))  # type: ignore[misc]
        look_up(document, (*path, "precision"), lambda name=precision.name: deployment.floor(name))  # type: ignore[misc]
    _check_step_times(document, setup)


def _check_step_times(document: Document, setup: Setup) -> None:
    """The measured steps are a table that has rows of every model in its precision."""
    if setup.engine.step_times is None:
        return
    from fineserve_sim.latency.measured_steps import check_steps  # SciPy's optimizers take a while to import

    for model in setup.models:
        table = Path(setup.engine.step_times.path)
        look_up(document, ("engine", "step_times"), lambda: check_steps(table, model.spec, model.precision))  # noqa: B023


def check_pins(document: Document, file: schema.ExperimentFile, setup: Setup) -> None:
    """A pinned placement gives every model of the file groups of existing GPUs, each as large as its TP degree."""
    models = {model.id: model for model in setup.models}
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
            tp = pinned_degree(setup, models[name], groups) * models[name].entry.ranks
            for group in groups:
                _check_group(document, (*path, name), group, tp, setup.gpus)


def _check_group(document: Document, path: KeyPath, group: tuple[int, ...], tp: int, gpus: tuple[Gpu, ...]) -> None:
    inside = [gpu for gpu in set(group) if 0 <= gpu < len(gpus)]
    if len(inside) != tp or len(group) != tp:
        raise document.error(path, f"expected {tp} different GPUs of 0 to {len(gpus) - 1} a replica, not {list(group)}")
    if len({gpus[gpu].node for gpu in group}) > 1:
        raise document.error(path, f"the GPUs of one replica must be in one node, not {list(group)}")
    if len({gpus[gpu].spec for gpu in group}) > 1:
        raise document.error(path, f"the GPUs of one replica must be of one kind, not {list(group)}")
