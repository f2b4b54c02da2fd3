"""The parts of the page that show one place at a time: distributions, memory over time, placements, the slowest requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineserve_sim.cluster import Left
from fineserve_sim.cluster.scenario import LAST
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.show.labels import gpu_text
from fineserve_sim.experiment.show.page.curves import LATENCIES, latency_chart, latency_traces
from fineserve_sim.experiment.show.page.gpus import gpus_chart
from fineserve_sim.experiment.show.page.html import Html, Row, joined, table, tag
from fineserve_sim.experiment.show.page.memory import memory_chart
from fineserve_sim.experiment.show.page.places import Places
from fineserve_sim.experiment.show.page.records import records
from fineserve_sim.experiment.show.page.requests import stories
from fineserve_sim.experiment.show.page.style import Looks, Spec
from fineserve_sim.experiment.show.timelines.life import LEFT
from fineserve_sim.experiment.show.timelines.stored import StoredRun, run_of
from fineserve_sim.systems import load_systems

_VALUES = 120_000
_FEWEST, _MOST = 60, 400
"""Values of all memory figures together, and of one series."""
_STORIES = 240


@dataclass(frozen=True, slots=True)
class ByPlace:
    """Figures by name (of memory and GPUs: ``memory/<system>/<place>``, ``gpus/...``), placements at the start, tables by
    title, stories."""

    figures: dict[str, Spec]
    memory_systems: tuple[str, ...]
    placed_systems: tuple[str, ...]
    placements: Html
    tables: dict[str, Html]
    stories: Html


def by_place(folder: Path, places: Places, resolved: Mapping[str, Any], systems: Looks, models: Looks) -> ByPlace:
    """Everything of the places that are shown, from the first seed of each cell."""
    figures = {f"latency/{latency}": latency_chart(latency) for latency in LATENCIES}
    runs = [[run_of(folder, cell) for cell in place.cells.values()] for place in places.shown]
    points = _points(runs)
    moving = _moving(resolved)
    told: list[Html] = []
    count = max(1, min(8, _STORIES // sum(map(len, runs))))
    for index, (place, here) in enumerate(zip(places.shown, runs, strict=True)):
        by_system = dict(zip(place.cells, here, strict=True))
        data = {system: run.data for system, run in by_system.items()}
        for latency in LATENCIES:
            for trace in latency_traces(latency, data, place.cells, systems):
                figures[f"latency/{latency}"]["data"].append(trace | {"meta": trace["meta"] | {"place": index}})
        for system, run in by_system.items():
            told.append(stories(run, place.cells[system], index, count))
            chart = memory_chart(folder, run, moves=system in moving, points=points, looks=models)
            if chart is not None:
                figures[f"memory/{system}/{index}"] = chart
            if (placed := gpus_chart(place.cells[system])) is not None:
                figures[f"gpus/{system}/{index}"] = placed

    def systems_with(kind: str) -> tuple[str, ...]:
        here = [name.removeprefix(f"{kind}/") for name in figures if name.startswith(f"{kind}/")]
        return tuple(dict.fromkeys(name.rpartition("/")[0] for name in here))  # a system's name may have a slash

    return ByPlace(
        figures,
        systems_with("memory"),
        systems_with("gpus"),
        _placements(folder, places),
        _tables(places) | _moves(places, runs),
        joined(told),
    )


def _points(runs: list[list[StoredRun]]) -> int:
    """Values a series of the memory figures, so that all of them stay within bounds."""
    series = sum(len(run.data.engine_models) + len(run.engine_gpus) for here in runs for run in here)
    return max(_FEWEST, min(_MOST, _VALUES // max(1, series)))


def _moving(resolved: Mapping[str, Any]) -> set[str]:
    """The systems whose engines come and go."""
    built_in = load_systems()
    found = set()
    for entry in resolved["systems"]:
        name = entry if isinstance(entry, str) else entry["name"]
        base = built_in.get(entry if isinstance(entry, str) else entry.get("base", ""))
        own = None if isinstance(entry, str) else entry.get("residency")
        if own or (base is not None and base.residency is not None):
            found.add(name)
    return found


def _placements(folder: Path, places: Places) -> Html:
    """A row a GPU of each system and place; models that are nowhere come first and are loud."""
    entries = read_summary(folder)["placements"]
    rows = [
        row
        for index, place in enumerate(places.shown)
        for cell in place.cells.values()
        for row in _rows(cell, _entry(entries, cell), index)
    ]
    return table(["System", "GPU", "Models at the start"], rows)


_TABLES = {"models": "By model", "gpus": "By GPU", "cost": "Cost", "cost_by_kind": "Cost by kind of GPU"}
"""What a cell of summary.json may say of its models, its GPUs and what they cost, and the title of its table."""


def _tables(places: Places) -> dict[str, Html]:
    """A table each, with a row a model, GPU or cell of every place; those that no cell has are left out."""
    found: dict[str, Html] = {}
    for key, title in _TABLES.items():
        rows = [
            ({"System": cell["title"], **row}, {"system": cell["system"], "place": index})
            for index, place in enumerate(places.shown)
            for cell in place.cells.values()
            for row in map(_named, _records(cell.get(key)))
        ]
        missed = {cause for row, _ in rows for cause, count in row.get("misses", {}).items() if count}
        for row, _ in rows:
            if "misses" in row:
                row["misses"] = {cause: count for cause, count in row["misses"].items() if cause in missed}
        if rows:
            found[title] = records([row for row, _ in rows], [data for _, data in rows])
    return found


def _named(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose ``waiting`` is the share of the time that requests wait, and no number of them."""
    return {
        "requests_wait" if key == "waiting" and isinstance(value, float) else key: value for key, value in row.items()
    }


