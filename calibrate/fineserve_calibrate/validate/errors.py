"""Relative errors of predictions, grouped as they are reported."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from fineserve_calibrate.validate.cases import Floats, Label
from fineserve_calibrate.validate.predict import Predicted


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Errors of one group as fractions: predicted / measured - 1. ``n`` counts rows with a measured TTFT or TPOT; a field is
    None where no row has that measurement. ``bias`` is the median signed error."""

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

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def error_rows(predictions: Iterable[Predicted]) -> list[ErrorRow]:
    """One row a label, in order of first appearance."""
    groups: dict[Label, list[Predicted]] = {}
    for predicted in predictions:
        groups.setdefault(predicted.case.label, []).append(predicted)
    return [_row(label, members) for label, members in groups.items()]


def relative(predicted: Floats, measured: Floats) -> Floats:
    """predicted / measured - 1. A request that the simulation never served counts as infinitely late; rows without a
    measurement are left out."""
    there = np.isfinite(measured) & (measured > 0)
    served = np.where(np.isfinite(predicted[there]), predicted[there], np.inf)
    result: Floats = served / measured[there] - 1
    return result


def _row(label: Label, members: list[Predicted]) -> ErrorRow:
    ttft = np.concatenate([relative(p.ttft_s, p.case.ttft_s) for p in members])
    tpot = np.concatenate([relative(p.tpot_s, p.case.tpot_s) for p in members])
    return ErrorRow(*label, max(len(ttft), len(tpot)), *_statistics(ttft), *_statistics(tpot))


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
