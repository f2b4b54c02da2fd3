"""Memory over time, a row a GPU, and the requests that wait, from the samples of a run.

Where engines stay where they are, each row stacks the KV memory of the models on that GPU. Where they come and go, samples are
by model and not by GPU. A row then shows what weights and KV take together; the KV of each model is shown for the cluster.
However long a run is, a series has at most ``points`` values, each the most in its stretch of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.experiment.run.store import Store, read_table
from fineserve_sim.experiment.show.page.style import COLOURS, Looks, Spec, axis, frame
from fineserve_sim.experiment.show.timelines.stored import StoredRun

MOST_GPUS = 32
_ROW_PX = 92
_MOST_LABELS = 8
"""Names above a row of the figure."""
_GIB = 2**30
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Panel:
    """A row of the figure: its title, the most its axis shows (None: what its values need) and a series a name."""

    title: str
    most: float | None
    series: Mapping[str, Values]


def memory_chart(folder: Path, run: StoredRun, *, moves: bool, points: int, looks: Looks) -> Spec | None:
    """The figure of one run; None for a run without engines or samples. ``moves``: its engines come and go."""
    time_s = run.data.sample_s
    if len(time_s) < 2 or not run.data.engine_models:
        return None
    stretch = -(-len(time_s) // points)
    gpu_panels = _in_use(folder, run, stretch) if moves else _by_model(folder, run, stretch)
    waiting = Panel("Requests<br>waiting", None, _summed(run, _most(run.data.waiting, stretch)))
    return _figure([waiting, *gpu_panels], [round(at_s, 2) for at_s in time_s[::stretch].tolist()], looks)


def _most(samples: NDArray[Any], stretch: int) -> Values:
    """The largest of every ``stretch`` samples (T, ...)."""
    return np.asarray(np.maximum.reduceat(samples, np.arange(0, len(samples), stretch)), dtype=np.float64)


def _summed(run: StoredRun, columns: Values) -> dict[str, Values]:
    """The columns (T, engines) of each model together."""
    found: dict[str, Values] = {}
    for engine, model in enumerate(run.data.engine_models):
        found[model] = found.get(model, 0.0) + columns[:, engine]
    return found


def _by_model(folder: Path, run: StoredRun, stretch: int) -> Iterator[Panel]:
    """A panel a GPU that hosts an engine."""
    used_gib = _most(run.data.kv_used_bytes, stretch) / _GIB
    hosts: dict[int, dict[str, Values]] = {}
    for engine, gpus in enumerate(run.engine_gpus):
        model = run.data.engine_models[engine]
        for gpu in gpus:
            on_gpu = hosts.setdefault(gpu, {})
            on_gpu[model] = on_gpu.get(model, 0.0) + used_gib[:, engine] / len(gpus)
    capacities = Store(folder).meta(run.key)["kv_capacity_bytes"]
    known = len(capacities) == len(hosts)
    for place, gpu in enumerate(sorted(hosts)[:MOST_GPUS]):
        yield _gpu_panel(gpu, capacities[place] if known else None, hosts[gpu])


def _in_use(folder: Path, run: StoredRun, stretch: int) -> Iterator[Panel]:
    """A panel of the cluster's KV by model, and one a GPU of all that is in use."""
    yield Panel("KV,<br>all GPUs", None, _summed(run, _most(run.data.kv_used_bytes, stretch) / _GIB))
    capacities = Store(folder).meta(run.key)["kv_capacity_bytes"][:MOST_GPUS]
    names = [f"gpu_free_bytes.{gpu}" for gpu in range(len(capacities))]
    samples = read_table(folder / "cells" / f"{run.key}.timeline.parquet", columns=names)
    for gpu, capacity in enumerate(capacities):
        used = np.maximum(capacity - samples.column(names[gpu]).to_numpy(), 0.0)
        yield _gpu_panel(gpu, capacity, {"": _most(used, stretch) / _GIB})


def _gpu_panel(gpu: int, capacity_bytes: int | None, series: Mapping[str, Values]) -> Panel:
    """A GPU with what it has for KV, where that is known; a GPU whose weights leave none says so."""
    if capacity_bytes is None:
        return Panel(f"GPU {gpu}", None, series)
    room = f"{capacity_bytes / _GIB:.3g} GiB" if capacity_bytes else "no KV"
    return Panel(f"GPU {gpu}<br>{room}", capacity_bytes / _GIB or 1.0, series)


def _figure(panels: Sequence[Panel], times_s: Sequence[float], looks: Looks) -> Spec:
    rows = len(panels)
    shape = frame("") | {
        "height": 70 + _ROW_PX * rows,
        "showlegend": False,
        "margin": {"l": 76, "r": 12, "t": 16, "b": 54},
        "annotations": [],
    }
    last = "" if rows == 1 else str(rows)
    shape["xaxis"] = axis(title="Time (s)", anchor=f"y{last}", domain=[0, 1])
    gap = 0.2 / rows
    data, colours = [], _colours(panels, looks)
    for row, panel in enumerate(panels):
        number = "" if row == 0 else str(row + 1)
        bottom = 1 - (row + 1) / rows
        upward = axis(domain=[bottom + gap, bottom + 1 / rows], rangemode="tozero", nticks=4)
        upward["title"] = {"text": panel.title, "font": {"size": 11}}
        if panel.most is not None:
            upward |= {"range": [0, panel.most]}
        shape[f"yaxis{number}"] = upward
        data += [_area(model, values, number, times_s, colours[model]) for model, values in panel.series.items()]
        shape["annotations"].append(_label(panel, number, colours))
    return {"data": data, "layout": shape}


def _colours(panels: Sequence[Panel], looks: Looks) -> dict[str, str]:
    """A colour a model: its own, or one that no other model of its GPUs has, as far as there are so many."""
    found = {"": "#808080"}
    hosts = [panel.series for panel in panels if panel.most is not None] or [panel.series for panel in panels]
    for model in dict.fromkeys(model for panel in panels for model in panel.series if model):
        beside = {found[other] for series in hosts if model in series for other in series if other in found}
        wanted = [looks.colour(model), *COLOURS]
        found[model] = next((colour for colour in wanted if colour not in beside), wanted[0])
    return found


def _label(panel: Panel, row: str, colours: Mapping[str, str]) -> Spec:
    """The names of a panel's models in their colours, those with the most first."""
    names = sorted(
        (name for name in panel.series if name), key=lambda name: -float(panel.series[name].max(initial=0.0))
    )
    told = [f'<span style="color:{colours[name]}"><b>{escape(name)}</b></span>' for name in names[:_MOST_LABELS]]
    more = f" and {len(names) - _MOST_LABELS} more" if len(names) > _MOST_LABELS else ""
    return {
        "text": "  ".join(told) + more if told else "weights and KV in use",
        "xref": "paper",
        "yref": f"y{row} domain",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 10},
    }


def _area(model: str, values: Values, row: str, times_s: Sequence[float], colour: str) -> Spec:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": times_s,
        "y": [float(f"{value:.3g}") for value in values],
        "yaxis": f"y{row}",
        "name": model or "Weights and KV in use",
        "legendgroup": model,
        "stackgroup": f"row{row}",
        "line": {"width": 0.8, "color": colour},
        "fillcolor": colour + "b0",
        "meta": {"part": model},
    }
