"""Relative errors of predictions, grouped as they are reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fineserve_evidence.validate.cases import Case, Floats, Label
from fineserve_evidence.validate.predict import Predicted


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
    """Make one row a label and part, in order of first appearance."""
    groups: dict[Label, list[Predicted]] = {}
    for predicted in predictions:
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


Rows = TypeVar("Rows", Case, Predicted)


def _rows_of(whole: Rows, mine: NDArray[np.bool_]) -> Rows:
    throughput = None if whole.throughput_per_s is None else whole.throughput_per_s[mine]
    return replace(whole, ttft_s=whole.ttft_s[mine], tpot_s=whole.tpot_s[mine], throughput_per_s=throughput)


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
