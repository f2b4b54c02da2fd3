"""Figures of an experiment, as PNG and SVG, drawn from its results folder alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fineserve_sim.experiment.file.document import read_yaml
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.show.labels import varying_axes
from fineserve_sim.experiment.show.plot_style import SystemStyles, house_style, save
from fineserve_sim.experiment.show.sweep_figure import sweep_figure
from fineserve_sim.experiment.show.timeline_figure import timeline_figure

_DEFAULT_PANELS = ("ttft_attainment", "decode_throughput_tokens_per_s")


def draw(results_dir: Path, *, timelines: bool = True) -> list[Path]:
    """Draw the ``figures`` of resolved.yaml, or a default set when it names none, into the folder ``figures/``; without
    ``timelines`` where no samples were kept.

    Returns the files written. Raises ValueError when the folder holds no results or a figure names what they lack.
    """
    summary = read_summary(results_dir)
    resolved = read_yaml(results_dir / "resolved.yaml").data
    folder = results_dir / "figures"
    folder.mkdir(exist_ok=True)
    styles = SystemStyles(cell["system"] for cell in summary["cells"])
    written: list[Path] = []
    with house_style():
        for entry in resolved.get("figures") or default_figures(summary["cells"]):
            if "timeline" in entry and not timelines:
                continue
            written += save(_figure(entry, summary, results_dir, styles), folder / entry["name"])
    return written


def default_figures(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Attainment and decode throughput over the first axis of every sweep."""
    figures = []
    for sweep in dict.fromkeys(cell["sweep"] for cell in cells):
        axes = varying_axes([cell for cell in cells if cell["sweep"] == sweep])
        x = axes[0] if axes else None
        figures.append({"name": sweep, "sweep": sweep, "x": x, "panels": list(_DEFAULT_PANELS)})
    return figures


def _figure(entry: Mapping[str, Any], summary: Mapping[str, Any], results_dir: Path, styles: SystemStyles) -> Figure:
    title = entry.get("title") or summary["title"]
    systems = entry.get("systems") or list(dict.fromkeys(cell["system"] for cell in summary["cells"]))
    cells = [cell for cell in summary["cells"] if cell["system"] in systems]
    if "timeline" in entry:
        return timeline_figure(cells, entry["timeline"], panels=entry["panels"], title=title, results_dir=results_dir)
    sweep = entry["sweep"]
    cells = [cell for cell in cells if cell["sweep"] == sweep]
    if not cells:
        raise ValueError(f'figure "{title}": no results of sweep "{sweep}" for the systems it asks for')
    panels, columns = entry["panels"], entry.get("columns")
    return sweep_figure(cells, x=entry.get("x"), panels=panels, columns=columns, title=title, styles=styles)
