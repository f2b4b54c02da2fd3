"""All figures of a results folder by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.file.document import read_yaml
from fineserve_sim.experiment.results.answer import place_of, side_by_side
from fineserve_sim.experiment.show.page.style import Looks, Spec
from fineserve_sim.experiment.show.page.sweep_charts import Sweep, sweep_charts, sweep_of


def sweeps(summary: Mapping[str, Any]) -> list[Sweep]:
    """The sweeps in the order of the file; as one where they have each system once, all at one place."""
    cells = summary["cells"]
    if side_by_side(cells):
        return [sweep_of("systems", [{**cell, "axes": dict(place_of(cell))} for cell in cells])]
    names = dict.fromkeys(cell["sweep"] for cell in cells)
    return [sweep_of(name, [cell for cell in cells if cell["sweep"] == name]) for name in names]


def system_looks(summary: Mapping[str, Any]) -> Looks:
    return Looks(cell["system"] for cell in summary["cells"])


def sweep_figures(folder: Path, summary: Mapping[str, Any]) -> dict[str, Spec]:
    """Each sweep's figures as ``sweep/metric``, those that the experiment's own figures name among them."""
    own = read_yaml(folder / "resolved.yaml").data.get("figures") or []
    looks, found = system_looks(summary), {}
    for sweep in sweeps(summary):
        panels = [panel for entry in own if entry.get("sweep") == sweep.name for panel in entry["panels"]]
        for metric, spec in sweep_charts(sweep, looks, panels).items():
            found[f"{sweep.name}/{metric}"] = spec
    return found
