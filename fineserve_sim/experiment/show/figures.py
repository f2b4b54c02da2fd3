"""Figures of an experiment, as PNG and SVG, drawn from its results folder alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fineserve_sim.experiment.file.document import read_yaml
from fineserve_sim.experiment.results.answer import chosen_cell, place_of, side_by_side
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.run.files import unwritable
from fineserve_sim.experiment.show.labels import varying_axes
from fineserve_sim.experiment.show.placement_figure import placement_figure
from fineserve_sim.experiment.show.plot_style import SystemStyles, house_style, save
from fineserve_sim.experiment.show.sweep_figure import sweep_figure
from fineserve_sim.experiment.show.timeline_figure import timeline_figure

Cell = Mapping[str, Any]

_SYSTEMS, _PLACEMENT = "systems", "placement"
"""Names of figures: all systems at the one place that there is, and the GPUs of the chosen one."""


def draw(results_dir: Path, *, timelines: bool = True) -> list[Path]:
    """Draw the ``figures`` of resolved.yaml, or a default set when it names none, into the folder ``figures/``. The placement
    of the system that the answer chose comes with them. Without ``timelines`` no samples are drawn. Figures of another
    experiment that were there go.

    Returns the files written. Raises ValueError when the folder holds no results or a figure names what they lack.
    """
    summary = read_summary(results_dir)
    resolved = read_yaml(results_dir / "resolved.yaml").data
    with house_style():
        drawn = dict(_figures(summary, resolved, results_dir, timelines))
        folder = results_dir / "figures"
        folder.mkdir(exist_ok=True)
        try:
            written = [path for name, figure in drawn.items() for path in save(figure, folder / name)]
        except OSError as problem:
            if not any(folder.iterdir()):
                folder.rmdir()
            raise unwritable(folder, problem) from None
    for path in {*folder.glob("*.png"), *folder.glob("*.svg")} - {*written}:
        path.unlink()
    return written


def _figures(
    summary: Mapping[str, Any], resolved: Mapping[str, Any], results_dir: Path, timelines: bool
) -> Iterator[tuple[str, Figure]]:
    """Every figure with its name."""
    styles = SystemStyles(cell["system"] for cell in summary["cells"])
    entries = resolved.get("figures") or default_figures(summary["cells"])
    entries = [entry for entry in entries if timelines or "timeline" not in entry]
    for entry in entries:
        yield entry["name"], _figure(entry, summary, results_dir, styles)
    cell = chosen_cell(summary)
    if cell is not None and cell["gpus"] and not any(entry["name"] == _PLACEMENT for entry in entries):
        named = {**cell, "title": summary["answer"]["choice"]["title"]}
        yield _PLACEMENT, placement_figure(named, summary["title"])


def default_figures(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Attainment and decode throughput over the first axis of every sweep; of all systems together where all sweeps are at
    one place and each system is there once."""
    sweeps = list(dict.fromkeys(cell["sweep"] for cell in cells))
    several = any(limit in cell["metrics"] for cell in cells for limit in ("tpot_attainment", "e2e_attainment"))
    panels = ["slo_attainment" if several else "ttft_attainment", "decode_throughput_tokens_per_s"]
    if side_by_side(cells):
        return [{"name": _SYSTEMS, "sweep": None, "x": None, "panels": panels}]
    figures = []
    for sweep in sweeps:
        axes = varying_axes([cell for cell in cells if cell["sweep"] == sweep])
        x = axes[0] if axes else None
        figures.append({"name": sweep, "sweep": sweep, "x": x, "panels": panels})
    return figures


def _figure(entry: Mapping[str, Any], summary: Mapping[str, Any], results_dir: Path, styles: SystemStyles) -> Figure:
    title = entry.get("title") or summary["title"]
    systems = entry.get("systems") or list(dict.fromkeys(cell["system"] for cell in summary["cells"]))
    cells = [cell for cell in summary["cells"] if cell["system"] in systems]
    if "timeline" in entry:
        return timeline_figure(cells, entry["timeline"], panels=entry["panels"], title=title, results_dir=results_dir)
    sweep = entry["sweep"]
    cells = [cell for cell in cells if cell["sweep"] == sweep] if sweep is not None else _at_one_place(cells)
    if not cells:
        raise ValueError(f'figure "{title}": no results of sweep "{sweep}" for the systems it asks for')
    panels, columns = entry["panels"], entry.get("columns")
    return sweep_figure(cells, x=entry.get("x"), panels=panels, columns=columns, title=title, styles=styles)


def _at_one_place(cells: Sequence[Cell]) -> list[Cell]:
    """The cells without the axes of their clusters, so that systems on different numbers of GPUs stand side by side."""
    return [{**cell, "axes": dict(place_of(cell))} for cell in cells]