def _moves(places: Places, runs: list[list[StoredRun]]) -> dict[str, Html]:
    """How often requests left an engine and went on, by reason; nothing where all ended at their first engine."""
    rows, data = [], []
    for index, (place, here) in enumerate(zip(places.shown, runs, strict=True)):
        for cell, run in zip(place.cells.values(), here, strict=True):
            visits = run.data.visits
            for left in (left for left in Left if left not in LAST):
                found = visits.left == left
                if found.any():
                    moved = {"moves": int(found.sum()), "requests": len(set(visits.request[found].tolist()))}
                    rows.append({"System": cell["title"], "Left because": LEFT[left], **moved})
                    data.append({"system": cell["system"], "place": index})
    return {"Requests that moved": records(rows, data)} if rows else {}


def _records(value: Any) -> list[dict[str, Any]]:
    """A mapping of mappings as rows that begin with its keys, a list of mappings as it is, a mapping as one row."""
    if isinstance(value, Mapping) and all(isinstance(item, Mapping) for item in value.values()):
        return [{"model": name, **item} for name, item in value.items()]
    return [dict(value)] if isinstance(value, Mapping) else [dict(item) for item in value or ()]


def _entry(entries: list[Mapping[str, Any]], cell: Mapping[str, Any]) -> Mapping[str, Any]:
    place = {"system": cell["system"], **cell["axes"]}
    return next(entry for entry in entries if place.items() <= entry.items())


def _rows(cell: Mapping[str, Any], entry: Mapping[str, Any], place: int) -> Iterator[Row]:
    data = {"system": cell["system"], "place": place}
    if entry["unplaced"]:
        lost = tag("strong", f"UNPLACED: {', '.join(entry['unplaced'])}", class_="bad")
        yield Row([cell["title"], "none", lost], data)
    if entry["infeasible"]:
        names = ", ".join(dict.fromkeys(entry["infeasible"]))
        yield Row([cell["title"], "–", f"No degree or batch of these meets its SLO by itself: {names}"], data)
    gpus: dict[int, list[str]] = {}
    for instance in entry["instances"]:
        size = f" (1/{len(instance['gpus'])})" if len(instance["gpus"]) > 1 else ""
        for gpu in instance["gpus"]:
            gpus.setdefault(gpu, []).append(instance["model"] + size)
    shown = {gpu["gpu"]: gpu_text(gpu) for gpu in cell["gpus"]}
    for gpu in sorted(gpus):
        yield Row([cell["title"], shown.get(gpu, str(gpu)), ", ".join(gpus[gpu])], data)
