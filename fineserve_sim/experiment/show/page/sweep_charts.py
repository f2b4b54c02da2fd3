"""Figures of sweeps: one metric over one axis, a series a system and model, with 95 % intervals.

Each trace says in ``meta`` whose it is: ``system``, ``model`` (``""``: all models together) and ``facet``, the place on the
axes that are not on x. The page filters by that; alone, a figure shows all models at the first facet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from fineserve_sim.experiment.results.answer import bounds_nothing
from fineserve_sim.experiment.show.labels import (
    LATENCY,
    Quantity,
    axis_label,
    axis_text,
    distinct,
    number,
    quantity,
    varying_axes,
)
from fineserve_sim.experiment.show.page.style import ERROR_BARS, Looks, Spec, layout, percent_range, rounded
from fineserve_sim.experiment.show.where import NEVER, latency

Cell = Mapping[str, Any]
"""One entry of ``cells`` in summary.json."""

METRICS = (
    "slo_attainment",
    "ttft_attainment",
    "tpot_attainment",
    "e2e_attainment",
    "goodput_per_s",
    "decode_throughput_tokens_per_s",
    "ttft_p99_s",
    "tpot_p99_s",
)
"""Drawn for every sweep that has them, beside what the file's own figures show."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The cells of one sweep in the shape of its figures. ``x``: the axis across, None for a single point; ``facets``: the
    places on the other axes, in words."""

    name: str
    cells: tuple[Cell, ...]
    x: str | None
    others: tuple[str, ...]
    facets: tuple[str, ...]

    def facet_of(self, cell: Cell) -> int:
        return self.facets.index(_facet(cell, self.others))

    def first(self, answered: Cell | None) -> int:
        """The facet at which the page opens: that of the answer's cell, or else the widest."""
        if answered is not None and all(axis in answered["axes"] for axis in self.others):
            facet = _facet(answered, self.others)
            if facet in self.facets:
                return self.facets.index(facet)
        return self.widest

    @property
    def widest(self) -> int:
        """The facet at which the systems lie furthest apart somewhere."""
        reached: list[dict[Any, list[float]]] = [{} for _ in self.facets]
        for cell in self.cells:
            value = cell["metrics"]["ttft_attainment"]["mean"] or 0.0
            reached[self.facet_of(cell)].setdefault(_x(cell, self.x), []).append(value)
        spreads = [max(max(values) - min(values) for values in at.values()) for at in reached]
        return spreads.index(max(spreads))


def sweep_of(name: str, cells: Sequence[Cell]) -> Sweep:
    """The sweep of these cells: its first varying axis goes across."""
    axes = varying_axes(cells)
    x, others = (axes[0], tuple(axes[1:])) if axes else (None, ())
    places = product(*(distinct(cell["axes"][axis] for cell in cells) for axis in others))
    wanted = [", ".join(axis_text(axis, value) for axis, value in zip(others, place, strict=True)) for place in places]
    there = {_facet(cell, others) for cell in cells}
    return Sweep(name, tuple(cells), x, others, tuple(facet for facet in wanted if facet in there))


def _facet(cell: Cell, others: Sequence[str]) -> str:
    return ", ".join(axis_text(axis, cell["axes"][axis]) for axis in others)


def sweep_charts(sweep: Sweep, looks: Looks, panels: Sequence[str] = ()) -> dict[str, Spec]:
    """A figure for each metric that the cells have, by the name of the metric."""
    wanted = dict.fromkeys((*METRICS, *panels))
    return {metric: _chart(sweep, metric, looks) for metric in wanted if _known(sweep.cells, metric)}


def _known(cells: Sequence[Cell], metric: str) -> bool:
    ran = [cell for cell in cells if metric in cell["metrics"] and not bounds_nothing(cell, metric)]
    never = bool(LATENCY.fullmatch(metric)) and any("misses" in cell and latency(cell, metric) == NEVER for cell in ran)
    return never or any(cell["metrics"][metric].get("mean") is not None for cell in ran)


def _chart(sweep: Sweep, metric: str, looks: Looks) -> Spec:
    shown = quantity(metric)
    xs: list[Any] = distinct(cell["axes"][sweep.x] for cell in sweep.cells) if sweep.x else []
    numeric = len(xs) > 1 and all(isinstance(value, int | float) for value in xs)
    label = axis_label(sweep.x) if sweep.x else ""
    across: Spec = {"title": label} if numeric else {"title": label, "type": "category"}
    if numeric and len(xs) <= 8:
        across |= {"tickvals": xs, "ticktext": [number(value) for value in xs]}
        across |= {"type": "log"} if min(xs) > 0 and max(xs) >= 10 * min(xs) else {}
    if not sweep.x and len(sweep.cells) > 1:
        across |= {"showticklabels": False}  # the legend names the bars
    upward: Spec = {"title": shown.unit, "rangemode": "nonnegative"}
    data = list(_traces(sweep, metric, numeric, looks))
    if shown.unit == "%":
        least, most = percent_range(_drawn(data))
        upward |= {"range": [least, most]} | ({"title": f"% (from {least:g})"} if least > 0 else {})
    if numeric and LATENCY.fullmatch(metric):
        data += _never_ends(sweep, metric, max(_drawn(data), default=1.0), looks)
    shape = layout(shown.label, x=across, y=upward, barmode="group")
    shape["margin"] |= {"r": 44} if any(trace["name"].endswith(": never") for trace in data) else {}
    return {"data": data, "layout": shape}


