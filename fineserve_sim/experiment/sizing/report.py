"""Answers of a search as a table, a figure and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fineserve_sim.experiment.results.step_times import measured_text
from fineserve_sim.experiment.show.answer import cheapest_text, dollars, lowered, percent, targets_text
from fineserve_sim.experiment.show.labels import number, quantity
from fineserve_sim.experiment.show.model_error import error_text
from fineserve_sim.experiment.show.out_of_reach import changes_text, out_of_reach_lines
from fineserve_sim.experiment.show.page.style import percent_range
from fineserve_sim.experiment.show.plot_style import (
    Handle,
    SystemStyles,
    house_style,
    line_width,
    panel_grid,
    save,
    set_heading,
)
from fineserve_sim.experiment.show.where import PlainTable
from fineserve_sim.experiment.sizing.probe import Goal
from fineserve_sim.experiment.sizing.search import GPUS, Answer, Axis, cheapest


def table(answers: Sequence[Answer], axis: Axis, goals: Sequence[Goal]) -> PlainTable:
    """A row a system and type of GPU: the answer with its attainment and cost, and what the search took."""
    several = len({answer.gpu for answer in answers}) > 1
    degrees, changed = any(answer.tp for answer in answers), any(answer.changes for answer in answers)
    headers = ["System", *(["With"] * changed), *(["GPU"] * several), *(["TP"] * degrees), f"{axis.title}, {axis.best}"]
    headers += [quantity(goal.metric).text for goal in goals]
    models = any(answer.best is not None and answer.best.worst for answer in answers)
    bands = any(answer.band for answer in answers)
    headers += [*(["Worst model"] * models), "$/h", "$/Mtok", *(["With model's error"] * bands), "Measured", "Probes"]
    left = [at for at, header in enumerate(headers) if header in ("System", "With", "GPU", "Worst model")]
    found = PlainTable(*headers, left=left)
    for answer in answers:
        place = [
            *([_with(answer) or "as asked"] * changed),
            *([answer.gpu] * several),
            *([str(answer.tp or "own")] * degrees),
        ]
        shares, costs = _shares(answer, goals), _costs(answer)
        sure = [*([str(answer.band or "–")] * bands), _measured(answer)]
        found.add_row(answer.title, *place, *shares, *([_worst(answer)] * models), *costs, *sure, _probes(answer))
    return found


def reasons(answers: Sequence[Answer]) -> list[str]:
    """A line for each reason of a none, with all systems and clusters that share it. Lines for models out of reach and for the
    errors of step times follow."""
    told: dict[str, list[str]] = {}
    several = len({answer.gpu for answer in answers}) > 1
    for answer in answers:
        if answer.best is None:
            tp = f" at TP {answer.tp}" if answer.tp else ""
            changed = f" with {_with(answer)}" if answer.changes else ""
            told.setdefault(answer.why, []).append(f"{answer.title}{f' on {answer.gpu}' * several}{tp}{changed}")
    bounds = [answer.bound.told()["models"] for answer in answers if answer.bound is not None]
    beyond = dict.fromkeys(line for models in bounds for line in out_of_reach_lines(models))
    errors = dict.fromkeys(error_text(answer.band.told()) for answer in answers if answer.band)
    return [*(f"None for {', '.join(who)}: {why}." for why, who in told.items()), *beyond, *errors]


def _with(answer: Answer) -> str:
    return changes_text([change._asdict() for change in answer.changes])


def _shares(answer: Answer, goals: Sequence[Goal]) -> list[str]:
    """The answer and what it attains."""
    best = answer.best
    if best is None:
        return ["none", *["–"] * len(goals)]
    widths = best.half_widths or {}
    shares = [percent(best.shares[goal.metric], widths.get(goal.metric)).removesuffix(" %") for goal in goals]
    return [number(best.value), *shares]


def _worst(answer: Answer) -> str:
    """The model with the least share within all limits."""
    worst = None if answer.best is None else answer.best.worst
    return "–" if worst is None else f"{worst[0]} {percent(worst[1])}"


def _measured(answer: Answer) -> str:
    """How much of the engines' time comes from measured tables, and from whose."""
    probe = answer.best or answer.closest
    return "–" if probe is None or probe.step_times is None else measured_text(probe.step_times)


def _costs(answer: Answer) -> list[str]:
    """Dollars an hour and a million tokens."""
    best = answer.best
    return ["–", "–"] if best is None else [_usd(best.usd_per_hour), _usd(best.usd_per_mtoken)]


def _usd(value: float | None) -> str:
    return "–" if value is None else dollars(value)


def headline(answers: Sequence[Answer], axis: Axis, goals: Sequence[Goal]) -> str:
    """The cheapest cluster that keeps the targets, in a sentence; of a rate or an SLO scale, what was asked."""
    targets = targets_text({goal.metric: goal.share for goal in goals})
    if not any(answer.best for answer in answers):
        return _none(answers, axis, targets)
    asked = all(answer.best is None or not answer.changes for answer in answers)
    as_asked = "" if asked else f"{_none([answer for answer in answers if not answer.changes], axis, targets)} "
    chosen = cheapest(answers) if axis is GPUS else None
    if chosen is None or chosen.best is None:
        return f"{as_asked}The {axis.best} {lowered(axis.title)} that keeps {targets}:"
    tp = f" at TP {chosen.tp}" if chosen.tp else ""
    cost = "" if chosen.best.usd_per_hour is None else f", ${chosen.best.usd_per_hour:,.2f} an hour"
    first = cheapest_text((answer.gpu, answer.best.usd_per_hour) for answer in answers if answer.best is not None)
    band = f" ({chosen.band} with the model's error)" if chosen.band else ""
    found = f"{chosen.title} on {chosen.best.value:g} {chosen.gpu}{tp}{band}{cost}"
    if chosen.changes:
        return f"{as_asked}With {_with(chosen)} the {first.removeprefix('The ')} them: {found}."
    return f"{first} {targets}: {found}."


