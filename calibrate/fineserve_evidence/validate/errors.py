"""Relative errors of predictions, grouped as they are reported, and the output of ``fineserve-calibrate validate``.

The command prints a table of errors a set, its assumptions, and other readings. Its figure has one row of panels a set,
measured against predicted: TTFT left and TPOT right, both axes in log seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.table import Table

from fineserve_evidence.validate.cases import BenchmarkRun, Case, Floats, Label, MeasuredSet
from fineserve_evidence.validate.predict import Predicted, StepFactory, campaign, predict_set, sensitivity
from fineserve_sim.cli.console import console
from fineserve_sim.experiment.show.plot_style import house_style, log_ticks, look_at, save


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Errors of one group as fractions: predicted / measured - 1.

    ``n`` counts rows with a measured TTFT or TPOT. A field is None where no row has that measurement. ``bias`` is the median
    signed error.
    """

    set: str
    backend: str
    model: str
    precision: str
    tp: int
    n: int
    ttft_median_abs: float | None
    ttft_p90_abs: float | None
    ttft_bias: float | None
    tpot_median_abs: float | None
    tpot_p90_abs: float | None
    tpot_bias: float | None
    throughput_median_abs: float | None = None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def error_rows(predictions: Iterable[Predicted]) -> list[ErrorRow]:
    """Make one row a label and part, in order of first appearance; runs judged as a whole have rows of their own."""
    groups: dict[Label, list[Predicted]] = {}
    for predicted in predictions:
        if predicted.case.whole_s is not None:
            continue
        for label, part in _parts(predicted):
            groups.setdefault(label, []).append(part)
    return [_row(label, members) for label, members in groups.items()]


def _parts(predicted: Predicted) -> Iterator[tuple[Label, Predicted]]:
    """The case by what its rows are reported under."""
    case = predicted.case
    if not case.parts:
        yield case.label, predicted
    for part in dict.fromkeys(case.parts):
        mine = np.array(case.parts) == part
        label = case.label._replace(set=f"{case.label.set}, {part}")
        yield label, replace(_rows_of(predicted, mine), case=_rows_of(case, mine))


def label_of(case: Case, row: int) -> Label:
    """What a row is reported under."""
    return case.label._replace(set=f"{case.label.set}, {case.parts[row]}") if case.parts else case.label


Rows = TypeVar("Rows", Case, Predicted)


def _rows_of(whole: Rows, mine: NDArray[np.bool_]) -> Rows:
    throughput = None if whole.throughput_per_s is None else whole.throughput_per_s[mine]
    return replace(whole, ttft_s=whole.ttft_s[mine], tpot_s=whole.tpot_s[mine], throughput_per_s=throughput)


class WholeRow(NamedTuple):
    """A run of a benchmark client: its duration or mean latency in seconds, measured and predicted; ``error`` as a fraction.

    A run that the simulation never ends has no prediction.
    """

    set: str
    backend: str
    model: str
    precision: str
    tp: int
    whole: str
    measured_s: float | None
    predicted_s: float | None
    error: float | None


def whole_rows(predictions: Iterable[Predicted]) -> list[WholeRow]:
    """A row a run of a benchmark client."""
    found = []
    for one in predictions:
        measured_s, guess_s = one.case.whole_s, one.whole_s
        if isinstance(one.case.load, BenchmarkRun) and measured_s is not None and guess_s is not None:
            served_s = guess_s if np.isfinite(guess_s) else None
            error = None if served_s is None else served_s / measured_s - 1
            found.append(WholeRow(*one.case.label, one.case.load.whole, measured_s, served_s, error))
    return found


def whole_median(rows: Sequence[WholeRow], missed: int) -> float:
    """The median absolute error of runs. A run that cannot be predicted counts as infinitely wrong."""
    sizes = [np.inf if row.error is None else abs(row.error) for row in rows]
    return float(np.median([*sizes, *[np.inf] * missed]))


def relative(predicted: Floats, measured: Floats) -> Floats:
    """Compute predicted / measured - 1. Rows without a measurement are left out.

    A request that the simulation never served counts as infinitely late.
    """
    there = np.isfinite(measured) & (measured > 0)
    served = np.where(np.isfinite(predicted[there]), predicted[there], np.inf)
    result: Floats = served / measured[there] - 1
    return result


def _row(label: Label, members: list[Predicted]) -> ErrorRow:
    ttft = np.concatenate([relative(p.ttft_s, p.case.ttft_s) for p in members])
    tpot = np.concatenate([relative(p.tpot_s, p.case.tpot_s) for p in members])
    counted = [(p.throughput_per_s, p.case.throughput_per_s) for p in members]
    throughput = [relative(found, seen) for found, seen in counted if found is not None and seen is not None]
    median = _statistics(np.concatenate(throughput))[0] if throughput else None
    return ErrorRow(*label, max(len(ttft), len(tpot)), *_statistics(ttft), *_statistics(tpot), median)