def _drawn(data: Sequence[Spec]) -> list[float]:
    """All values of the traces of all models together, with what their intervals reach down to."""
    found = []
    for trace in data:
        if trace["meta"]["model"] == "":
            widths = trace.get("error_y", {}).get("array") or [0.0] * len(trace["y"])
            found += [y - width for y, width in zip(trace["y"], widths, strict=True) if y is not None]
    return found


def _never_ends(sweep: Sweep, metric: str, most: float, looks: Looks) -> Iterator[Spec]:
    """Signs above all values where a percentile falls on requests that never got so far, a height a system."""
    systems = list(dict.fromkeys(cell["system"] for cell in sweep.cells))
    for facet, (place, system) in product(range(len(sweep.facets)), enumerate(systems)):
        own = [cell for cell in sweep.cells if cell["system"] == system and sweep.facet_of(cell) == facet]
        for model in ("", *(own[0]["models"] if own else ())):
            lost = [cell for cell in own if cell["gpus"] and latency(cell, metric, model or None) == NEVER]
            if lost:
                height = rounded(most * (1.1 + 0.08 * place))
                yield {
                    "type": "scatter",
                    "mode": "lines+markers+text",
                    "x": sorted(_x(cell, sweep.x) for cell in lost),
                    "y": [height] * len(lost),
                    "text": [*[""] * (len(lost) - 1), "never"],
                    "textposition": "middle right",
                    "textfont": {"size": 10},
                    "name": f"{lost[0]['title']}: never",
                    "legendgroup": system,
                    "showlegend": False,
                    "hoverinfo": "name+x",
                    "line": {"color": looks.colour(system), "dash": "dot", "width": 1},
                    "marker": {"color": looks.colour(system), "symbol": "triangle-up", "size": 10},
                    "cliponaxis": False,
                    "meta": {"system": system, "model": model, "facet": facet},
                    "visible": model == "" and facet == 0,
                }


def _traces(sweep: Sweep, metric: str, numeric: bool, looks: Looks) -> Iterator[Spec]:
    """All models first, then one after the other."""
    systems = list(dict.fromkeys(cell["system"] for cell in sweep.cells))
    for facet, system in product(range(len(sweep.facets)), systems):
        own = [cell for cell in sweep.cells if cell["system"] == system and sweep.facet_of(cell) == facet]
        if not own or bounds_nothing(own[0], metric):
            continue
        for model in ("", *own[0]["metrics"].get(metric, {}).get("by_model", {})):
            entries = [_entry(cell, metric, model) for cell in own]
            never = {} if numeric else _never(own, metric, model)
            if never or any(entry.get("mean") is not None for entry in entries):
                xs = [_x(cell, sweep.x) for cell in own]
                yield (
                    _trace(own[0], xs, entries, quantity(metric), numeric, looks)
                    | never
                    | {
                        "meta": {"system": system, "model": model, "facet": facet},
                        "visible": model == "" and facet == 0,
                    }
                )


def _never(cells: Sequence[Cell], metric: str, model: str) -> Spec:
    """What stands where bars of a percentile would be that falls on requests that never got so far."""
    if not LATENCY.fullmatch(metric):
        return {}
    texts = [latency(cell, metric, model or None) for cell in cells]
    texts = [text if text == NEVER else "" for text in texts]
    look = {"textposition": "outside", "textangle": -90, "cliponaxis": False}
    return {"text": texts, "y": [0 if text else None for text in texts], **look} if all(texts) else {}


def _entry(cell: Cell, metric: str, model: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = cell["metrics"].get(metric, {})
    return found.get("by_model", {}).get(model, {}) if model else found


def _x(cell: Cell, x: str | None) -> Any:
    value = cell["axes"][x] if x else ""
    return value if isinstance(value, int | float) else str(value)


def _trace(
    cell: Cell, xs: list[Any], entries: Sequence[Mapping[str, Any]], shown: Quantity, numeric: bool, looks: Looks
) -> Spec:
    means, half_widths = (
        [None if entry.get(key) is None else rounded(entry[key] * shown.scale) for entry in entries]
        for key in ("mean", "half_width")
    )
    system = cell["system"]
    if numeric:
        pairs = sorted(zip(xs, means, half_widths, strict=True), key=lambda pair: pair[0])
        xs, means, half_widths = ([pair[place] for pair in pairs] for place in range(3))
        looked = {"type": "scatter", "mode": "lines+markers"} | looks.line(system)
    else:
        xs = [number(value) for value in xs] if any(x != "" for x in xs) else [cell["title"]]
        looked = {"type": "bar"} | looks.bar(system)
    found = {"x": xs, "y": means, "name": cell["title"], "legendgroup": system, **looked}
    if any(half_widths):
        found["error_y"] = {"type": "data", "array": [value or 0 for value in half_widths]} | ERROR_BARS
    return found
