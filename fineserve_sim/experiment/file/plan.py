"""Which cells an experiment has: the grid of every sweep, as points.

A point is one place of a sweep for one system; with a seed it is one simulation. Axes are the three of the load
(``load``, ``rate_scale``, ``slo_scale``) and any dotted key of the file, whose value then replaces that of the file.
``matching`` finds the cells of a system at some values of its axes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.axes import LOAD_AXES
from fineserve_sim.experiment.file.checks import check
from fineserve_sim.experiment.file.document import Document, KeyPath
from fineserve_sim.experiment.file.errors import nearest
from fineserve_sim.experiment.file.extent import check_extent
from fineserve_sim.experiment.file.messages import validate
from fineserve_sim.experiment.file.resolve import Overrides, Setup, resolve
from fineserve_sim.experiment.file.schema import SINGLE
from fineserve_sim.experiment.file.sources import check_sources


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one place: ``overrides`` are values of dotted keys, sorted by key."""

    system: str
    load: str | None
    rate_scale: float
    slo_scale: float
    overrides: Overrides = ()

    @property
    def axes(self) -> dict[str, Any]:
        """The place without the system; ``load`` only where the file has loads."""
        load = {} if self.load is None else {"load": self.load}
        return {"slo_scale": self.slo_scale, "rate_scale": self.rate_scale} | load | dict(self.overrides)

    def __str__(self) -> str:
        return ", ".join([self.system, *(f"{axis} {value}" for axis, value in self.axes.items())])


@dataclass(frozen=True, slots=True)
class Experiment:
    """A validated experiment. ``setups`` has one setup for each combination of overridden keys, ``()`` the file's."""

    name: str
    document: Document
    file: schema.ExperimentFile
    setups: dict[Overrides, Setup]
    sweeps: dict[str, tuple[Point, ...]]

    @property
    def setup(self) -> Setup:
        return self.setups[()]

    @property
    def points(self) -> tuple[Point, ...]:
        """Every point once, in the order of the sweeps."""
        return tuple(dict.fromkeys(point for points in self.sweeps.values() for point in points))

    def setup_of(self, point: Point) -> Setup:
        return self.setups[point.overrides]

    def ordered_axes(self, sweep: str, point: Point) -> dict[str, Any]:
        """The axes of a point as one sweep tells them: its own axes first."""
        own = next((entry.axes for entry in self.file.sweeps if entry.name == sweep), {})
        axes = point.axes
        return {axis: axes[axis] for axis in own} | axes


def build(document: Document, name: str, folder: Path) -> Experiment:
    """Validate and resolve everything. Raises ConfigError for the first mistake."""
    file = validate(document)
    setups: dict[Overrides, Setup] = {(): resolve(document, file, folder)}
    check(document, file, setups[()])
    check_sources(document, setups[()])
    sweeps: dict[str, tuple[Point, ...]] = {}
    for index, sweep in enumerate(file.sweeps or [schema.Sweep(name="run")]):
        path: KeyPath = ("sweeps", index)
        sweeps[sweep.name] = tuple(_points(document, path, sweep, file))
        for point in sweeps[sweep.name]:
            if point.overrides not in setups:
                setups[point.overrides] = _varied(document, path, point.overrides, folder)
            check_extent(document, setups[point.overrides], point.load, point.rate_scale)
    experiment = Experiment(name, document, file, setups, sweeps)
    cells = [
        {"sweep": sweep, "system": point.system, "axes": point.axes}
        for sweep, points in experiment.sweeps.items()
        for point in points
    ]
    _check_answer(experiment)
    _check_shown_cells(experiment, cells)
    _check_claimed_cells(experiment, cells)
    return experiment


def _check_answer(experiment: Experiment) -> None:
    """The place of the answer is one of the sweeps' points."""
    asked = experiment.file.answer
    if asked is not None and not any(asked.at.items() <= point.axes.items() for point in experiment.points):
        raise experiment.document.error(("answer", "at"), "no cell is there; give values of axes that a sweep has")


def _check_shown_cells(experiment: Experiment, cells: Sequence[Mapping[str, Any]]) -> None:
    """Each timeline finds a cell of some system."""
    for index, figure in enumerate(experiment.file.figures):
        if figure.timeline is None:
            continue
        systems = figure.systems or dict.fromkeys(cell["system"] for cell in cells)
        if not any(matching(cells, system, figure.timeline) for system in systems):
            raise experiment.document.error(("figures", index, "timeline"), "no cell is there")


def _check_claimed_cells(experiment: Experiment, cells: Sequence[Mapping[str, Any]]) -> None:
    """Each claim finds its cells: one a side, or at least one where it looks at a whole sweep."""
    for index, claim in enumerate(experiment.file.claims):
        sides = {"of": matching(cells, claim.of, claim.at)}
        if claim.over is not None:
            sides["over"] = matching(cells, claim.over, {**claim.at, **claim.over_at})
        for side, found in sides.items():
            if not found:
                raise experiment.document.error(("claims", index, "at"), f"no cell of {getattr(claim, side)} is there")
            if len(found) > 1 and claim.measure in SINGLE:
                problem = f"{len(found)} cells of {getattr(claim, side)} are there; name more axes to choose one"
                raise experiment.document.error(("claims", index, "at"), problem)


def _points(document: Document, path: KeyPath, sweep: schema.Sweep, file: schema.ExperimentFile) -> Iterator[Point]:
    """The product of the axes in the order of the file, systems innermost."""
    named = [item if isinstance(item, str) else item.name for item in file.systems]
    for name in sweep.systems or ():
        if name not in named:
            raise document.error((*path, "systems"), f'unknown system "{name}"; {nearest(name, named)}')
    for values in product(*sweep.axes.values()):
        place = default_axes(file) | sweep.at | dict(zip(sweep.axes, values, strict=True))
        for system in sweep.systems or named:
            yield _point(system, place)


def default_axes(file: schema.ExperimentFile) -> dict[str, Any]:
    """Where a sweep is when it does not say: rate scale 1, the file's SLO scale, the first load."""
    slo_scale = file.slo.ttft.scale if file.slo.ttft else 1.0
    return {"load": next(iter(file.loads), None), "rate_scale": 1.0, "slo_scale": slo_scale}


def _point(system: str, place: Mapping[str, Any]) -> Point:
    overrides = tuple(sorted((key, value) for key, value in place.items() if key not in LOAD_AXES))
    return Point(system, place["load"], float(place["rate_scale"]), float(place["slo_scale"]), overrides)


def _varied(document: Document, path: KeyPath, overrides: Overrides, folder: Path) -> Setup:
    """The setup of the file with some keys replaced; mistakes are reported where the sweep is written."""
    varied = Document(copy.deepcopy(document.data), dict(document.places))
    for key, value in overrides:
        varied.set(key, value, document.place((*path, "axes", key)))
    file = validate(varied)
    setup = resolve(varied, file, folder)
    check(varied, file, setup)
    check_sources(varied, setup)
    return setup


Cell = Mapping[str, Any]


def matching(cells: Sequence[Cell], system: str, at: Mapping[str, Any]) -> list[Cell]:
    """The cells of a system at a place, each once though two sweeps may list it."""
    found = [
        cell
        for cell in cells
        if cell["system"] == system
        and at.get("sweep", cell["sweep"]) == cell["sweep"]
        and all(cell["axes"].get(axis) == value for axis, value in at.items() if axis != "sweep")
    ]
    return list({str(sorted(cell["axes"].items())): cell for cell in found}.values())
