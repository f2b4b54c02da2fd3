"""How every figure looks, and how it is written so that the same results give the same bytes.

Fixed hash salt, no date, text as outlines, and none of the user's own matplotlib settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.container import Container
from matplotlib.figure import Figure

_SETTINGS: dict[Any, object] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.markersize": 6.0,
    "legend.frameon": False,
    "savefig.dpi": 200.0,
    "svg.hashsalt": "fineserve",
    "svg.fonttype": "path",
}

Handle: TypeAlias = Artist | Container
"""What a legend points at."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333")
"""Okabe and Ito, "Color Universal Design" (2008): they stay apart under colour blindness."""

_MARKERS = "osD^vPX"
_DASHES = ("-", "--", ":", "-.")


class SystemStyles:
    """Colour, marker and, where colours repeat, dashes of each system, the same in every figure.

    The systems of the FineServe paper have fixed places; others follow in order of appearance.
    """

    _FIXED = ("fineserve", "prism*", "static*", "dedicated")

    def __init__(self, systems: Iterable[str]) -> None:
        self._place = {name: place for place, name in enumerate(dict.fromkeys((*self._FIXED, *systems)))}

    def colour(self, system: str) -> str:
        return COLOURS[self._place[system] % len(COLOURS)]

    def marker(self, system: str) -> str:
        return _MARKERS[self._place[system] % len(_MARKERS)]

    def dashes(self, system: str) -> str:
        return _DASHES[self._place[system] // len(COLOURS) % len(_DASHES)]


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's own defaults plus our settings for the time of the block."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def panel_grid(rows: int, columns: int, *, row_height_in: float = 2.2) -> tuple[Figure, list[list[Axes]]]:
    """A figure of ``rows`` x ``columns`` panels that share the x axis down and the y axis across."""
    width_in = max(4.6, 3.3 * columns + 0.6)
    figure = Figure(figsize=(width_in, row_height_in * rows + 1.0), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False).tolist()


def set_heading(figure: Figure, title: str, note: str, legend: dict[str, Handle]) -> None:
    """Title with one legend for all panels above them, and one line of small print below."""
    per_row = min(len(legend), max(2, int(figure.get_figwidth() // 1.5)))
    figure.legend(
        cast("list[Artist]", list(legend.values())),  # containers serve as handles; only the annotation is narrower
        list(legend),
        loc="outside upper center",
        ncols=per_row,
        title=title,
        title_fontproperties={"size": 11, "weight": "bold"},
    )
    figure.supxlabel(note, fontsize=7.5, color="#666666")


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg and return their paths."""
    png, svg = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    figure.savefig(png)
    figure.savefig(svg, metadata={"Date": None})
    return [png, svg]
