"""What a run says in the terminal: a table a sweep, the claims with their verdicts, the cells to be careful with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fineserve_sim.experiment.results.answer import chosen_cell, place_of
from fineserve_sim.experiment.results.step_times import sentence
from fineserve_sim.experiment.show.answer import answer_lines, unplaced_lines
from fineserve_sim.experiment.show.labels import (
    axis_label,
    axis_text,
    distinct,
    interval,
    number,
    quantity,
    varying_axes,
)
from fineserve_sim.experiment.show.where import gpus_table, models_table, systems_table

Cell = Mapping[str, Any]
"""One entry of ``cells`` in summary.json."""

_SWEEP_METRICS = ("ttft_attainment", "decode_throughput_tokens_per_s")
_POINT_METRICS = (*_SWEEP_METRICS, "goodput_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "kv_use_mean")
_VERDICT_STYLES = {"reproduced": "green", "direction only": "yellow", "not reproduced": "red", "input": "dim"}
_MOST_FLAGS = 12
_NUMBER = re.compile(r"(?<![\w.-])(\d+(?:\.\d+)?)(?![\w.-])")
"""One that stands by itself: not that of a model's name."""


def report(summary: Mapping[str, Any]) -> Group:
    """Everything that the terminal shows of summary.json, in reading order."""
    cells = summary["cells"]
    parts: list[RenderableType] = [*answer_block(summary)]
    one_place = len({place_of(cell) for cell in cells}) == 1
    if one_place:
        parts.append(systems_table(cells))
    else:
        for sweep in dict.fromkeys(cell["sweep"] for cell in cells):
            parts += sweep_tables(sweep, [cell for cell in cells if cell["sweep"] == sweep])
    parts += chosen_tables(summary)
    if summary["claims"]:
        parts += claims_table(summary["claims"])
    parts += _footing(summary, shown=one_place)
    return Group(*parts)


def _footing(summary: Mapping[str, Any], *, shown: bool) -> Iterator[Text]:
    """What step times rest on, and what to handle with care: one line where one is enough."""
    words = [sentence(summary["step_times"])] if summary["step_times"] else []
    flagged = [*summary["warnings"], *flag_lines(summary["cells"], shown=shown)]
    if len(flagged) == 1:
        yield Text(". ".join([*words, f"Handle with care: {flagged[0]}"]))
        return
    if words:
        yield Text(words[0])
    if flagged:
        yield Text("\n".join(["Handle with care:", *(f"  {line}" for line in flagged), ""]))


