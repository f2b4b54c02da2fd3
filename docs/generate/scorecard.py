"""The scorecard: every measured set and row, what was refused, and how the bands of the model's error do on sets left out.

``measured`` writes the files that take minutes: ``docs/data/row_errors.csv`` (the errors of all rows, a line a set, class and
moment), ``docs/data/refused.csv``, ``docs/data/errors_before.csv`` (a set's figures before they last changed) and the bands
that ship, ``fineserve_sim/catalog/model_errors.yaml``, learnt from the first.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fineserve_evidence.validate.bands import LEVEL, Observation, coverage, errors_of, learn, left_out
from fineserve_evidence.validate.cases import Label, MeasuredSet

from docs.generate.errors import DATA, read
from docs.generate.markdown import table
from fineserve_sim.catalog.model_errors import ANY, ErrorClass, Predictable

BANDS = Path(__file__).parents[2] / "fineserve_sim" / "catalog" / "model_errors.yaml"
ROW_COLUMNS = (*Label._fields, *Predictable._fields, "ratios")
REFUSED_COLUMNS = ("set", "backend", "model", "reason", "rows")
BEFORE_COLUMNS = (*Label._fields, "ttft_median_abs", "tpot_median_abs")
Row = Mapping[str, Any]
CHANGED = 0.001
"""A median error that moved by a tenth of a point is another figure."""

HEADER = f"""\
# Bands of the model's own error, by class: measured / predicted lies between low and high in {LEVEL:.0%} of the rows, all sets
# weighing the same. Written by `python -m docs.generate --measure DIR` from docs/data/row_errors.csv;
# fineserve_evidence/validate/bands.py has the rules, docs/reference/scorecard.md how they do on sets left out.
source: rows of the measured sets of docs/fidelity.md that nothing was fitted on
level: {LEVEL}
classes:
"""


def measured(
    rows: Sequence[Observation],
    sets: Iterable[MeasuredSet],
    before: Sequence[Row],
    now: Sequence[Row],
) -> Iterator[Path]:
    """Write all files from the predicted rows; ``before`` and ``now``: the rows of errors.csv as they were and are."""
    yield _write("row_errors.csv", ROW_COLUMNS, _grouped(rows))
    refused = ((one.name, *what, count) for one in sets for what, count in sorted(one.unsupported.items()))
    yield _write("refused.csv", REFUSED_COLUMNS, refused)
    yield _write("errors_before.csv", BEFORE_COLUMNS, [*_moved(before, now)])  # read in whole before it is written
    BANDS.write_text(HEADER + "".join(map(_line, learn(observed()))), encoding="utf-8")
    yield BANDS


def _grouped(rows: Sequence[Observation]) -> Iterator[tuple[object, ...]]:
    groups: dict[tuple[Label, Predictable], list[str]] = {}
    for row in rows:
        groups.setdefault((row.label, row.of), []).append(f"{row.ratio:.4g}")
    for (label, of), ratios in groups.items():
        yield *label, *of, " ".join(ratios)


def _moved(before: Sequence[Row], now: Sequence[Row]) -> Iterator[tuple[object, ...]]:
    """The earlier figures of every set: the file's own, where they differ from today's."""
    kept: dict[tuple[str, ...], Row] = {}
    kept |= {_key(row): row for row in read("errors_before.csv")} if (DATA / "errors_before.csv").is_file() else {}
    kept |= {_key(row): row for row in before if any(_differs(row, other) for other in now if _key(other) == _key(row))}
    for key in map(_key, now):
        if key in kept:
            yield *key, kept[key]["ttft_median_abs"], kept[key]["tpot_median_abs"]


def _key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in Label._fields)


def _differs(row: Row, other: Row) -> bool:
    pairs = [(row[name], other[name]) for name in BEFORE_COLUMNS[-2:]]
    return any(str(was) and str(now) and abs(float(was) - float(now)) >= CHANGED for was, now in pairs)


def _line(one: ErrorClass) -> str:
    numbers = f"sets: {one.sets}, rows: {one.rows}, median: {one.median}, low: {one.low}, high: {one.high}"
    return f"  - {{of: [{', '.join(one.of)}], {numbers}}}\n"


def _write(name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    path = DATA / name
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def observed() -> list[Observation]:
    """The committed rows."""
    found = []
    for line in read("row_errors.csv"):
        label = Label(line["set"], line["backend"], line["model"], line["precision"], int(line["tp"]))
        of = Predictable(*(line[name] for name in Predictable._fields))
        found += [Observation(label, of, float(ratio)) for ratio in line["ratios"].split()]
    return found


def covered() -> str:
    """How the bands do on sets that they were not learnt from."""
    headers = (
        "step times",
        "layers",
        "moment",
        "sets",
        "rows",
        "inside %",
        "half-width, median %",
        "error, median %",
        "ratio",
    )
    cells = [
        (_tables(one.tables), one.layers, "both" if one.moment == ANY else one.moment.upper(), one.sets, f"{one.rows:,}",
         *map(_percent, (one.inside, one.half_width, one.error)), f"{one.half_width / one.error:.1f}")
        for one in coverage(left_out(observed()))
    ]  # fmt: skip
    return table(headers, cells, right=headers[3:])


class _SetScore(NamedTuple):
    """One set under one kind of step times: ratios by moment, and the shares inside bands that were learnt without it."""

    ratios: dict[str, list[float]]
    inside: dict[str, list[bool]]
    fitted: bool


def every_set() -> str:
    """A row a set and kind of step times: errors in %, as they were before they last moved, and the part inside the band."""
    moments = ("TTFT", "before", "in band", "TPOT", "before", "in band")
    headers = ("set", "engine", "model", "TP", "step times", "fitted on", "rows", *moments)
    before, scores = {_key(row): row for row in read("errors_before.csv")}, _scores()
    cells = []
    for (label, tables), score in scores.items():
        recorded = tables == "scaled" or (label, "scaled") not in scores  # errors.csv has the H100's tables, scaled
        then = before.get(tuple(map(str, label)), {}) if recorded else {}
        told = [
            each for moment in ("ttft", "tpot") for each in _moment(score, moment, then.get(f"{moment}_median_abs"))
        ]
        model = f"{label.model.rsplit('/', 1)[-1]} {label.precision}"
        count = f"{max(map(len, score.ratios.values())):,}"
        fitted = "yes" if score.fitted else ""
        cells.append((label.set, label.backend, model, label.tp, _tables(tables), fitted, count, *told))
    return table(headers, cells, right=headers[6:])


def _scores() -> dict[tuple[Label, str], _SetScore]:
    found: dict[tuple[Label, str], _SetScore] = {}
    for row in observed():
        score = found.setdefault((row.label, row.of.tables), _SetScore({}, {}, row.fitted))
        score.ratios.setdefault(row.of.moment, []).append(row.ratio)
    for each in left_out(observed()):
        found[each.row.label, each.row.of.tables].inside.setdefault(each.row.of.moment, []).append(each.inside)
    return found


def _moment(score: _SetScore, moment: str, before: str | None) -> tuple[str, str, str]:
    ratios, inside = score.ratios.get(moment, []), score.inside.get(moment, [])
    error = _percent(float(np.median(errors_of(np.array(ratios))))) if ratios else "-"
    return error, _percent(float(before)) if before else "", f"{np.mean(inside):.0%}"[:-1] if inside else ""


def refused() -> str:
    """Rows that cannot be predicted, with the reason."""
    return table(REFUSED_COLUMNS, (tuple(row.values()) for row in read("refused.csv")), right=REFUSED_COLUMNS[-1:])


def _tables(kind: str) -> str:
    return {"measured": "own tables", "scaled": "scaled tables"}.get(kind, kind)


def _percent(value: float) -> str:
    return "∞" if not np.isfinite(value) else f"{value:.1%}"[:-1]
