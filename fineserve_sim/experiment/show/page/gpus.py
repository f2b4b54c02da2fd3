"""The placement of one cell as a figure: a row a GPU with what fills its memory, and what its time was for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fineserve_sim.experiment.show.labels import gpu_text
from fineserve_sim.experiment.show.page.style import COLOURS, Spec, axis, frame, rounded
from fineserve_sim.experiment.show.where import MEMORY_PARTS, TIME_PARTS, memory_gib, most_waiting

_ROW_PX = 34
_GREY = "#8a8a8a"
_FILLS = ((_GREY, ""), (_GREY, "x"), (COLOURS[0], "/"), (COLOURS[5], ""))
_SIGNS = ((COLOURS[3], "square"), (COLOURS[1], "circle"), (COLOURS[2], "diamond"), (COLOURS[4], "x"))


def gpus_chart(cell: Mapping[str, Any]) -> Spec | None:
    """The figure of a cell; None for a bound, which has no GPUs."""
    if not cell["gpus"]:
        return None
    gpus = most_waiting(cell["gpus"])
    names = [f"GPU {gpu_text(gpu)}" for gpu in gpus]
    held = [f"{', '.join(gpu['models']) or 'no model'}" for gpu in gpus]
    shape = frame("") | {
        "height": 150 + _ROW_PX * len(gpus),
        "barmode": "stack",
        "showlegend": True,
        "margin": {"l": 64, "r": 12, "t": 16, "b": 90},
        "xaxis": axis(title="Memory (GiB)", domain=[0, 0.62], rangemode="tozero"),
        "xaxis2": axis(title="Of the time (%)", domain=[0.68, 1], range=[-3, 103]),
        "yaxis": axis(autorange="reversed", type="category"),
    }
    shape["legend"] = {"orientation": "h", "x": 0, "y": -56 / (_ROW_PX * len(gpus)), "yanchor": "top"}
    return {"data": [*_memory(gpus, names, held), *_time(gpus, names, held)], "layout": shape}


def _memory(gpus: Sequence[Mapping[str, Any]], names: Sequence[str], held: Sequence[str]) -> list[Spec]:
    parts = list(zip(*map(memory_gib, gpus), strict=True))
    return [
        {
            "type": "bar",
            "orientation": "h",
            "x": [rounded(gib, 3) for gib in values],
            "y": names,
            "name": name,
            "text": held,
            "textposition": "none",
            "hovertemplate": "%{text}<br>%{x} GiB",
            "marker": {"color": colour, "opacity": 0.75, "pattern": {"shape": pattern, "size": 7, "solidity": 0.25}},
            "meta": {},
        }
        for name, values, (colour, pattern) in zip(MEMORY_PARTS, parts, _FILLS, strict=True)
    ]


def _time(gpus: Sequence[Mapping[str, Any]], names: Sequence[str], held: Sequence[str]) -> list[Spec]:
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [rounded(100 * gpu[key], 3) for gpu in gpus],
            "y": names,
            "xaxis": "x2",
            "name": name,
            "text": held,
            "hovertemplate": "%{text}<br>%{x} %",
            "marker": {"color": colour, "symbol": symbol, "size": 10},
            "meta": {},
        }
        for (key, name), (colour, symbol) in zip(TIME_PARTS.items(), _SIGNS, strict=True)
    ]
