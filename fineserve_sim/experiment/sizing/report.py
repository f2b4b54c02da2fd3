"""Answers of a search as a table, a figure and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from fineserve_sim.experiment.show.labels import number, quantity
from fineserve_sim.experiment.show.plot_style import Handle, SystemStyles, house_style, panel_grid, save, set_heading
from fineserve_sim.experiment.sizing.probe import Goal
from fineserve_sim.experiment.sizing.search import Answer, Axis


def table(answers: Sequence[Answer], axis: Axis, goals: Sequence[Goal]) -> Table:
    """A row a system: the answer, what it attains there, its GPU hours a million tokens, and what the search took."""
    found = Table(box=box.SIMPLE_HEAD)
    found.add_column("System")
    for header in (
        f"{axis.title}, {axis.best}",
        *(quantity(goal.metric).text for goal in goals),
        "GPU h/Mtoken",
        "Probes",
    ):
        found.add_column(header, justify="right")
    for answer in answers:
        best = answer.best
        shares = [f"{100 * best.shares[goal.metric]:.1f}" if best else "–" for goal in goals]
        hours = number(best.gpu_hours_per_mtoken) if best and best.gpu_hours_per_mtoken else "–"
        found.add_row(answer.title, number(best.value) if best else "none", *shares, hours, _probes(answer))
    return found


def _probes(answer: Answer) -> str:
    early = sum(probe.early for probe in answer.probes)
    return f"{len(answer.probes)}, {early} stopped early" if early else str(len(answer.probes))


def as_json(answers: Sequence[Answer], axis: Axis, goals: Sequence[Goal]) -> Mapping[str, Any]:
    """Everything that was found, probes included."""
    return {
        "over": axis.key,
        "best": axis.best,
        "targets": {goal.metric: goal.share for goal in goals},
        "systems": [
            {
                "system": answer.system,
                "title": answer.title,
                "answer": asdict(answer.best) if answer.best else None,
                "probes": [asdict(probe) for probe in answer.probes],
            }
            for answer in answers
        ],
    }


def draw(answers: Sequence[Answer], axis: Axis, goals: Sequence[Goal], title: str, out: Path) -> list[Path]:
    """Attainment over all probed values, a panel a target, as PNG and SVG in ``figures/``; the files written."""
    folder = out / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    with house_style():
        return save(_figure(answers, axis, goals, title), folder / "size")


def _figure(answers: Sequence[Answer], axis: Axis, goals: Sequence[Goal], title: str) -> Figure:
    styles = SystemStyles(answer.system for answer in answers)
    figure, grid = panel_grid(len(goals), 1)
    legend: dict[str, Handle] = {}
    for goal, (axes,) in zip(goals, grid, strict=True):
        for answer in answers:
            ran = sorted((probe.value, 100 * probe.shares[goal.metric]) for probe in answer.probes if probe.shares)
            (line,) = axes.plot(
                [value for value, _ in ran],
                [share for _, share in ran],
                color=styles.colour(answer.system),
                marker=styles.marker(answer.system),
                linestyle=styles.dashes(answer.system),
            )
            legend[answer.title] = line
            if answer.best:
                axes.axvline(answer.best.value, color=styles.colour(answer.system), linewidth=0.8, linestyle=":")
        axes.axhline(100 * goal.share, color="#333333", linewidth=0.8, linestyle="--")
        axes.set_ylabel(quantity(goal.metric).text)
        axes.set_ylim(0, 104)
        if axis.key != "cluster.count":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: number(value))
    grid[-1][0].set_xlabel(axis.title)
    set_heading(figure, title, "dashed: target; dotted: answer; each point is a probe, ended once it was sure", legend)
    return figure
