"""``--metrics summary``: the numbers of all requests, and no row of any."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fineserve_sim.experiment import load_experiment, run_loaded
from fineserve_sim.experiment.results.histogram import RELATIVE_ERROR
from fineserve_sim.experiment.run.store import Store

SYSTEMS = 'systems: [fineserve, "prism*"]'
LOAD = ("systems: [fineserve", "systems: [clairvoyant, prism, fineserve")
NOTE = "metrics alone were kept: percentiles come from histograms and are right to 0.5 %"


def both(path: Path, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The summaries of an experiment whose rows are kept, and of one whose metrics alone are."""
    found = []
    for name in ("rows", "summary"):
        run_loaded(load_experiment(path, quick=True), out / name, jobs=1, summary=name == "summary")
        found.append(json.loads((out / name / "summary.json").read_text(encoding="utf-8")))
    return found[0], found[1]


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two documents differ beyond the last bits of sums; percentiles beyond their bound."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*dict.fromkeys([*one, *other])]
        return [text for key in keys for text in differences(one.get(key), other.get(key), f"{place}.{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [text for at in range(len(one)) for text in differences(one[at], other[at], f"{place}.{at}")]
    bound = RELATIVE_ERROR if "_p" in place.rpartition("metrics.")[2].partition(".")[0] else 1e-9
    if isinstance(one, float) and isinstance(other, float):
        if "half_width" in place and bound == RELATIVE_ERROR:
            return []  # of percentiles that are a little off
        return [] if math.isclose(one, other, rel_tol=bound, abs_tol=1e-12) else [f"{place}: {one} {other}"]
    return [] if one == other or place.endswith(".runs") else [f"{place}: {one} {other}"]


@pytest.fixture
def ran(write_file, tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    return tmp_path, *both(write_file(LOAD), tmp_path)


def test_every_number_is_that_of_the_rows(ran: tuple[Path, dict[str, Any], dict[str, Any]]) -> None:
    _, rows, summary = ran
    assert summary.pop("warnings") == [*rows.pop("warnings"), NOTE]
    for each in (rows, summary):
        for cell in each["cells"]:
            del cell["runs"]
    assert differences(rows, summary) == []


def test_no_row_is_kept_of_any_cell(ran: tuple[Path, dict[str, Any], dict[str, Any]]) -> None:
    """Those of the runs that limits come from stay."""
    out, _, summary = ran
    assert not (out / "summary" / "requests.parquet").exists()
    keys = {key for cell in summary["cells"] for key in cell["runs"]}
    kept = {path.name.partition(".")[0] for path in (out / "summary" / "cells").glob("*.parquet")}
    assert keys and not keys & kept and len(kept) == 2
    for table in ("cells", "models", "gpus", "placements"):
        assert (out / "summary" / f"{table}.parquet").exists()
    with pytest.raises(ValueError, match="metrics alone were kept; run it again without --metrics summary"):
        Store(out / "summary").read(min(keys))


def test_it_goes_on_where_it_stopped_and_keeps_rows_beside(write_file, tmp_path: Path) -> None:
    """A folder may hold both; each is taken up again."""
    path, done = write_file(), []
    for summary in (True, False, True):
        files = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "cells").glob("*.summary.json")}
        run_loaded(load_experiment(path, quick=True), tmp_path / "out", jobs=1, summary=summary)
        done.append(files)
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "cells").glob("*.summary.json")}
    assert done[1] == done[2] == after
    assert not (tmp_path / "out" / "requests.parquet").exists()
