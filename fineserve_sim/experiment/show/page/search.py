"""What a search for a size found, as ``size.json`` has it: the answers, their reasons, and every probe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.show.labels import quantity
from fineserve_sim.experiment.show.page.html import Html, Row, joined, table, tag
from fineserve_sim.experiment.show.page.style import LABELS_FROM, Looks, Spec, labelled, layout, percent_range, rounded
from fineserve_sim.experiment.show.sizes import headline, line_name, reasons
from fineserve_sim.experiment.show.sizes import table as answers_table

SIZE = "size.json"


def read_search(folder: Path) -> dict[str, Any] | None:
    """What is in a results folder of a search; None in one of a run. Raises ValueError for a damaged file, and for one that an
    older version wrote."""
    path = folder / SIZE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: damaged; search again") from None
    if "taken" not in found:
        raise ValueError(f"{path}: written by an older version; search again")
    return found


def search_section(found: Mapping[str, Any]) -> Html:
    """The answers as a table between the headline and the reasons."""
    cells = answers_table(found)
    rows = [Row(row) for row in cells.rows]
    listed = table(cells.headers, rows, numeric=set(range(len(cells.headers))) - set(cells.texts))
    return joined([tag("p", headline(found)), listed, *(tag("p", line) for line in reasons(found["systems"]))])


def search_charts(found: Mapping[str, Any]) -> dict[str, Spec]:
    """A figure a target: what each probe attained, a line a system and cluster."""
    looks = search_looks(found)
    names = list(looks.names)
    return {f"search/{metric}": _chart(found, metric, names, looks) for metric in found["targets"]}


def search_looks(found: Mapping[str, Any]) -> Looks:
    """Colours of the lines, by their names."""
    return Looks([line_name(answer, found["systems"]) for answer in found["systems"]])


def _chart(found: Mapping[str, Any], metric: str, names: Sequence[str], looks: Looks) -> Spec:
    data: list[Spec] = []
    for name, answer in zip(names, found["systems"], strict=True):
        ran = sorted((probe["value"], probe["shares"][metric]) for probe in answer["probes"] if probe["shares"])
        line = {"x": [value for value, _ in ran], "y": [rounded(100 * share) for _, share in ran], "name": name}
        drawn = {"type": "scatter", "mode": "lines+markers", "meta": {}} | line | looks.line(name)
        data.append(labelled(drawn, name) if ran and len(names) >= LABELS_FROM else drawn)
    share = 100 * found["targets"][metric]
    across: Spec = {"title": found["title"]} | ({"dtick": 1} if found["title"] == "GPUs" else {"type": "log"})
    least, most = percent_range([], share)
    title = "%" if least <= 0 else f"% (from {least:g})"
    shape = layout(quantity(metric).label, x=across, y={"title": title, "range": [least, most]})
    shape["shapes"] = [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": share,
            "y1": share,
            "line": {"dash": "dash", "width": 1.5, "color": "#8a8a8a"},
        }
    ]
    return {"data": data, "layout": shape}
