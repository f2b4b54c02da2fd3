"""docs/calibration.md: its fits and its verdicts are what the commands print."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_calibrate.cli import app

PROFILE = Path(__file__).parents[3] / "shared" / "data" / "e2e" / "fineserve_authors_h100_8b.csv"
PAGE = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text(encoding="utf-8")
NUMBERS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
)
needs_profile = pytest.mark.skipif(
    not PROFILE.exists(), reason="the shared/ folder with the authors' profile is absent"
)


def printed(*words: str) -> Any:
    """The JSON of a command."""
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@needs_profile
def test_the_table_of_fits() -> None:
    found: dict[str, list[str]] = {}
    for one in printed("fit", "contention", str(PROFILE))["fits"]:
        (share,) = one["fit"]["parameters"]
        interval = f"{share['value']:.3f} [{share['low']:.3f}, {share['high']:.3f}]"
        found.setdefault(one["precision"], []).extend(
            [interval, f"{one['fit']['held_out']['median_abs']:.1%}".replace("%", " %")]
        )
    assert len(found) == 3
    for precision, cells in found.items():
        assert f"| {' | '.join((precision, *cells))} |" in PAGE


def test_the_claims_that_tables_decide() -> None:
    claims = {one["id"]: one for one in printed("claims")}
    assert f"decides {len(claims)} claims" in PAGE
    assert claims["PR-4-kv-throughput"]["status"] == "open"
    chunks = re.findall(r"(\d+): ([\d.]+)", str(claims["KS-4.3-second-chunk"]))
    assert f"{float(dict(chunks)['1024']):.1f} times that of the first at 1,024" in PAGE
    assert f"{float(dict(chunks)['8192']):.1f} times at 8,192" in PAGE
    undecided = [one for one in claims.values() if one["status"] == "open"]
    waiting = sum("claims --probes DIR" in one["decide"] for one in undecided)
    assert f"{NUMBERS[waiting].capitalize()} (driver calls" in PAGE
    assert f"{NUMBERS[len(undecided) - waiting - 1]} compare kernels" in PAGE
