"""The figure of one moment after another: one row a panel, one column a system, one line a model (or a GPU).

Drawn from the timeline samples of the first seed of one cell a system. Engines of the same model are added up. What clients
see comes from the requests of the run. TTFT is the mean of those that arrived in the same 2 s. Output is drawn as if the tokens
of a request came evenly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fineserve_sim.experiment.file.plan import matching
from fineserve_sim.experiment.run.store import read_table
from fineserve_sim.experiment.show.answer import limits_text
from fineserve_sim.experiment.show.labels import axis_text, quantity
from fineserve_sim.experiment.show.plot_style import (
    COLOURS,
    Dashes,
    Handle,
    dashes_at,
    line_width,
    panel_grid,
    set_heading,
)

_ENGINE_PANELS = ("waiting", "running", "kv_used_bytes")
_REQUEST_PANELS = ("windowed_ttft_s", "output_tokens_per_s")
_WINDOW_S = 2.0
_CAPACITY = "KV capacity of the cluster"
_COLOURS = COLOURS[3:] + COLOURS[:3]
"""Models start at other colours than systems, so that nobody takes one for the other."""


class Timeline:
    """The samples of one run: shown series by panel and the name of what each belongs to."""

    def __init__(self, results_dir: Path, key: str) -> None:
        """Raises ValueError when the run has no samples in the folder."""
        path = results_dir / "cells" / f"{key}.timeline.parquet"
        if not path.is_file():
            raise ValueError(f"{path}: not there; run the experiment again to write it anew")
        self._table = read_table(path)
        self._requests_path = results_dir / "cells" / f"{key}.parquet"
        meta = json.loads((results_dir / "cells" / f"{key}.json").read_text(encoding="utf-8"))
        self._models: list[str] = meta["models"]
        self._engine_models: list[str] = meta["engine_models"]
        self._gpus: int = meta["gpus"]
        self.kv_capacity_bytes: int = sum(meta["kv_capacity_bytes"])

    @property
    def time_s(self) -> NDArray[np.float64]:
        return np.asarray(self._table.column("time_s").to_numpy(), dtype=np.float64)

    def series(self, panel: str) -> dict[str, NDArray[np.float64]]:
        """One array of shown values (T,) a model for panels of engines and requests, a GPU for the others."""
        if panel in _REQUEST_PANELS:
            return self._request_series(panel)
        names = owners = [f"GPU {index}" for index in range(self._gpus)]
        if panel in _ENGINE_PANELS:
            names = [f"Model {model}" for model in dict.fromkeys([*self._models, *self._engine_models])]
            owners = [f"Model {model}" for model in self._engine_models]
        summed = {name: np.zeros(len(self._table)) for name in names}
        for index, owner in enumerate(owners):
            summed[owner] += self._table.column(f"{panel}.{index}").to_numpy() * quantity(panel).scale
        return summed

    def _request_series(self, panel: str) -> dict[str, NDArray[np.float64]]:
        table = read_table(self._requests_path)
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        shown = {}
        for index, model in enumerate(self._models):
            own = {name: values[columns["model"] == index] for name, values in columns.items()}
            measure = _windowed_ttft_s if panel == "windowed_ttft_s" else _output_tokens_per_s
            shown[f"Model {model}"] = measure(self.time_s, own)
        return shown


def _windowed_ttft_s(time_s: NDArray[np.float64], requests: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Mean TTFT of the requests that arrived in the window of each sample; NaN where none did."""
    ttft_s = requests["first_token_s"] - requests["arrival_s"]
    known = np.isfinite(ttft_s)
    windows = (requests["arrival_s"][known] // _WINDOW_S).astype(np.int64)
    length = int(max([-1, *windows, *(time_s // _WINDOW_S)])) + 1
    counts = np.bincount(windows, minlength=length)
    sums = np.bincount(windows, ttft_s[known], length)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return np.asarray(means[(time_s // _WINDOW_S).astype(np.int64)], dtype=np.float64)


def _output_tokens_per_s(time_s: NDArray[np.float64], requests: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Sum of the rates of the requests that put out tokens at each sample: their tokens after the first over their time."""
    finished = np.isfinite(requests["finish_s"]) & (requests["finish_s"] > requests["first_token_s"])
    first_s, finish_s = requests["first_token_s"][finished], requests["finish_s"][finished]
    rates = (requests["output_tokens"][finished] - 1) / (finish_s - first_s)

    def begun(at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        order = np.argsort(at_s, kind="stable")
        sums = np.concatenate([[0.0], np.cumsum(rates[order])])
        return np.asarray(sums[np.searchsorted(at_s[order], time_s, side="right")])

    return np.maximum(begun(first_s) - begun(finish_s), 0.0)


def timeline_figure(
    cells: Sequence[Mapping[str, Any]], at: Mapping[str, Any], *, panels: Sequence[str], title: str, results_dir: Path
) -> Figure:
    """Draw the cell ``at`` one place of each system in ``cells``; the clairvoyant bound has no engines to show.

    Raises ValueError when no cell is there, or when a run has no samples.
    """
    there = {cell["system"]: cell for cell in reversed(_matching_any(cells, at))}
    systems = dict.fromkeys(cell["system"] for cell in cells if cell["system"] in there)
    shown = [there[system] for system in systems if _has_engines(results_dir, there[system]["runs"][0])]
    if not shown:
        place = ", ".join(axis_text(axis, value) for axis, value in at.items()) or "any place"
        raise ValueError(f'figure "{title}": no cell is at {place}')
    timelines = [Timeline(results_dir, cell["runs"][0]) for cell in shown]
    figure, grid = panel_grid(len(panels), len(shown), row_height_in=1.9)
    owners = [owner for timeline in timelines for panel in panels for owner in timeline.series(panel)]
    looks = {
        owner: (_COLOURS[place % len(_COLOURS)], dashes_at(place)) for place, owner in enumerate(dict.fromkeys(owners))
    }
    legend: dict[str, Handle] = {}
    for panel, row in zip(panels, grid, strict=True):
        for timeline, axes in zip(timelines, row, strict=True):
            legend |= _draw_panel(axes, timeline, panel, looks)
        row[0].set_ylabel(fill(quantity(panel).text, 24))
        row[0].set_ylim(bottom=0)
    for axes, cell in zip(grid[0], shown, strict=True):
        axes.set_title(cell["title"])
    for axes in grid[-1]:
        axes.set_xlabel("Time (s)")
    set_heading(figure, title, _note(shown[0]), dict(sorted(legend.items(), key=lambda entry: entry[0] == _CAPACITY)))
    return figure


def _note(cell: Mapping[str, Any]) -> str:
    """Where the samples are from, with limits in seconds."""
    derived = cell.get("derived", True)
    place = [axis_text(axis, value) for axis, value in cell["axes"].items() if axis != "slo_scale" or derived]
    limits = limits_text(cell)
    return ", ".join([*place, *([f"limits: {limits}"] if limits else []), "first seed"])


def _has_engines(results_dir: Path, key: str) -> bool:
    meta = json.loads((results_dir / "cells" / f"{key}.json").read_text(encoding="utf-8"))
    return bool(meta["engine_models"])


def _matching_any(cells: Sequence[Mapping[str, Any]], at: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The cells of every system at a place."""
    systems = dict.fromkeys(cell["system"] for cell in cells)
    return [cell for system in systems for cell in matching(cells, system, at)]


def _draw_panel(
    axes: Axes, timeline: Timeline, panel: str, looks: Mapping[str, tuple[str, Dashes]]
) -> dict[str, Handle]:
    legend: dict[str, Handle] = {}
    series = timeline.series(panel)
    for place, (owner, values) in enumerate(series.items()):
        colour, dashes = looks[owner]
        width_pt = line_width(place, len(series))
        legend[owner] = axes.plot(timeline.time_s, values, color=colour, linestyle=dashes, linewidth=width_pt)[0]
        axes.fill_between(timeline.time_s, values, color=colour, alpha=0.12, linewidth=0)
    if panel == "kv_used_bytes":
        capacity = timeline.kv_capacity_bytes * quantity(panel).scale
        legend[_CAPACITY] = axes.axhline(capacity, color="#666666", linewidth=1.0, linestyle=(0, (8, 3)))
    return legend
