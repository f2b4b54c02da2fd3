"""How figures of the page look: traces and layouts as Plotly's plain JSON, in colours for light and for dark.

Series that coincide stay visible: each system has its own symbol, dashes and width, the first ones wide and large. Colours are
Okabe and Ito's, in tones that hold on white and on near black; page.js exchanges text and grid with the theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Spec = dict[str, Any]
"""A Plotly figure, trace or layout as JSON."""

COLOURS = ("#0077c2", "#d55e00", "#009e73", "#cc79a7", "#d99000", "#45a5dd", "#8a6fd1", "#7f7f7f")
_SYMBOLS = ("circle", "square", "diamond", "triangle-down", "triangle-up", "pentagon", "x", "star")
DASHES = {
    "solid": None,
    "dash": "9 4",
    "dot": "2 3",
    "dashdot": "9 3 2 3",
    "longdash": "14 4",
    "longdashdot": "14 3 2 3",
}
"""Plotly's words for dashes, and the same in SVG."""
_DASHES = tuple(DASHES)
ERROR_BARS = {"color": "#8a8a8a", "thickness": 1.6, "width": 4}
"""Seen on white and on near black."""
_PATTERNS = ("", "/", "x", ".", "\\", "+", "-", "|")
_SIZES = (11, 9, 7.5, 6)
_WIDTHS = (3.6, 2.8, 2.1, 1.5)


class Looks:
    """Colour, symbol, dashes and pattern of each name of one kind (systems, or models), by order of appearance."""

    def __init__(self, names: Iterable[str], first_colour: int = 0) -> None:
        self._place = {name: place for place, name in enumerate(dict.fromkeys(names))}
        self._first = first_colour
        self.names = tuple(self._place)

    def colour(self, name: str) -> str:
        return COLOURS[(self._place[name] + self._first) % len(COLOURS)]

    def line(self, name: str) -> Spec:
        """Line and marker of a series over a numeric axis."""
        place = self._place[name]
        size = _SIZES[min(place, len(_SIZES) - 1)]
        return {
            "line": self.stroke(name),
            "marker": {"color": self.colour(name), "symbol": _SYMBOLS[place % len(_SYMBOLS)], "size": size},
        }

    def stroke(self, name: str) -> Spec:
        """A line without markers."""
        place = self._place[name]
        width = _WIDTHS[min(place, len(_WIDTHS) - 1)]
        return {"color": self.colour(name), "dash": _DASHES[place % len(_DASHES)], "width": width}

    def bar(self, name: str) -> Spec:
        pattern = {"shape": _PATTERNS[self._place[name] % len(_PATTERNS)], "size": 7, "solidity": 0.25}
        return {"marker": {"color": self.colour(name), "pattern": pattern}}


def layout(title: str, *, x: Spec, y: Spec, **more: Any) -> Spec:
    """A layout of one panel with transparent grounds; ``x`` and ``y`` are its axes."""
    return frame(title) | {"xaxis": axis(**x), "yaxis": axis(**y)} | more


def frame(title: str) -> Spec:
    """A layout without axes."""
    return {
        "title": {"text": title, "font": {"size": 14}, "x": 0, "xref": "paper", "xanchor": "left"},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "margin": {"l": 56, "r": 12, "t": 36, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": -0.28, "yanchor": "top"},
    }


def log_ticks(least: float, most: float, firsts: Sequence[int] = (1, 3)) -> Spec:
    """A logarithmic axis with ticks at these first digits of every decade, in plain numbers."""
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    values = [float(f"{first}e{decade}") for decade in decades for first in firsts]
    return {"type": "log", "tickvals": values, "ticktext": [f"{value:g}" for value in values]}


def axis(**more: Any) -> Spec:
    """An axis with a light grid; a ``title`` may be a text."""
    if isinstance(more.get("title"), str):
        more["title"] = {"text": more["title"]}
    look = {"gridcolor": "rgba(128,128,128,0.25)", "zeroline": False, "automargin": True, "tickangle": 0}
    return look | more


LABELS_FROM = len(COLOURS) + 1
"""So many series are told apart by labels at their ends, too: colours come again."""


def labelled(trace: Spec, name: str) -> Spec:
    """The trace with its name at its last point."""
    text = [""] * (len(trace["x"]) - 1) + [name]
    return trace | {"mode": f"{trace['mode']}+text", "text": text, "textposition": "top left", "textfont": {"size": 10}}


def percent_range(values: Sequence[float], target: float | None = None) -> tuple[float, float]:
    """Percent that an axis shows: all of them; where all are high, or what is asked is, the last ones alone."""
    least = min(values, default=0.0)
    if target is not None and target >= 90:
        return 100 - 5 * max(100 - target, 1.0), 100 + 0.25 * max(100 - target, 1.0)
    return (5 * math.floor(least / 5) - 1.0, 100.4) if least >= 90 else (0.0, 104.0)


def rounded(value: float | None, digits: int = 4) -> float | None:
    """A number for the page: so many significant digits, None where there is none."""
    return None if value is None or math.isnan(value) else float(f"{value:.{digits}g}")


def figure_of(spec: Mapping[str, Any]) -> Any:
    """A plotly.graph_objects.Figure, which zooms, saves itself and shows itself in notebooks."""
    import plotly.graph_objects as go

    return go.Figure(spec)
