"""What a search for a size found, in words and cells. Screen, page and Python take them from here; ``found`` is size.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fineserve_sim.experiment.results.step_times import measured_text
from fineserve_sim.experiment.show.answer import cheapest_text, dollars, lowered, percent, targets_text
from fineserve_sim.experiment.show.labels import number, quantity
from fineserve_sim.experiment.show.model_error import error_text
from fineserve_sim.experiment.show.out_of_reach import changes_text, out_of_reach_lines

Found = Mapping[str, Any]
Answer = Mapping[str, Any]
"""One of ``systems`` of size.json: a system on a type of GPU at a TP degree."""

_TEXTS = ("System", "With", "GPU", "Worst model")


class Table(NamedTuple):
    """Cells in rows; columns of ``texts`` are set left."""

    headers: list[str]
    rows: list[list[str]]

    @property
    def texts(self) -> list[int]:
        return [at for at, header in enumerate(self.headers) if header in _TEXTS]


def several_gpus(answers: Sequence[Answer]) -> bool:
    return len({answer["gpu"] for answer in answers}) > 1


def table(found: Found) -> Table:
    """A row a system and type of GPU: the answer with its attainment and cost, how sure it is, and what the search took. A
    column that says nothing is left out."""
    rows = [dict(_cells(answer, found)) for answer in found["systems"]]
    empty = {
        "With": not any(answer["changes"] for answer in found["systems"]),
        "GPU": not several_gpus(found["systems"]),
        "TP": not any(answer["tp"] for answer in found["systems"]),
        "Worst model": all(row["Worst model"] == "–" for row in rows),
        "With model's error": all(row["With model's error"] == "–" for row in rows),
    }
    headers = [header for header in rows[0] if not empty.get(header)]
    return Table(headers, [[row[header] for header in headers] for row in rows])


def _cells(answer: Answer, found: Found) -> Iterator[tuple[str, str]]:
    best = answer["answer"]
    yield "System", answer["title"]
    yield "With", changes_text(answer["changes"]) or "as asked"
    yield "GPU", answer["gpu"]
    yield "TP", str(answer["tp"] or "own")
    yield f"{found['title']}, {found['best']}", "none" if best is None else number(best["value"])
    for metric in found["targets"]:
        yield quantity(metric).text, "–" if best is None else _share(best, metric)
    yield "Worst model", "–" if best is None or not best["worst"] else f"{best['worst'][0]} {percent(best['worst'][1])}"
    for header, key in (("$/h", "usd_per_hour"), ("$/Mtok", "usd_per_mtoken")):
        yield header, "–" if best is None or best[key] is None else dollars(best[key])
    yield "With model's error", answer["band"]["text"] if answer["band"] else "–"
    yield "Measured", _measured(answer)
    early = sum(probe["early"] for probe in answer["probes"])
    yield "Probes", f"{len(answer['probes'])}, {early} stopped early" if early else str(len(answer["probes"]))


def _share(best: Mapping[str, Any], metric: str) -> str:
    """Without its sign: the header has it."""
    return percent(best["shares"][metric], (best["half_widths"] or {}).get(metric)).removesuffix(" %")


def _measured(answer: Answer) -> str:
    """How much of the engines' time comes from measured tables, and from whose."""
    known = [probe["step_times"] for probe in (answer["answer"], *answer["probes"]) if probe and probe["step_times"]]
    return measured_text(known[0]) if known else "–"


def headline(found: Found) -> str:
    """The cheapest cluster that keeps the targets, the highest rate or the tightest SLO scale, in a sentence; or that there is
    none."""
    held = [answer for answer in found["systems"] if answer["answer"]]
    targets = targets_text(found["targets"])
    if not held:
        return _none(found["systems"], found, targets)
    asked = [answer for answer in found["systems"] if not answer["changes"]]
    none_as_asked = "" if any(answer in asked for answer in held) else f"{_none(asked, found, targets)} "
    chosen = found["systems"][found["taken"]]
    if found["cheapest"] is None:
        place = f"{number(chosen['answer']['value'])}, {line_name(chosen, held)}"
        return f"{none_as_asked}The {found['best']} {lowered(found['title'])} that keeps {targets}: {place}."
    first = cheapest_text((answer["gpu"], answer["answer"]["usd_per_hour"]) for answer in held)
    if chosen["changes"]:
        first = f"With {changes_text(chosen['changes'])} the {first.removeprefix('The ')} them"
    else:
        first = f"{first} {targets}"
    return f"{none_as_asked}{first}: {_cluster(chosen)}."


def _cluster(chosen: Answer) -> str:
    """The cluster of an answer and its cost."""
    tp = f" at TP {chosen['tp']}" if chosen["tp"] else ""
    band = f" ({chosen['band']['text']} with the model's error)" if chosen["band"] else ""
    usd = chosen["answer"]["usd_per_hour"]
    cost = "" if usd is None else f", ${usd:,.2f} an hour"
    return f"{chosen['title']} on {chosen['answer']['value']:g} {chosen['gpu']}{tp}{band}{cost}"


def _none(answers: Sequence[Answer], found: Found, targets: str) -> str:
    """That nothing holds: for want of reach on idle GPUs, or as far as was searched."""
    gpus = " or ".join(dict.fromkeys(answer["gpu"] for answer in answers))
    if all(answer["out_of_reach"] for answer in answers):
        searched = f"number of {gpus}" if found["title"] == "GPUs" else f"{lowered(found['title'])} on {gpus}"
        return f"No {searched} keeps {targets}: some requests are out of reach even alone on idle GPUs."
    return f"No system keeps {targets}; the reasons are below."


def reasons(answers: Sequence[Answer]) -> list[str]:
    """A line for each reason of a none, with all systems and clusters that share it. Lines for models out of reach and for the
    errors of step times follow."""
    told: dict[str, list[str]] = {}
    for answer in answers:
        if answer["answer"] is None:
            gpu = f" on {answer['gpu']}" * several_gpus(answers)
            tp = f" at TP {answer['tp']}" if answer["tp"] else ""
            changed = f" with {changes_text(answer['changes'])}" if answer["changes"] else ""
            told.setdefault(answer["why"], []).append(f"{answer['title']}{gpu}{tp}{changed}")
    bounds = [answer["out_of_reach"]["models"] for answer in answers if answer["out_of_reach"]]
    beyond = dict.fromkeys(line for models in bounds for line in out_of_reach_lines(models))
    errors = dict.fromkeys(error_text(answer["band"]) for answer in answers if answer["band"])
    return [*(f"None for {', '.join(systems)}: {why}." for why, systems in told.items()), *beyond, *errors]


def line_name(answer: Answer, others: Sequence[Answer]) -> str:
    """In a figure: the system, with its GPU and TP degree where several of these are searched, and what was changed."""
    gpu = f", {answer['gpu']}" * several_gpus(others)
    tp = f", TP {answer['tp']}" if answer["tp"] else ""
    changed = f", {changes_text(answer['changes'])}" if answer["changes"] else ""
    return f"{answer['title']}{gpu}{tp}{changed}"
