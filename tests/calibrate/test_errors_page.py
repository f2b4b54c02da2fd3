"""docs/fidelity.md holds what the commands print: the sets that take seconds, and the laws of sharing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_calibrate.sharing.caps import AUTHORS_FILES, FILE, cap_errors, read_authors_caps, read_caps
from fineserve_calibrate.sharing.pairs import PAIRS, REPLICAS, compare_pairs, compare_replicas
from fineserve_calibrate.sharing_cli import cap_lines, compared_lines
from fineserve_calibrate.validate import error_rows, predict_set, read_set
from fineserve_calibrate.validate_cli import markdown_lines

from fineserve_sim.latency import StepModel
from fineserve_sim.latency.tables import shipped

DATA = Path(__file__).parents[3] / "shared" / "data"
PAGE = Path(__file__).parents[2] / "docs" / "fidelity.md"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared/ folder with the measurements is absent")
by_tables = partial(StepModel, tables=shipped())
QUICK = (
    "fineserve_authors_h100_8b.csv",
    "fineserve_authors_h100_8b_tp2.csv",
    "aic_silicon_qwen3_32b_tp4.csv.gz",
    "aegaeon_static_qwen2.5_7b.csv",
    "blis_vllm_h100_groundtruth.csv",
)


@needs_data
@pytest.mark.parametrize("name", QUICK)
def test_rows_of_measured_sets(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    for line in markdown_lines(error_rows(predict_set(read_set(DATA / "e2e" / name, by_tables), by_tables))):
        assert line in page


@needs_data
def test_rows_of_engines_that_share_a_gpu() -> None:
    page = PAGE.read_text(encoding="utf-8").splitlines()
    folder = DATA / "sharing"
    profiles = [read_authors_caps(DATA / "e2e" / name, by_tables) for name in AUTHORS_FILES]
    found = [read_caps(folder / FILE, by_tables), *profiles]
    caps = cap_lines([one for rows in found for one in cap_errors(rows)])
    pairs = [*compare_replicas(folder / REPLICAS), *compare_pairs(folder / PAIRS, by_tables)]
    for line in (*caps, *compared_lines(pairs)):
        assert line in page