def _statistics(errors: Floats) -> tuple[float | None, float | None, float | None]:
    if not len(errors):
        return None, None, None
    size = np.abs(errors)
    p90 = np.quantile(size, 0.9, method="higher")  # interpolation would turn infinities into NaN
    median, high, bias = (
        value if np.isfinite(value) else None
        for value in (float(np.median(size)), float(p90), float(np.median(errors)))
    )
    return median, high, bias


MOST_PARTS = 3
"""Parts of a set (scenarios, GPUs) whose sensitivities are printed one by one."""


def tell(sets: Sequence[MeasuredSet], predictions: Sequence[list[Predicted]], make_step: StepFactory | None) -> None:
    """Print a table of errors a set and its assumptions. With ``make_step``, print how errors move under other readings."""
    screen = console()
    for measured, found in zip(sets, predictions, strict=True):
        wholes = whole_rows(found)
        screen.print(_whole_table(measured.name, wholes) if wholes else _table(measured.name, error_rows(found)))
        for line in _verdict(measured, wholes) if wholes else ():
            screen.print(f"  {line}", markup=False)
        for line in _notes(measured):
            screen.print(f"  {line}", markup=False)
        for line in _other_readings(measured, make_step) if make_step is not None else ():
            screen.print(f"  {line}", markup=False)
        screen.print()


def _other_readings(measured: MeasuredSet, make_step: StepFactory) -> Iterator[str]:
    """One line for each other reading of the set, then one for each named reading of each engine and version."""
    for reading in measured.sensitivities:
        before, after = (predict_set(read, make_step) for read in sensitivity(measured, reading))
        yield f"sensitivity, {reading.what}: {moves(before, after)}"
    for engine in dict.fromkeys(case.campaign for case in measured.cases if case.reading):
        mine = campaign(measured, engine)
        for reading in measured.readings:
            read = replace(mine, cases=tuple(map(reading.change, mine.cases)))
            taken = " (taken)" if mine.cases[0].reading == reading.what else ""
            ttft, tpot = (_median(predict_set(read, make_step), column) for column in ("ttft_s", "tpot_s"))
            yield f"reading of {engine}, {reading.what}: TTFT {ttft:.1%}, TPOT {tpot:.1%}{taken}"


