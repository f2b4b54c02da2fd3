"""What lies around an answer: the rate at which the chosen system breaks on its GPUs, and the fewest GPUs at its rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.file.schema import MixedCluster
from fineserve_sim.experiment.results.answer import margin
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.files import write_json
from fineserve_sim.experiment.run.runner import OnProgress
from fineserve_sim.experiment.sizing.changes import remedies
from fineserve_sim.experiment.sizing.feasibility import Feasibility
from fineserve_sim.experiment.sizing.probe import Attained, Goal, Prober, Told
from fineserve_sim.experiment.sizing.search import GPUS, LIMIT, RATE, Answer, Asked, fewest_gpus, turning_point
from fineserve_sim.experiment.sizing.sure import gpu_band

MOST_GPUS = 16
"""Looked at for a system that keeps the targets, or twice the GPUs of the answer where these are more."""

PRECISION = 0.1
"""The next rate that was tried is at most a tenth above the one that is told."""


def search_around(
    folder: Path,
    *,
    jobs: int | None = None,
    executor: Executor | None = None,
    on_progress: OnProgress | None = None,
    told: Told | None = None,
) -> dict[str, Any]:
    """Search around the answer of a results folder, write what is found into its summary.json, and return that. Where GPUs are
    of ``several`` kinds, the rate alone is searched."""
    summary = read_summary(folder)
    answer = summary["answer"]
    if answer is not None:
        goals = [Goal(metric, share) for metric, share in answer["targets"].items()]
        path = folder / "resolved.yaml"
        prober = Prober(path, folder, goals, jobs=jobs, executor=executor, on_progress=on_progress, told=told)
        several = isinstance(prober.file().file.cluster, MixedCluster)
        bounds = {} if answer["choice"]["holds"] or several else _bounds(prober, answer, _order(summary))
        answer["search"] = {"rate": _rate(prober, answer, bounds, several=several)}
        if not several:
            answer["search"]["gpus"] = _gpus(prober, answer, _order(summary), bounds)
            if answer["search"]["gpus"]["value"] is None:
                answer["search"]["changed"] = list(_changed(prober, answer, bounds))
        write_json(folder / "summary.json", summary)
    return summary


def _order(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Systems that can be run, with their titles, the one with the best attainment first."""
    cells = [cell for cell in summary["cells"] if cell["gpus"]]
    cells.sort(key=lambda cell: -(cell["metrics"]["slo_attainment"]["mean"] or 0.0))
    return list(dict.fromkeys((cell["system"], cell["title"]) for cell in cells))


def _bounds(prober: Prober, answer: Mapping[str, Any], order: Sequence[tuple[str, str]]) -> dict[str, Feasibility]:
    """By system, that the targets are out of reach on idle GPUs, at this load or any other."""
    place = {axis: value for axis, value in answer["axes"].items() if axis != "cluster.count"}
    there, most = replace(prober, at=place), _most(answer["choice"])
    found = {system: there.bound(system, GPUS.key, most) for system, _ in order}
    return {system: bound for system, bound in found.items() if bound is not None and bound.hopeless}


def _rate(
    prober: Prober, answer: Mapping[str, Any], bounds: Mapping[str, Feasibility], *, several: bool
) -> dict[str, Any]:
    """The highest rate scale at which the targets are kept (None: none down to ``least``), and the next that was tried."""
    choice, place = answer["choice"], dict(answer["axes"])
    start = float(place.pop("rate_scale"))
    if choice["system"] in bounds:
        return {"value": None, "fails_at": start, "least": 0.0}
    if not several:
        place["cluster.count"] = choice["gpus"]
    found = turning_point(replace(prober, at=place), choice["system"], choice["title"], RATE, start, PRECISION)
    value = found.best.value if found.best else None
    failing = [probe.value for probe in found.probes if not probe.holds and (value is None or probe.value > value)]
    return {"value": value, "fails_at": min(failing, default=None), "least": start / LIMIT}


