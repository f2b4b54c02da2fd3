"""The figure of where everything is: a row a GPU of one cell with its models, what fills its memory, what its time was for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fineserve_sim.experiment.show.answer import gpus_text, place_text, unplaced_lines
from fineserve_sim.experiment.show.labels import gpu_text, number
from fineserve_sim.experiment.show.plot_style import COLOURS, Handle, set_heading
from fineserve_sim.experiment.show.where import MEMORY_PARTS, TIME_PARTS, memory_gib, most_waiting

_ROW_IN = 0.62
_FILLS = ((COLOURS[6], ""), ("#999999", "xxxx"), (COLOURS[0], "////"), (COLOURS[5], ""))
_BARS = ((COLOURS[3], "----"), (COLOURS[1], "////"), (COLOURS[2], "...."), (COLOURS[4], "xxxx"))


def placement_figure(cell: Mapping[str, Any], title: str) -> Figure:
    """Draw one cell of summary.json that has GPUs; those with the most waiting requests, where there are too many."""
    shown = most_waiting(cell["gpus"])
    figure = Figure(figsize=(9.6, 2.1 + _ROW_IN * len(shown)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    legend = {**_draw_memory(memory, shown), **_draw_time(time, shown)}
    memory.set_yticks(range(len(shown)), [_label(gpu) for gpu in shown])
    memory.set_ylim(len(shown) - 0.5, -0.5)
    for axes in (memory, time):
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
    start = "models at the start; they come and go" if cell["models_move"] else ""
    hidden = len(cell["gpus"]) - len(shown)
    rest = f"{hidden} more GPUs, on which fewer requests wait" if hidden else ""
    note = [f"{cell['title']} on {gpus_text(cell)}", place_text(cell), start, rest, "time: until the last arrival"]
    set_heading(figure, title, ", ".join(part for part in note if part), legend)
    for line in unplaced_lines([cell]):
        figure.suptitle(fill(line, 110), fontsize=9, color="#b00020", weight="bold")
    return figure


def _label(gpu: Mapping[str, Any]) -> str:
    return f"GPU {gpu_text(gpu)}\n{fill(', '.join(gpu['models']) or 'no model', 34)}"


def _draw_memory(axes: Axes, gpus: Sequence[Mapping[str, Any]]) -> dict[str, Handle]:
    """What fills each GPU's usable memory, in GiB, stacked; numbers where there is room."""
    legend: dict[str, Handle] = {}
    rows = [memory_gib(gpu) for gpu in gpus]
    most = max(sum(parts) for parts in rows)
    starts = [0.0] * len(rows)
    for place, (name, (colour, hatch)) in enumerate(zip(MEMORY_PARTS, _FILLS, strict=True)):
        widths = [parts[place] for parts in rows]
        bars = axes.barh(range(len(rows)), widths, 0.62, starts, color=(colour, 0.5), edgecolor=colour, hatch=hatch)
        labels = [number(round(width, 1)) if width > 0.06 * most else "" for width in widths]
        axes.bar_label(
            bars, labels, label_type="center", fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        )
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
        legend[name] = bars
    axes.set_xlabel("Memory (GiB)")
    axes.margins(x=0.02)
    return legend


def _draw_time(axes: Axes, gpus: Sequence[Mapping[str, Any]]) -> dict[str, Handle]:
    """Shares of the time, bar beside bar."""
    height = 0.8 / len(TIME_PARTS)
    legend: dict[str, Handle] = {}
    for place, ((key, name), (colour, hatch)) in enumerate(zip(TIME_PARTS.items(), _BARS, strict=True)):
        at = [row + height * (place - (len(TIME_PARTS) - 1) / 2) for row in range(len(gpus))]
        shares = [100 * gpu[key] for gpu in gpus]
        legend[name] = axes.barh(at, shares, height, color=(colour, 0.5), edgecolor=colour, hatch=hatch)
    axes.set_xlim(0, 104)
    axes.set_xlabel("Of the time (%)")
    return legend