def _table(title: str, rows: Sequence[ErrorRow]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for header in ("set", "backend", "model", "precision"):
        table.add_column(header, overflow="fold")
    for header in ("TP", "n", "TTFT med", "p90", "bias", "TPOT med", "p90", "bias"):
        table.add_column(header, justify="right")
    if counted := any(row.throughput_median_abs is not None for row in rows):
        table.add_column("requests/s med", justify="right")
    for row in rows:
        ttft = [_percent(row.ttft_median_abs), _percent(row.ttft_p90_abs), _signed(row.ttft_bias)]
        tpot = [_percent(row.tpot_median_abs), _percent(row.tpot_p90_abs), _signed(row.tpot_bias)]
        more = [_percent(row.throughput_median_abs)] if counted else []
        table.add_row(row.set, row.backend, row.model, row.precision, str(row.tp), str(row.n), *ttft, *tpot, *more)
    return table


def _whole_table(title: str, rows: Sequence[WholeRow]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for header in ("run", "engine", "model", "precision", "TP", "judged by", "measured s", "predicted s", "error"):
        right = header in {"TP", "measured s", "predicted s", "error"}
        table.add_column(header, overflow="fold", justify="right" if right else "left")
    for row in rows:
        seconds = ["-" if value is None else f"{value:.2f}" for value in (row.measured_s, row.predicted_s)]
        table.add_row(
            row.set, row.backend, row.model, row.precision, str(row.tp), row.whole, *seconds, _signed(row.error)
        )
    return table


def _verdict(measured: MeasuredSet, rows: Sequence[WholeRow]) -> Iterator[str]:
    """The median error of each engine's runs, with the runs that cannot be predicted and without them."""
    for engine in dict.fromkeys(row.backend for row in rows):
        mine, missed = [row for row in rows if row.backend == engine], missed_by(measured, engine)
        yield (
            f"{engine}: median error {_percent_of(whole_median(mine, missed))} over {len(mine) + missed} runs, "
            f"of which {missed} cannot be predicted; {_percent_of(whole_median(mine, 0))} without these"
        )


def missed_by(measured: MeasuredSet, engine: str) -> int:
    """Count the rows of an engine that cannot be predicted."""
    return sum(n for (backend, _, _), n in measured.unsupported.items() if backend == engine)


def _percent_of(value: float) -> str:
    return _percent(value if np.isfinite(value) else None)


def _notes(measured: MeasuredSet) -> list[str]:
    notes = [f"assumed: {assumption}" for assumption in measured.assumptions]
    hosts = sorted({case.serving.deployment.name for case in measured.cases})
    notes += [f"host time: deployment {', '.join(hosts)}"] if hosts else []
    if measured.fitted:
        notes.append("fitted on part of the set: what it alone records is taken from rows that are not reported")
    if measured.shares_prefixes:
        notes.append("prompts share prefixes, which the engines' caches keep in the simulation, too")
    for (backend, model, reason), n in sorted(measured.unsupported.items()):
        notes.append(f"unsupported: {n} rows, {backend} {model}: {reason}")
    return notes


def moves(before: Sequence[Predicted], after: Sequence[Predicted]) -> str:
    """Tell median absolute errors as assumed and read otherwise: by part of a set that has few, else over all rows tried."""
    parts = list(dict.fromkeys(one.case.label.set for one in before))
    if not 1 < len(parts) <= MOST_PARTS:
        return _moved(before, after)
    found = []
    for part in parts:
        mine = ([one for one in side if one.case.label.set == part] for side in (before, after))
        found.append(f"{part.rsplit(', ', 1)[-1]}: {_moved(*mine)}")
    return "; ".join(found)


def _moved(before: Sequence[Predicted], after: Sequence[Predicted]) -> str:
    changes = []
    if wholes := whole_rows(before):
        medians = [whole_median(rows, 0) for rows in (wholes, whole_rows(after))]
        return f"whole {medians[0]:.1%} -> {medians[1]:.1%}"
    for column, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        medians = [_median(found, column) for found in (before, after)]
        changes.append(f"{name} {medians[0]:.1%} -> {medians[1]:.1%}")
    return ", ".join(changes)


def _median(found: Sequence[Predicted], column: str) -> float:
    """Median absolute error over all rows; NaN where none has the measurement."""
    errors = np.concatenate([relative(getattr(one, column), getattr(one.case, column)) for one in found])
    return float(np.median(np.abs(errors))) if len(errors) else np.nan


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


MOST_POINTS = 4000
"""Points drawn of one group. A larger group shows every k-th."""


def draw_sets(predictions: Mapping[str, Sequence[Predicted]], out: Path) -> list[Path]:
    """Write ``validate.png`` and ``.svg`` into ``out`` and return their paths. Sets without cases have no panel."""
    shown = {name: found for name, found in predictions.items() if error_rows(found)}
    if not shown:
        return []
    out.mkdir(parents=True, exist_ok=True)
    with house_style():
        figure = Figure(figsize=(9.4, 3.2 * len(shown) + 0.4), layout="constrained")
        axes = figure.subplots(len(shown), 2, squeeze=False)
        for (left, right), (name, found) in zip(axes, shown.items(), strict=True):
            _panel(left, found, "ttft_s", f"{name}\nTTFT")
            _panel(right, found, "tpot_s", "\nTPOT", legend=True)
        return save(figure, out / "validate")


def _panel(axes: Axes, found: Sequence[Predicted], column: str, title: str, *, legend: bool = False) -> None:
    """``legend``: of both panels of a row, beside the right one, which has the same groups."""
    groups: dict[str, list[tuple[Floats, Floats]]] = {}
    for predicted in found:
        key = f"{predicted.case.label.backend} {predicted.case.label.precision} TP{predicted.case.label.tp}"
        groups.setdefault(key, []).append((getattr(predicted.case, column), getattr(predicted, column)))
    ends = []
    for place, (key, pairs) in enumerate(groups.items()):
        measured, guess = (np.concatenate(side) for side in zip(*pairs, strict=True))
        there = np.isfinite(measured) & np.isfinite(guess) & (measured > 0)
        step = max(1, int(there.sum()) // MOST_POINTS)
        x, y = measured[there][::step], guess[there][::step]
        axes.plot(x, y, **look_at(place) | {"linestyle": ""}, ms=3.5, mew=0.4, mec="white", label=key, rasterized=True)
        ends += [x, y]
    values = np.concatenate(ends)
    if len(values):
        line = [values.min(), values.max()]
        axes.plot(line, line, color="#555555", lw=0.8)
        axes.set(xscale="log", yscale="log")
        log_ticks(axes.xaxis)
        log_ticks(axes.yaxis)
    axes.set(xlabel="measured (s)", ylabel="predicted (s)", title=title)
    if legend:
        axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
