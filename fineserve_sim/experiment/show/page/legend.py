"""One legend for a row of figures: a line of each series in its colour, dashes and symbol, with its name."""

from __future__ import annotations

from collections.abc import Mapping

from fineserve_sim.experiment.show.page.html import Html, tag
from fineserve_sim.experiment.show.page.style import DASHES, Looks

_SIGNS = {
    "circle": "●",
    "square": "■",
    "diamond": "◆",
    "triangle-down": "▼",
    "triangle-up": "▲",
    "pentagon": "⬟",
    "x": "✖",
    "star": "★",
}


def legend(looks: Looks, titles: Mapping[str, str], *, filtered: bool = True) -> Html:
    """An entry a name of ``titles``. ``filtered``: names are systems, by which the page filters entries and series alike."""
    return tag("p", *(_entry(looks, name, title, filtered) for name, title in titles.items()), class_="legend")


def _entry(looks: Looks, name: str, title: str, filtered: bool) -> Html:
    line = looks.line(name)
    colour, dash = line["line"]["color"], DASHES[line["line"]["dash"]]
    stroke = tag("line", x1=0, y1=7, x2=34, y2=7, stroke=colour, stroke_width=2.5, stroke_dasharray=dash)
    sign = tag("text", _SIGNS[line["marker"]["symbol"]], x=17, y=11.5, fill=colour, text_anchor="middle")
    drawing = tag("svg", stroke, sign, width=34, height=14, aria_hidden="true")
    return tag("span", drawing, f" {title}", data_system=name if filtered else None)
