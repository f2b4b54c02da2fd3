"""What a search for a size found, as ``size.json`` has it: the answers, their reasons, and every probe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.results.step_times import measured_text
from fineserve_sim.experiment.show.answer import cheapest_text, dollars, percent, targets_text
from fineserve_sim.experiment.show.labels import number, quantity
from fineserve_sim.experiment.show.model_error import error_text
from fineserve_sim.experiment.show.out_of_reach import changes_text, out_of_reach_lines
from fineserve_sim.experiment.show.page.html import Html, Row, joined, table, tag
from fineserve_sim.experiment.show.page.style import LABELS_FROM, Looks, Spec, labelled, layout, percent_range, rounded

SIZE = "size.json"


def read_search(folder: Path) -> dict[str, Any] | None:
    """What is in a results folder of a search; None in one of a run. Raises ValueError for a damaged file."""
    path = folder / SIZE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: damaged; search again") from None
    return found


def search_section(found: Mapping[str, Any]) -> Html:
    """The answers as a table, with the share of step times that is measured, and one line before it. Lines for models out of
    reach and for the errors of step times follow."""
    answers, metrics = found["systems"], list(found["targets"])
    banded = [answer for answer in answers if answer["band"]]
    none = any(answer["answer"] is None for answer in answers)
    headers = ["System", "GPU", "TP", f"{found['title']}, {found['best']}", *(quantity(name).text for name in metrics)]
    headers += ["$ an hour", "$ a million tokens", *(["With model's error"] * bool(banded)), "Measured", "Probes"]
    rows = []
    for answer in answers:
        sure = [*([_band(answer) or "–"] * bool(banded)), _measured(answer), str(len(answer["probes"]))]
        rows.append(Row([*_cells(answer, metrics), *sure, *([answer["why"]] * none)]))
    beyond = [answer["out_of_reach"]["models"] for answer in answers if answer["out_of_reach"]]
    lines = [line for models in beyond for line in out_of_reach_lines(models)]
    lines += [error_text(answer["band"]) for answer in banded]
    listed = table([*headers, *(["Why none"] * none)], rows, numeric=range(2, len(headers)))
    return joined([tag("p", search_headline(found)), listed, *(tag("p", line) for line in dict.fromkeys(lines))])


def search_headline(found: Mapping[str, Any]) -> str:
    """What to take, in a sentence."""
    targets = targets_text(found["targets"])
    if found["cheapest"] is None:
        any_held = any(answer["answer"] for answer in found["systems"])
        axis = found["title"].lower() if found["title"] != "GPUs" else "GPUs"
        return f"The {found['best']} {axis} that keeps {targets}." if any_held else f"No system keeps {targets}."
    chosen = found["systems"][found["cheapest"]]
    cost = chosen["answer"]["usd_per_hour"]
    price = "" if cost is None else f", ${cost:,.2f} an hour"
    tp = f" at TP {chosen['tp']}" if chosen["tp"] else ""
    band = f" ({_band(chosen)} with the model's error)" if _band(chosen) else ""
    where = f"{_title(chosen)} on {chosen['answer']['value']:g} {chosen['gpu']}{tp}{band}"
    held = [answer for answer in found["systems"] if answer["answer"]]
    first = cheapest_text((answer["gpu"], answer["answer"]["usd_per_hour"]) for answer in held)
    return f"{first} {targets}: {where}{price}."


def _cells(answer: Mapping[str, Any], metrics: Sequence[str]) -> Iterator[str]:
    yield from (_title(answer), answer["gpu"], str(answer["tp"] or "own"))
    best = answer["answer"]
    if best is None:
        yield from ("none", *("–" for _ in metrics), "–", "–")
        return
    widths = best["half_widths"] or {}
    yield number(best["value"])
    yield from (percent(best["shares"][name], widths.get(name)).removesuffix(" %") for name in metrics)
    yield from ("–" if best[key] is None else dollars(best[key]) for key in ("usd_per_hour", "usd_per_mtoken"))


def _band(answer: Mapping[str, Any]) -> str:
    """The numbers of GPUs with the model's own error; nothing where it was not asked."""
    return str(answer["band"]["text"]) if answer["band"] else ""


def _measured(answer: Mapping[str, Any]) -> str:
    """How much of the engines' time comes from measured tables, and from whose."""
    known = [probe["step_times"] for probe in (answer["answer"], *answer["probes"]) if probe and probe["step_times"]]
    return measured_text(known[0]) if known else "–"


def search_charts(found: Mapping[str, Any]) -> dict[str, Spec]:
    """A figure a target: what each probe attained, a line a system and cluster."""
    looks = search_looks(found)
    names = list(looks.names)
    return {f"search/{metric}": _chart(found, metric, names, looks) for metric in found["targets"]}


def search_looks(found: Mapping[str, Any]) -> Looks:
    """Colours of the lines, by their names."""
    return Looks([_name(answer, found["systems"]) for answer in found["systems"]])


def _name(answer: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    several = len({other["gpu"] for other in others}) > 1
    tp = f", TP {answer['tp']}" if answer["tp"] else ""
    gpu = f", {answer['gpu']}" * several
    return f"{_title(answer)}{gpu}{tp}"


def _title(answer: Mapping[str, Any]) -> str:
    """The system, with what was changed of its models."""
    return f"{answer['title']} with {changes_text(answer['changes'])}" if answer["changes"] else str(answer["title"])


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
