"""Whether figures and claims ask for what the file has: metrics, sweeps, systems, places."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.axes import LOAD_AXES, check_axis
from fineserve_sim.experiment.file.document import Document, KeyPath
from fineserve_sim.experiment.file.errors import ConfigError, nearest
from fineserve_sim.experiment.file.metric_names import CLUSTER_WIDE, METRICS
from fineserve_sim.experiment.file.resolve import Setup

TIMELINE_PANELS = (
    "waiting",
    "running",
    "kv_used_bytes",
    "gpu_stranded_bytes",
    "gpu_free_bytes",
    "windowed_ttft_s",
    "output_tokens_per_s",
)


def check_figure(
    document: Document, path: KeyPath, figure: schema.Figure, file: schema.ExperimentFile, setup: Setup
) -> None:
    _check_systems(document, (*path, "systems"), figure.systems or [], file)
    if (figure.timeline is None) == (figure.sweep is None):
        raise document.error(path, "needs exactly one of sweep and timeline")
    known = METRICS if figure.timeline is None else TIMELINE_PANELS
    for index, panel in enumerate(figure.panels):
        if panel not in known:
            raise document.error((*path, "panels", index), f'unknown panel "{panel}"; {nearest(panel, known)}')
    if figure.timeline is not None:
        _check_place(document, (*path, "timeline"), figure.timeline, file, setup)
        return
    sweep = _sweep(document, (*path, "sweep"), figure.sweep, file)
    for key in ("x", "columns"):
        axis = getattr(figure, key)
        if axis is not None and axis not in sweep.axes:
            raise document.error((*path, key), f'sweep {sweep.name} has no axis "{axis}"; {nearest(axis, sweep.axes)}')


def _sweep(document: Document, path: KeyPath, name: object, file: schema.ExperimentFile) -> schema.Sweep:
    sweeps = {sweep.name: sweep for sweep in file.sweeps or [schema.Sweep(name="run")]}
    if name not in sweeps:
        raise document.error(path, f"unknown sweep {name!r}; {nearest(name, sweeps)}")
    return sweeps[str(name)]


def _check_systems(document: Document, path: KeyPath, names: Iterable[str], file: schema.ExperimentFile) -> None:
    known = [item if isinstance(item, str) else item.name for item in file.systems]
    for name in names:
        if name not in known:
            raise document.error(path, f'unknown system "{name}"; {nearest(name, known)}')


def _check_place(
    document: Document, path: KeyPath, at: dict[str, Any], file: schema.ExperimentFile, setup: Setup
) -> schema.Sweep | None:
    """``at`` names a sweep (or there is only one) and values that its axes take."""
    sweep = _sweep(document, (*path, "sweep"), at["sweep"], file) if "sweep" in at else None
    for axis, value in at.items():
        if axis == "sweep":
            continue
        check_axis(document, (*path, axis), axis, [value], setup)
        values = sweep.axes.get(axis) if sweep else None
        if values is not None and value not in values:
            raise document.error(
                (*path, axis), f"sweep {at['sweep']} has no point at {value!r}; expected one of {values}"
            )
    return sweep


_COMPARED = ("ratio", "mean_ratio", "difference", "max_difference", "order")


def check_claim(
    document: Document, path: KeyPath, claim: schema.Claim, file: schema.ExperimentFile, setup: Setup
) -> None:
    """A claim names existing things and has the keys that its measure needs."""
    _check_systems(document, (*path, "of"), [claim.of], file)
    _check_systems(document, (*path, "over"), [claim.over] if claim.over else [], file)
    for key in ("at", "over_at"):
        _check_place(document, (*path, key), getattr(claim, key), file, setup)
    for error in _claim_problems(document, path, claim, [model.id for model in file.models]):
        raise error


def _claim_problems(document: Document, path: KeyPath, claim: schema.Claim, models: list[str]) -> Iterable[ConfigError]:
    is_list = isinstance(claim.paper, list)
    if is_list != (claim.measure == "placement"):
        yield document.error(
            (*path, "paper"), 'a list such as ["A:0", "B:1"] is for the measure placement, and needed there'
        )
    if claim.measure != "placement" and claim.metric not in METRICS:
        yield document.error((*path, "metric"), f"unknown metric {claim.metric!r}; {nearest(claim.metric, METRICS)}")
    if claim.measure in _COMPARED and claim.over is None:
        yield document.error((*path, "over"), f"missing; the measure {claim.measure} compares two systems")
    if claim.model is not None and claim.model not in models:
        yield document.error((*path, "model"), f'unknown model "{claim.model}"; {nearest(claim.model, models)}')
    if claim.model is not None and claim.metric in CLUSTER_WIDE:
        yield document.error((*path, "model"), f"{claim.metric} is a number of the whole cluster")
    if not any(axis == "sweep" or axis in LOAD_AXES or "." in axis for axis in claim.at):
        yield document.error((*path, "at"), "names no place; give at least the sweep")
