"""Answers of a search as data, and as a figure of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fineserve_sim.experiment.show.labels import number, quantity
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
from fineserve_sim.experiment.show.sizes import Found, line_name
from fineserve_sim.experiment.sizing.probe import Goal
from fineserve_sim.experiment.sizing.search import GPUS, Answer, Axis, to_take


def as_json(
    answers: Sequence[Answer], axis: Axis, goals: Sequence[Goal], experiment: str, *, found: bool
) -> Mapping[str, Any]:
    """Everything that was found, probes included. ``taken`` is the place in ``systems`` of the one to take, and ``cheapest``,
    too, where GPUs are searched. ``found``: whether it was run in full, beside this."""
    chosen = to_take(answers, axis)
    taken = None if chosen is None else list(answers).index(chosen)
    return {
        "taken": taken,
        "cheapest": taken if axis is GPUS else None,
        "found": found,
        "experiment": experiment,
        "over": axis.key,
        "title": axis.title,
        "best": axis.best,
        "targets": {goal.metric: goal.share for goal in goals},
        "systems": [answer_json(answer) for answer in answers],
    }


def answer_json(answer: Answer) -> dict[str, Any]:
    """One answer with its probes."""
    return {
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


def draw(found: Found, out: Path, limits: str = "") -> list[Path]:
    """Attainment over all probed values, a panel a target, as PNG and SVG in ``figures/``; the files written. ``limits``: in
    seconds, where the search leaves them alone."""
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    with house_style():
        return save(_figure(found, limits), folder / "size")


def _figure(found: Found, limits: str) -> Figure:
    answers = found["systems"]
    names = [line_name(answer, answers) for answer in answers]
    styles = SystemStyles(names, fixed=())
    figure, grid = panel_grid(len(found["targets"]), 1)
    legend: dict[str, Handle] = {}
    for (metric, share), (axes,) in zip(found["targets"].items(), grid, strict=True):
        for place, (name, answer) in enumerate(zip(names, answers, strict=True)):
            legend[name] = _draw_probes(axes, answer, metric, styles, name, line_width(place, len(answers)))
        legend["target"] = axes.axhline(100 * share, color="#333333", linewidth=0.8, linestyle=(0, (8, 3)))
        axes.set_ylabel(quantity(metric).text)
        axes.set_ylim(*percent_range([], 100 * share))
        if found["over"] == GPUS.key:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: number(value))
    grid[-1][0].set_xlabel(found["title"])
    how = "ringed: the answer; each point is a probe, ended once it was sure"
    set_heading(figure, found["experiment"], f"limits: {limits}; {how}" if limits else how, legend)
    return figure


def _draw_probes(
    axes: Panel, answer: Mapping[str, Any], metric: str, styles: SystemStyles, name: str, width_pt: float
) -> Handle:
    """What a search asked and found, the answer in a ring."""
    ran = sorted((probe["value"], 100 * probe["shares"][metric]) for probe in answer["probes"] if probe["shares"])
    looks: dict[str, Any] = {
        "color": styles.colour(name),
        "marker": styles.marker(name),
        "linestyle": styles.dashes(name),
    }
    (line,) = axes.plot([value for value, _ in ran], [share for _, share in ran], linewidth=width_pt, **looks)
    if best := answer["answer"]:
        at = (best["value"], 100 * best["shares"][metric])
        axes.plot(*([each] for each in at), "o", ms=12, mfc="none", mec=styles.colour(name), clip_on=False)
    return line
