"""docs/reference/errors.md holds what the commands print: the sets that take seconds, and the laws of sharing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_calibrate.sharing.caps import AUTHORS_FILES, FILE, cap_errors, read_authors_caps, read_caps
from fineserve_calibrate.validate import error_rows, predict_set, read_set

from docs.generate.errors import cap_table, error_table
from docs.generate.markdown import cell
from docs.generate.measure import MAKE_STEP, pairs_of

DATA = Path(__file__).parents[3] / "shared" / "data"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared/ folder with the measurements is absent")
QUICK = (
    "fineserve_authors_h100_8b.csv",
    "fineserve_authors_h100_8b_tp2.csv",
    "aic_silicon_qwen3_32b_tp4.csv.gz",
    "aegaeon_static_qwen2.5_7b.csv",
    "blis_vllm_h100_groundtruth.csv",
)


@pytest.fixture(scope="module")
def page() -> list[str]:
    return PAGE.read_text(encoding="utf-8").splitlines()


@needs_data
@pytest.mark.parametrize("name", QUICK)
def test_rows_of_measured_sets(name: str, page: list[str]) -> None:
    for line in error_table(error_rows(predict_set(read_set(DATA / "e2e" / name, MAKE_STEP), MAKE_STEP))).splitlines():
        assert line in page


@needs_data
def test_rows_of_engines_that_share_a_gpu(page: list[str]) -> None:
    profiles = [read_authors_caps(DATA / "e2e" / name, MAKE_STEP) for name in AUTHORS_FILES]
    found = [read_caps(DATA / "sharing" / FILE, MAKE_STEP), *profiles]
    for line in cap_table(one for rows in found for one in cap_errors(rows)).splitlines():
        assert line in page
    for row in pairs_of(DATA):
        assert f"| {' | '.join(map(cell, row.values()))} |" in page