def _none(answers: Sequence[Answer], axis: Axis, targets: str) -> str:
    """That nothing holds: for want of reach on idle GPUs, or as far as was searched."""
    gpus = " or ".join(dict.fromkeys(answer.gpu for answer in answers))
    if all(answer.bound is not None for answer in answers):
        whatever = f"number of {gpus}" if axis is GPUS else f"{lowered(axis.title)} on {gpus}"
        return f"No {whatever} keeps {targets}: some requests are out of reach even alone on idle GPUs."
    return f"No system keeps {targets}; the reasons are below."


def _probes(answer: Answer) -> str:
    early = sum(probe.early for probe in answer.probes)
    return f"{len(answer.probes)}, {early} stopped early" if early else str(len(answer.probes))


def as_json(
    answers: Sequence[Answer], axis: Axis, goals: Sequence[Goal], experiment: str, *, found: bool
) -> Mapping[str, Any]:
    """Everything that was found, probes included; ``cheapest`` is the place in ``systems`` of the one to take; ``found``:
    whether it was run in full, beside this."""
    chosen = cheapest(answers) if axis is GPUS else None
    return {
        "cheapest": None if chosen is None else list(answers).index(chosen),
        "found": found,
        "experiment": experiment,
        "over": axis.key,
        "title": axis.title,
        "best": axis.best,
        "targets": {goal.metric: goal.share for goal in goals},
        "systems": [
            {
                "system": answer.system,
                "title": answer.title,
                "gpu": answer.gpu,
                "tp": answer.tp,
                "why": answer.why,
                "changes": [change._asdict() for change in answer.changes],
                "out_of_reach": None if answer.bound is None else answer.bound.told(),
                "answer": asdict(answer.best) if answer.best else None,
                "band": answer.band.told() if answer.band else None,
                "probes": [asdict(probe) for probe in answer.probes],
            }
            for answer in answers
        ],
    }


def draw(
    answers: Sequence[Answer], axis: Axis, goals: Sequence[Goal], title: str, out: Path, limits: str = ""
) -> list[Path]:
    """Attainment over all probed values, a panel a target, as PNG and SVG in ``figures/``; the files written. ``limits``: in
    seconds, where the search leaves them alone."""
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    with house_style():
        return save(_figure(answers, axis, goals, title, limits), folder / "size")


def _name(answer: Answer, several: bool) -> str:
    """Of a line: the system, with its GPU and TP degree where several of these are searched."""
    tp = "" if answer.tp is None else f", TP {answer.tp}"
    changed = f", {_with(answer)}" if answer.changes else ""
    return f"{answer.title}{f', {answer.gpu}' * several}{tp}{changed}"


def _figure(answers: Sequence[Answer], axis: Axis, goals: Sequence[Goal], title: str, limits: str) -> Figure:
    several = len({answer.gpu for answer in answers}) > 1
    names = [_name(answer, several) for answer in answers]
    styles = SystemStyles(names, fixed=())
    figure, grid = panel_grid(len(goals), 1)
    legend: dict[str, Handle] = {}
    for goal, (axes,) in zip(goals, grid, strict=True):
        for place, (name, answer) in enumerate(zip(names, answers, strict=True)):
            legend[name] = _draw_probes(axes, answer, goal, styles, name, line_width(place, len(answers)))
        legend["target"] = axes.axhline(100 * goal.share, color="#333333", linewidth=0.8, linestyle=(0, (8, 3)))
        axes.set_ylabel(quantity(goal.metric).text)
        axes.set_ylim(*percent_range([], 100 * goal.share))
        if axis.key == "cluster.count":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: number(value))
    grid[-1][0].set_xlabel(axis.title)
    how = "ringed: the answer; each point is a probe, ended once it was sure"
    set_heading(figure, title, f"limits: {limits}; {how}" if limits else how, legend)
    return figure


def _draw_probes(axes: Panel, answer: Answer, goal: Goal, styles: SystemStyles, name: str, width_pt: float) -> Handle:
    """What a search asked and found, the answer in a ring."""
    ran = sorted((probe.value, 100 * probe.shares[goal.metric]) for probe in answer.probes if probe.shares)
    looks: dict[str, Any] = {
        "color": styles.colour(name),
        "marker": styles.marker(name),
        "linestyle": styles.dashes(name),
    }
    (line,) = axes.plot([value for value, _ in ran], [share for _, share in ran], linewidth=width_pt, **looks)
    if answer.best:
        at = (answer.best.value, 100 * answer.best.shares[goal.metric])
        axes.plot(*([each] for each in at), "o", ms=12, mfc="none", mec=styles.colour(name), clip_on=False)
    return line
