"""The table of all cells: what each system reached, and where its misses come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fineserve_sim.experiment.results.answer import bounds_nothing
from fineserve_sim.experiment.show.labels import (
    LATENCY,
    axis_label,
    axis_text,
    interval,
    number,
    quantity,
    varying_axes,
)
from fineserve_sim.experiment.show.page.html import Html, Row, table
from fineserve_sim.experiment.show.where import latency

Cell = Mapping[str, Any]
"""One entry of ``cells`` in summary.json."""

_METRICS = (
    "slo_attainment",
    "ttft_attainment",
    "tpot_attainment",
    "e2e_attainment",
    "goodput_per_s",
    "decode_throughput_tokens_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p99_s",
)
_ENDS = ("dropped", "rejected", "unfinished")


def overview(cells: Sequence[Cell]) -> Html:
    """One row a cell, each with the name of its system for the filters of the page."""
    axes = varying_axes(cells)
    metrics = [metric for metric in _METRICS if any(metric in cell["metrics"] for cell in cells)]
    headers = ["System", *(axis_label(axis) for axis in axes), *(quantity(metric).text for metric in metrics)]
    causes = list(dict.fromkeys(cause for cell in cells for cause, count in misses(cell).items() if count))
    headers += [cause.capitalize() for cause in causes]
    rows = []
    for cell in cells:
        missed = misses(cell)
        texts = [number(cell["axes"].get(axis)) for axis in axes] + [estimate(cell, metric) for metric in metrics]
        rows.append(
            Row([cell["title"], *texts, *(number(missed[cause]) for cause in causes)], {"system": cell["system"]})
        )
    return table(headers, rows, numeric=range(1 + len(axes), len(headers)))


def misses(cell: Cell) -> Mapping[str, int]:
    """Requests that missed by cause: as the cell tells it, else those past their TTFT limit and the other ends."""
    found: Mapping[str, int] | None = cell.get("misses")
    return found if found is not None else {"late": _late(cell), **{end: cell.get(end, 0) for end in _ENDS}}


def _late(cell: Cell) -> int:
    reached: float = cell["metrics"]["ttft_attainment"]["mean"] or 0.0
    within = round(reached * int(cell.get("requests", 0)))
    return max(0, int(cell.get("finished", 0)) - within)


def estimate(cell: Cell, metric: str) -> str:
    """Mean and half-width in the shown unit; percentages with one decimal; ``never`` where a percentile falls on a request that
    never got so far."""
    if bounds_nothing(cell, metric):
        return "–"
    found, shown = cell["metrics"].get(metric, {}), quantity(metric)
    mean, half_width = (
        None if (value := found.get(key)) is None else value * shown.scale for key in ("mean", "half_width")
    )
    if mean is None:
        return latency(cell, metric) if LATENCY.fullmatch(metric) and "misses" in cell else number(None)
    if shown.unit != "%":
        return interval(mean, half_width)
    return f"{mean:.1f}" if half_width is None else f"{mean:.1f} ± {half_width:.1f}"


def place_text(cell: Cell) -> str:
    """Where a cell is, in words."""
    return ", ".join(axis_text(axis, value) for axis, value in cell["axes"].items())