def _most(choice: Mapping[str, Any]) -> int:
    """GPUs that are tried at most where the chosen cell does not keep the targets."""
    return max(2 * int(choice["gpus"]), MOST_GPUS)


def _gpus(
    prober: Prober,
    answer: Mapping[str, Any],
    order: Sequence[tuple[str, str]],
    bounds: Mapping[str, Feasibility],
) -> dict[str, Any]:
    """The fewest GPUs that keep the targets: for the chosen system where it keeps them, up to its own. Else for any system
    that may reach them, the one that comes closest first, up to ``MOST_GPUS`` or twice the GPUs of the chosen cell."""
    choice = answer["choice"]
    own = (choice["system"], choice["title"])
    least, most = (1, choice["gpus"]) if choice["holds"] else (choice["gpus"] + 1, _most(choice))
    if bounds and all(system in bounds for system, _ in order):
        bound = bounds.get(choice["system"]) or next(iter(bounds.values()))
        return {"system": own[0], "title": own[1], "value": None, "most": None, "why": ""} | {
            "out_of_reach": bound.told()
        }
    place = {axis: value for axis, value in answer["axes"].items() if axis != "cluster.count"}
    there = replace(prober, at=place)
    found: list[Answer] = []
    for system, title in [own] if choice["holds"] else [each for each in order if each[0] not in bounds]:
        best = next((each.best for each in reversed(found) if each.best), None)
        limit = most if best is None else int(best.value) - 1
        if limit >= least:
            found.append(fewest_gpus(there, system, title, least, limit))
    chosen = next((each for each in reversed(found) if each.best), max(found, key=_best_share))
    probes = [probe for each in found if each.system == chosen.system for probe in each.probes]
    band = None if chosen.best is None else gpu_band(there, chosen.system, chosen.best).told()
    return _told(chosen, answer["targets"], probes) | {"most": most, "why": chosen.why, "band": band}


def _changed(prober: Prober, answer: Mapping[str, Any], bounds: Mapping[str, Feasibility]) -> Iterator[dict[str, Any]]:
    """Where no number of GPUs keeps the targets: what the chosen system comes to on its GPUs with other precisions and degrees
    of its worst models."""
    choice, place = answer["choice"], {axis: value for axis, value in answer["axes"].items() if axis != "cluster.count"}
    there, gpus = replace(prober, at=place), float(choice["gpus"])
    asked = Asked(there, choice["system"], GPUS)
    bound = bounds.get(choice["system"])
    if bound is None:
        asked.holds(gpus)
    nothing = asked.answer(choice["title"], lambda: None)
    for changes in remedies(replace(nothing, bound=bound), there, GPUS):
        changed = there.changed(changes)
        with suppress(ConfigError):  # a degree above the number of GPUs, say
            reach = changed.bound(choice["system"], GPUS.key, gpus)
            changed.experiment(choice["system"], GPUS.key, gpus)
            probe = changed.ask(choice["system"], GPUS.key, gpus, fully=True)
            yield {
                "changes": [change._asdict() for change in changes],
                "shares": dict(probe.shares),
                "holds": probe.holds,
                "bounds": None if reach is None else reach.bounds,
            }


def _best_share(found: Answer) -> float:
    return max((min(probe.shares.values(), default=-1.0) for probe in found.probes), default=-1.0)


def _told(found: Answer, targets: Mapping[str, float], probes: Sequence[Attained]) -> dict[str, Any]:
    """What was found; ``not_on``: more GPUs on which the targets are missed, where there are any."""
    told: dict[str, Any] = {"system": found.system, "title": found.title, "value": None}
    best = found.best
    if best is None:
        return told
    widths = best.half_widths or {}
    margins = {metric: margin(best.shares[metric], widths.get(metric), share) for metric, share in targets.items()}
    missed = max((int(probe.value) for probe in probes if probe.value > best.value and not probe.holds), default=None)
    return told | {
        "value": int(best.value),
        "margins": margins,
        "unplaced": list(best.unplaced),
        "usd_per_hour": best.usd_per_hour,
        "not_on": missed,
    }
