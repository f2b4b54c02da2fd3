"""What ``fineserve-calibrate sharing`` prints: slowdowns under thread caps, and of engines that share a GPU."""

from __future__ import annotations

from rich.table import Table

from fineserve_calibrate.sharing.caps import CapErrors
from fineserve_calibrate.sharing.pairs import Compared


def cap_table(caps: list[CapErrors]) -> Table:
    """A row a model, TP degree and phase: errors of the predicted slowdowns."""
    table = Table(
        title="One engine under a thread cap: slowdown against all SMs",
        box=None,
    )
    for header in ("model", "TP", "phase", "", "n", "median", "p90", "bias"):
        table.add_column(header, justify="left" if header in ("model", "phase", "") else "right")
    for one in caps:
        numbers = (str(one.n), f"{one.median_abs:.1%}", f"{one.p90_abs:.1%}", f"{one.bias:+.1%}")
        table.add_row(one.model, str(one.tp), one.phase, "held out" if one.held_out else "fitted", *numbers)
    return table


def compared_table(compared: list[Compared]) -> Table:
    """A row a published slowdown: measured beside predicted."""
    table = Table(
        title="Engines that share a GPU: how many times slower than alone (FP8 pair: throughput ratio)", box=None
    )
    for header in (
        "source",
        "GPU",
        "mode",
        "engines",
        "workload",
        "beside",
        "metric",
        "measured",
        "predicted",
        "error",
        "",
    ):
        table.add_column(header, overflow="fold")
    for one in compared:
        numbers = (_number(one.measured), _number(one.predicted), _error(one), "fitted" if one.fitted else "")
        table.add_row(
            one.source, one.gpu, one.mode, str(one.engines), one.workload, one.beside, one.metric, *numbers
        )  # fmt: skip
    return table


def _error(one: Compared) -> str:
    if one.measured is None or one.predicted is None:
        return "-"
    return f"{one.predicted / one.measured - 1:+.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
