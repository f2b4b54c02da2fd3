"""Measured against predicted: one row of panels a set, TTFT left and TPOT right, both axes in log seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from fineserve_calibrate.validate.cases import Floats
from fineserve_calibrate.validate.predict import Predicted
from fineserve_sim.experiment.show.plot_style import COLOURS, house_style, save

MOST_POINTS = 4000
"""Points drawn of one group: beyond, every k-th."""


def draw_sets(predictions: Mapping[str, Sequence[Predicted]], out: Path) -> list[Path]:
    """Write ``validate.png`` and ``.svg`` into ``out`` and return their paths; sets without cases have no panel."""
    shown = {name: found for name, found in predictions.items() if found}
    if not shown:
        return []
    out.mkdir(parents=True, exist_ok=True)
    with house_style():
        figure = Figure(figsize=(8.0, 3.2 * len(shown) + 0.4), layout="constrained")
        axes = figure.subplots(len(shown), 2, squeeze=False)
        for (left, right), (name, found) in zip(axes, shown.items(), strict=True):
            _panel(left, found, "ttft_s", f"{name}\nTTFT")
            _panel(right, found, "tpot_s", "\nTPOT")
        return save(figure, out / "validate")


def _panel(axes: Axes, found: Sequence[Predicted], column: str, title: str) -> None:
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
        axes.plot(x, y, ".", ms=3, color=COLOURS[place % len(COLOURS)], label=key, rasterized=True)
        ends += [x, y]
    values = np.concatenate(ends)
    if len(values):
        line = [values.min(), values.max()]
        axes.plot(line, line, color="#555555", lw=0.8)
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
            axis.set_major_formatter(FormatStrFormatter("%g"))
            axis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="measured (s)", ylabel="predicted (s)", title=title)
    axes.legend(fontsize=5, ncols=1 + len(groups) // 8)
