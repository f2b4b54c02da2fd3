"""How every figure looks, and how it is written so that the same results give the same bytes.

Fixed hash salt, no date, text as outlines, and none of the user's own matplotlib settings. Series differ by more than colour,
so that a grey print tells them apart: lines by marker and dashes, bars by hatching. Equal lines do not hide each other: wide
ones lie below narrow ones, each a little aside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any, TypeAlias, cast

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import ScaledTranslation, Transform

from fineserve_sim.experiment.run.files import atomic

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
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "savefig.dpi": 200.0,
    "svg.hashsalt": "fineserve",
    "svg.fonttype": "path",
}

_OTHER_SCRIPTS = ("Noto Sans CJK JP", "PingFang SC", "Microsoft YaHei", "Arial Unicode MS")
"""Fonts for what DejaVu Sans has no glyph of, where the machine has them; elsewhere such a character is a box."""

Handle: TypeAlias = Artist | Container
"""What a legend points at."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333")
"""Okabe and Ito, "Color Universal Design" (2008): they stay apart under colour blindness."""

Dashes: TypeAlias = str | tuple[float, tuple[float, ...]]

_MARKERS = "osD^vPX*<>ph"
_DASHES: tuple[Dashes, ...] = (
    "-",
    (0, (5, 1.6)),
    (0, (1.2, 1.2)),
    (0, (6, 1.6, 1.2, 1.6)),
    (0, (2.6, 1.2)),
)
_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "oo", "++", "||", "**")
_WIDEST, _NARROWEST = 2.8, 1.3
_WIDE = 100
"""An axis from a value to so many times of it has powers of ten alone for labels."""
_ROWS, _ROW_IN = 4, 0.2
"""So many rows of a legend have room above the panels; each more makes the figure so many inches higher."""
_BESIDE_PT, _ROOM_PT = 5.0, 24.0
"""Points from one series to the next where they are drawn side by side, and from the first to the last at most."""


class SystemStyles:
    """Colour, marker, dashes and hatching of each system, the same in every figure. No two of 60 systems have both marker and
    dashes in common, and no two of 10 their hatching.

    The systems of the FineServe paper have fixed places; others follow in order of appearance.
    """

    _FIXED = ("fineserve", "prism*", "static*", "dedicated")

    def __init__(self, systems: Iterable[str], fixed: Iterable[str] = _FIXED) -> None:
        self._place = {name: place for place, name in enumerate(dict.fromkeys((*fixed, *systems)))}

    def colour(self, system: str) -> str:
        return COLOURS[self._place[system] % len(COLOURS)]

    def marker(self, system: str) -> str:
        return _MARKERS[self._place[system] % len(_MARKERS)]

    def dashes(self, system: str) -> Dashes:
        return _DASHES[self._place[system] % len(_DASHES)]

    def hatch(self, system: str) -> str:
        return _HATCHES[self._place[system] % len(_HATCHES)]


def look_at(place: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line at ``place`` where series are no systems; as distinct as systems' lines."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "linestyle": _DASHES[place % len(_DASHES)],
    }


def line_width(place: int, count: int) -> float:
    """The width of the series at ``place`` of ``count`` that are drawn one over the other: the later, the narrower."""
    return _WIDEST - (_WIDEST - _NARROWEST) * place / max(1, count - 1)


def dashes_at(place: int) -> Dashes:
    """The dashes of the line at ``place``, where lines have no markers."""
    return _DASHES[place % len(_DASHES)]


def beside(axes: Axes, place: int, count: int, room_pt: float = _ROOM_PT) -> Transform:
    """Data coordinates for the series at ``place`` of ``count``, moved aside so that equal points stand side by side, in
    ``room_pt`` points at most."""
    step_pt = min(_BESIDE_PT, min(_ROOM_PT, room_pt) / max(1, count - 1))
    aside_in = (place - (count - 1) / 2) * step_pt / 72
    return axes.transData + ScaledTranslation(aside_in, 0, cast("Figure", axes.figure).dpi_scale_trans)


def log_ticks(axis: Axis, text: Callable[[float], str] = "{:g}".format) -> None:
    """Few labels along a logarithmic axis that has its data, as numbers without powers: matplotlib's own run into each other on
    small panels."""
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < _WIDE * low else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_formatter(NullFormatter())


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib's own defaults plus our settings for the time of the block."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        installed = set(fontManager.get_font_names())
        others = [name for name in _OTHER_SCRIPTS if name in installed]
        matplotlib.rcParams["font.family"] = [_SETTINGS["font.family"], *others]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            yield


def panel_grid(rows: int, columns: int, *, row_height_in: float = 2.2) -> tuple[Figure, list[list[Axes]]]:
    """A figure of ``rows`` x ``columns`` panels that share the x axis down and the y axis across."""
    width_in = max(4.6, 3.3 * columns + 0.6)
    figure = Figure(figsize=(width_in, row_height_in * rows + 1.0), layout="constrained")
    return figure, figure.subplots(rows, columns, sharex=True, sharey="row", squeeze=False).tolist()


def set_heading(figure: Figure, title: str, note: str, legend: dict[str, Handle]) -> None:
    """Title with one legend for all panels above them, and small print below."""
    width_in = figure.get_figwidth()
    entry_in = 0.65 + 0.075 * max(map(len, legend), default=0)
    per_row = min(len(legend), max(1, int(width_in // entry_in)))
    rows = -(-len(legend) // per_row) if legend else 0
    figure.set_figheight(figure.get_figheight() + _ROW_IN * max(0, rows - _ROWS))
    heading = figure.legend(
        cast("list[Artist]", list(legend.values())),  # containers serve as handles; only the annotation is narrower
        list(legend),
        loc="outside upper center",
        ncols=per_row,
        title=fill(title, int(9.5 * width_in)),
        title_fontproperties={"size": 11, "weight": "bold"},
    )
    heading.get_title().set_multialignment("center")
    figure.supxlabel(fill(note, int(16 * width_in)), fontsize=7.5, color="#666666")


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg, whole or not at all, and return their paths."""
    written = []
    for kind, metadata in (("png", None), ("svg", {"Date": None})):
        path = stem.with_name(f"{stem.name}.{kind}")
        with atomic(path) as temporary:
            figure.savefig(temporary, format=kind, metadata=metadata)
        written.append(path)
    return written
