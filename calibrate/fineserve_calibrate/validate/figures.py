"""Measured against predicted: one row of panels a set, TTFT left and TPOT right, both axes in log seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fineserve_calibrate.validate.cases import Floats
from fineserve_calibrate.validate.predict import Predicted
from fineserve_sim.experiment.show.plot_style import house_style, log_ticks, look_at, save

MOST_POINTS = 4000
"""Points drawn of one group: beyond, every k-th."""


def draw_sets(predictions: Mapping[str, Sequence[Predicted]], out: Path) -> list[Path]:
    """Write ``validate.png`` and ``.svg`` into ``out`` and return their paths; sets without cases have no panel."""
    shown = {name: found for name, found in predictions.items() if found}
    if not shown:
        return []
    out.mkdir(parents=True, exist_ok=True)
    with house_style():
        figure = Figure(figsize=(9.4, 3.2 * len(shown) + 0.4), layout="constrained")
        axes = figure.subplots(len(shown), 2, squeeze=False)
        for (left, right), (name, found) in zip(axes, shown.items(), strict=True):
            _panel(left, found, "ttft_s", f"{name}\nTTFT")
            _panel(right, found, "tpot_s", "\nTPOT", legend=True)
        return save(figure, out / "validate")


def _panel(axes: Axes, found: Sequence[Predicted], column: str, title: str, *, legend: bool = False) -> None:
    """``legend``: of both panels of a row, beside the right one, which has the same groups."""
    groups: dict[str, list[tuple[Floats, Floats]]] = {}
    for predicted in found:
        key = f"{predicted.case.label.backend} {predicted.case.label.precision} TP{predicted.case.label.tp}"
        groups.setdefault(key, []).append((getattr(predicted.case, column), getattr(predicted, column)))
    ends = []
    for place, (key, pairs) in enumerate(groups.items()):
        measured, guess = (np.concatenate(side) for side in zip(*pairs, strict=True))
        there = np.isfinite(measured) & np.isfinite(guess) & (measured > 0)
        step = max(1, int(there.sum()) // MOST_POINTS)
        x, y = measured[there][::step], guess[there][::step]
        axes.plot(x, y, **look_at(place) | {"linestyle": ""}, ms=3.5, mew=0.4, mec="white", label=key, rasterized=True)
        ends += [x, y]
    values = np.concatenate(ends)
    if len(values):
        line = [values.min(), values.max()]
        axes.plot(line, line, color="#555555", lw=0.8)
        axes.set(xscale="log", yscale="log")
        log_ticks(axes.xaxis)
        log_ticks(axes.yaxis)
    axes.set(xlabel="measured (s)", ylabel="predicted (s)", title=title)
    if legend:
        axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
