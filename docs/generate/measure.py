"""What takes minutes: the errors of every measured set, kept in ``docs/data``."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fineserve_evidence.commands import Latency, step_factory
from fineserve_evidence.sharing.caps import AUTHORS_FILES, FILE, CapErrors, cap_errors, read_authors_caps, read_caps
from fineserve_evidence.sharing.pairs import PAIRS, REPLICAS, Compared, compare_pairs, compare_replicas
from fineserve_evidence.validate.bands import Observation, observations
from fineserve_evidence.validate.errors import error_rows
from fineserve_evidence.validate.layouts import KNOWN_FILES, OWN_FILES, read_set
from fineserve_evidence.validate.predict import Predicted, StepFactory, predict_set, remembered
from fineserve_evidence.validate.shares import shares

from docs.generate import contention, scorecard
from docs.generate.errors import COLUMNS, DATA, PAIR_COLUMNS, SHARE_COLUMNS, read
from fineserve_sim.latency import step_model_of
from fineserve_sim.latency.tables import measured_on, shipped

SYSTEMS = ("FineServe", "Prism*", "Static*")
SENSITIVITY_COLUMNS = ("number", "load", *SYSTEMS)
MAKE_STEP: StepFactory = partial(step_model_of, tables=shipped())
REFERENCE = "h100-sxm"
OWN_STEP = step_factory(Latency.TABLES)


def measure(folder: Path) -> Iterator[Path]:
    """Predict all sets below ``folder`` and write the errors; the files written."""
    paths = [folder / "e2e" / name for name in KNOWN_FILES if (folder / "e2e" / name).is_file()] + [*OWN_FILES]
    sets = [read_set(path, MAKE_STEP) for path in paths]
    before = read("errors.csv")
    by_scaled, by_own = ([predict_set(one, how) for one in sets] for how in (MAKE_STEP, OWN_STEP))
    scaled, own = ([row for found in each for row in _errors(found)] for each in (by_scaled, by_own))
    yield write("errors.csv", COLUMNS, scaled)
    yield write("own_errors.csv", COLUMNS, [row for row, other in zip(own, scaled, strict=True) if row != other])
    yield from scorecard.measured([*_observed(by_own, by_scaled)], sets, before, scaled)
    yield write("shares.csv", SHARE_COLUMNS, shares_of())
    yield write("caps.csv", list(CapErrors._fields), caps_of(folder))
    yield write("pairs.csv", PAIR_COLUMNS, pairs_of(folder))


def errors_of(path: Path, make_step: StepFactory = MAKE_STEP) -> list[dict[str, object]]:
    """The errors of one measured set, as ``errors.csv`` has them."""
    return _errors(predict_set(read_set(path, make_step), make_step))


def _errors(found: Sequence[Predicted]) -> list[dict[str, object]]:
    return [{name: rounded(value) for name, value in row.as_dict().items()} for row in error_rows(found)]


def _observed(own: Iterable[Sequence[Predicted]], scaled: Iterable[Sequence[Predicted]]) -> Iterator[Observation]:
    """All rows by the tables of their own GPU, where it has some, and by the H100's scaled."""
    steps = remembered(OWN_STEP), remembered(MAKE_STEP)
    for one in (one for found in own for one in found):
        if measured_on(gpu := one.case.serving.gpu) is not None and gpu.tables_from is None:
            yield from observations([one], steps[0], "measured")
    for one in (one for found in scaled for one in found):
        if one.case.serving.gpu.name != REFERENCE:
            yield from observations([one], steps[1], "scaled")


def shares_of() -> list[dict[str, object]]:
    """The share of a GPU that NVIDIA's two models keep, as ``shares.csv`` has it: measured, and predicted by the H100's tables,
    scaled, and by the GPU's own."""
    columns = [
        list(shares(predict_set(read_set(path, step), step))) for step in (MAKE_STEP, OWN_STEP) for path in OWN_FILES
    ]
    return [
        dict(zip(SHARE_COLUMNS, (*scaled[:2], *map(rounded, (*scaled[2:], own.predicted))), strict=True))
        for scaled, own in zip(*columns, strict=True)
    ]


def caps_of(folder: Path) -> list[dict[str, object]]:
    """Errors of engines under a cap of SMs, as ``caps.csv`` has them."""
    profiles = [read_authors_caps(folder / "e2e" / name, MAKE_STEP) for name in AUTHORS_FILES]
    found = [read_caps(folder / "sharing" / FILE, MAKE_STEP), *profiles]
    return [
        {name: rounded(value) for name, value in one._asdict().items()} for rows in found for one in cap_errors(rows)
    ]


def pairs_of(folder: Path) -> list[dict[str, object]]:
    """Errors of what is predicted for engines that share a GPU, as ``pairs.csv`` has them; what was measured, and a prediction
    that would give it away, is the sources' to publish: ``fineserve-calibrate sharing`` prints both."""
    sharing = folder / "sharing"
    found = [*compare_replicas(sharing / REPLICAS), *compare_pairs(sharing / PAIRS, MAKE_STEP)]
    return [dict(zip(PAIR_COLUMNS, _cells(one), strict=True)) for one in found]


def _cells(one: Compared) -> Sequence[object]:
    known = one.predicted is not None and one.measured is not None
    error = f"{one.predicted / one.measured - 1:+.0%}"[:-1] if known else "-"  # type: ignore[operator]
    fitted = "yes" if one.fitted else ""
    return (one.source, one.gpu, one.mode, one.engines, one.workload, one.beside, one.metric, error, fitted)


def rounded(value: object) -> object:
    """Numbers to the ten-thousandth of a percent."""
    return "" if value is None else round(value, 6) if isinstance(value, float) else value


def write(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> Path:
    path = DATA / name
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def ways_of_sharing() -> Path:
    """Run Fig. 10's point under each way of sharing."""
    return write("contention.csv", contention.COLUMNS, [contention.row_of(way) for way in contention.WAYS])


def sensitivity(report: Path) -> Path:
    """Keep what ``benchmarks/sensitivity.py --json`` has written: a row for each number and load with a change."""
    found = json.loads(report.read_text(encoding="utf-8"))["changes"]
    rows = [row for one in found for load in ("A", "B") if (row := _moved(one, load)) is not None]
    return write("sensitivity.csv", SENSITIVITY_COLUMNS, rows)


def _moved(one: Mapping[str, Any], load: str) -> dict[str, object] | None:
    """Changes in points with 20 % less / 20 % more; a dash where a model then fits on no GPU."""
    cells = {name: f"{load} {name.lower()}" for name in SYSTEMS}
    changes = {
        name: "/".join(f"{run[cell] - one['base'][cell]:+.1f}" if run else "-" for run in one["moved"])
        for name, cell in cells.items()
    }
    if all(change == "+0.0/+0.0" for change in changes.values()):
        return None
    return {"number": one["assumption"], "load": load} | {
        name: change.replace("+0.0", "0").replace("-0.0", "0") for name, change in changes.items()
    }