def answer_block(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What to take and why, and which models have no GPU."""
    if lines := answer_lines(summary):
        yield Text("\n".join(lines))
    there = place_of(chosen_cell(summary) or summary["cells"][0])
    for line in unplaced_lines([cell for cell in summary["cells"] if place_of(cell) == there]):
        yield Text(line, style="bold red")


def chosen_tables(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The models and the GPUs of the chosen cell."""
    cell = chosen_cell(summary)
    if cell is not None and cell["gpus"]:
        title = summary["answer"]["choice"]["title"]
        yield models_table(cell, title)
        yield gpus_table(cell, title)


def sweep_tables(sweep: str, cells: Sequence[Cell]) -> Iterator[RenderableType]:
    """One table a metric with the first varying axis across; a sweep of one point is one table of many metrics."""
    axes = varying_axes(cells)
    if not axes:
        yield _heading(sweep)
        yield _point_table(cells)
        return
    for metric in _SWEEP_METRICS:
        yield _heading(f"{sweep}: {quantity(metric).text} by {axis_label(axes[0])}")
        yield _axis_table(cells, axes[0], axes[1:], metric)


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _point_table(cells: Sequence[Cell]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("System")
    for metric in _POINT_METRICS:
        table.add_column(quantity(metric).text, justify="right")
    for cell in cells:
        table.add_row(cell["title"], *(_estimate(cell, metric) for metric in _POINT_METRICS))
    return table


def _axis_table(cells: Sequence[Cell], x: str, others: Sequence[str], metric: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for axis in others:
        table.add_column(axis_label(axis))
    table.add_column("System")
    xs = distinct(cell["axes"][x] for cell in cells)
    for value in xs:
        table.add_column(number(value), justify="right")
    by_place = {(tuple(cell["axes"][axis] for axis in (*others, x)), cell["system"]): cell for cell in cells}
    systems = list(dict.fromkeys(cell["system"] for cell in cells))
    for group in product(*(distinct(cell["axes"][axis] for cell in cells) for axis in others)):
        columns = [[by_place.get(((*group, value), system)) for system in systems] for value in xs]
        shown = [_estimates(column, metric) for column in columns]
        for row, system in enumerate(systems):
            first = [number(value) if row == 0 else "" for value in group]
            table.add_row(*first, _title(cells, system), *(column[row] for column in shown))
        table.add_section()
    return table


def _title(cells: Sequence[Cell], system: str) -> str:
    return next(str(cell["title"]) for cell in cells if cell["system"] == system)


def _estimates(column: Sequence[Cell | None], metric: str) -> list[Text]:
    """One text a system, the best one bold."""
    means = [cell["metrics"][metric]["mean"] if cell else None for cell in column]
    best = max((mean for mean in means if mean is not None), default=None)
    return [
        Text(_estimate(cell, metric) if cell else "–", style="bold" if mean is not None and mean == best else "")
        for cell, mean in zip(column, means, strict=True)
    ]


def _estimate(cell: Cell, metric: str) -> str:
    """Mean and half-width of a 95 % interval, in the shown unit; one decimal for percentages."""
    found = cell["metrics"].get(metric, {})
    shown = quantity(metric)
    mean, half_width = (
        None if (value := found.get(key)) is None else value * shown.scale for key in ("mean", "half_width")
    )
    if mean is None:
        return "–"
    if shown.unit == "%":
        return f"{mean:.1f}" if half_width is None else f"{mean:.1f} ± {half_width:.1f}"
    return interval(mean, half_width)


def claims_table(claims: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """How many claims got which verdict; then each claim with the paper's value, ours and the verdict."""
    verdicts = [claim["verdict"] for claim in claims]
    counts = (f"{verdicts.count(verdict)} {verdict}" for verdict in _VERDICT_STYLES if verdict in verdicts)
    yield _heading(f"Claims: {', '.join(counts)}")
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("Claim")
    table.add_column("Measure")
    table.add_column("Paper", justify="right")
    table.add_column("Ours", justify="right")
    table.add_column("Verdict", no_wrap=True)
    for claim in claims:
        verdict = Text(claim["verdict"], style=_VERDICT_STYLES.get(claim["verdict"], ""))
        table.add_row(claim["id"], claim["measure"], _claim_value(claim["paper"]), _ours(claim), verdict)
    yield table


def _ours(claim: Mapping[str, Any]) -> str:
    ours = claim["ours"]
    return interval(ours, claim["half_width"]) if isinstance(ours, int | float) else _claim_value(ours)


def _claim_value(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else number(value)


def flag_lines(cells: Sequence[Cell], *, shown: bool = False) -> Iterator[str]:
    """One line a flag with the cells that carry it, and the range of its number where that alone differs; at most a dozen, then
    how many more there are. ``shown``: a table tells intervals and misses already, so that their flags are left out."""
    flagged: dict[tuple[str, str], dict[str, str]] = {}  # by the words around its number, that of each cell
    for cell in cells:
        place = ", ".join([cell["title"], *(axis_text(axis, value) for axis, value in cell["axes"].items())])
        for flag in cell["flags"]:
            if shown and any(word in flag for word in ("half-width", "rejected", "unfinished", "no GPU for")):
                continue
            before, amount, after = (*_NUMBER.split(flag, maxsplit=1), "", "")[:3]
            flagged.setdefault((before, after), {}).setdefault(place, amount)
    for (before, after), amounts in list(flagged.items())[:_MOST_FLAGS]:
        others = len(amounts) - 1
        more = f" and {others} other cell{'s' if others > 1 else ''}" if others else ""
        yield f"{before}{_range_of(amounts.values())}{after}: {next(iter(amounts))}{more}"
    if len(flagged) > _MOST_FLAGS:
        yield f"and {len(flagged) - _MOST_FLAGS} more flags (summary.json, cells)"


def _range_of(amounts: Iterable[str]) -> str:
    ordered = sorted(set(amounts), key=lambda amount: float(amount or 0))
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1])))
