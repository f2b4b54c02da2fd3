"""A difference for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fineserve_sim.experiment.show.diff.compare import Diff, Moved
from fineserve_sim.experiment.show.labels import interval, number, quantity

_HEADLINES = (
    "slo_attainment",
    "ttft_attainment",
    "tpot_attainment",
    "e2e_attainment",
    "goodput_per_s",
    "decode_throughput_tokens_per_s",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p99_s",
    "e2e_p99_s",
    "kv_use_mean",
)
_MOST_LINES = 40


def told(found: Diff) -> Group:
    """Inputs, results, decisions and claims; long lists are cut and say so."""
    return Group(*_parts(found))


def _parts(found: Diff) -> Iterator[RenderableType]:
    if found.same:
        yield Text(f"The same in all {found.cells} cells: inputs, results, decisions, claims.")
    yield from _lines("Inputs", [f"{change.key}: {_value(change.a)} -> {_value(change.b)}" for change in found.inputs])
    yield from _lines("Cells", list(found.only))
    shown = [each for each in found.moved if each.metric in _HEADLINES]
    if shown:
        yield Text(
            f"Results that changed, beyond their 95 % intervals where there are any ({found.steady} numbers did not)",
            style="bold",
        )
        yield _table(shown[:_MOST_LINES])
    hidden = len(found.moved) - min(len(shown), _MOST_LINES)
    if hidden:
        yield Text(f"and {hidden} more numbers that changed (--json has all)")
    yield from _lines("Decisions", list(found.decisions))
    yield from _lines("Claims", list(found.claims))


def _lines(title: str, lines: list[str]) -> Iterator[Text]:
    if lines:
        more = [f"and {len(lines) - _MOST_LINES} more (--json has all)"] if len(lines) > _MOST_LINES else []
        yield Text(title, style="bold")
        yield Text("\n".join(f"  {line}" for line in [*lines[:_MOST_LINES], *more]) + "\n")


def _value(value: object) -> str:
    return "not there" if value is None else str(value)


def _table(moved: list[Moved]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("Cell")
    table.add_column("Metric")
    for header in ("A", "B", "Change"):
        table.add_column(header, justify="right", no_wrap=True)
    for each in moved:
        scale = quantity(each.metric).scale
        a, b, change, half_width = (
            None if value is None else value * scale for value in (each.a, each.b, each.change, each.half_width)
        )
        sign = "+" if change and change > 0 else ""
        table.add_row(each.cell, quantity(each.metric).text, number(a), number(b), sign + interval(change, half_width))
    return table
