"""Figures of an experiment, as PNG and SVG, drawn from its results folder alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from fineserve_sim.experiment.plot_style import SystemStyles, house_style, save
from fineserve_sim.experiment.sweep_figure import sweep_figure, varying_axes

_DEFAULT_PANELS = ("ttft_attainment", "decode_throughput_tokens_per_s")


def draw(results_dir: Path) -> list[Path]:
    """Draw the ``figures`` of resolved.yaml, or a default set when it names none, into the folder ``figures/``.

    Returns the files written. Raises ValueError when the folder holds no results or a figure names what they lack.
    """
    summary = read_summary(results_dir)
    resolved = yaml.safe_load((results_dir / "resolved.yaml").read_text(encoding="utf-8"))
    folder = results_dir / "figures"
    folder.mkdir(exist_ok=True)
    styles = SystemStyles(cell["system"] for cell in summary["cells"])
    written: list[Path] = []
    with house_style():
        for entry in resolved.get("figures") or default_figures(summary["cells"]):
            written += save(_figure(entry, summary, results_dir, styles), folder / entry["name"])
    return written


def read_summary(results_dir: Path) -> dict[str, Any]:
    """summary.json of a results folder. Raises ValueError when there is none."""
    path = results_dir / "summary.json"
    if not path.is_file():
        raise ValueError(f"{results_dir}: no summary.json here; give a folder that `fineserve-sim run` has written")
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def default_figures(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Attainment and decode throughput over the first axis of every sweep."""
    figures = []
    for sweep in dict.fromkeys(cell["sweep"] for cell in cells):
        axes = varying_axes([cell for cell in cells if cell["sweep"] == sweep])
        x = axes[0] if axes else None
        figures.append({"name": sweep, "sweep": sweep, "x": x, "panels": list(_DEFAULT_PANELS)})
    return figures


def _figure(entry: Mapping[str, Any], summary: Mapping[str, Any], results_dir: Path, styles: SystemStyles) -> Figure:
    systems = entry.get("systems")
    cells = [
        cell
        for cell in summary["cells"]
        if cell["sweep"] == entry["sweep"] and (not systems or cell["system"] in systems)
    ]
    if not cells:
        raise ValueError(
            f"figure {entry['name']!r}: no results of sweep {entry['sweep']!r} for the systems it asks for"
        )
    return sweep_figure(
        cells,
        x=entry.get("x"),
        panels=entry["panels"],
        columns=entry.get("columns"),
        title=entry.get("title") or summary["title"],
        styles=styles,
    )
