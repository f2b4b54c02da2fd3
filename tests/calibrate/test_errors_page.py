"""The scorecard and docs/data hold what the commands print: the sets that take seconds, and the laws of sharing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_evidence.sharing.caps import AUTHORS_FILES, FILE, cap_errors, read_authors_caps, read_caps
from fineserve_evidence.validate.errors import error_rows, relative
from fineserve_evidence.validate.layouts import read_set
from fineserve_evidence.validate.predict import predict_set

from docs.generate.errors import cap_table, error_table, read, rows
from docs.generate.measure import MAKE_STEP, OWN_STEP, errors_of, pairs_of

DATA = Path(__file__).parents[3] / "shared" / "data"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scorecard.md"
FIDELITY = " ".join((Path(__file__).parents[2] / "docs" / "fidelity.md").read_text(encoding="utf-8").split())
PRECISIONS = ("W16A16", "W8A8KV8", "W4A16")
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


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("name", QUICK)
def test_rows_of_measured_sets(name: str) -> None:
    kept = error_table(rows()).splitlines()
    for line in error_table(error_rows(predict_set(read_set(DATA / "e2e" / name, MAKE_STEP), MAKE_STEP))).splitlines():
        assert line in kept


@pytest.mark.slow
@needs_data
def test_a_set_by_the_tables_of_its_own_gpu() -> None:
    kept = [row for row in read("own_errors.csv") if row["set"].startswith("aegaeon")]
    found = errors_of(DATA / "e2e" / "aegaeon_static_qwen2.5_7b.csv", OWN_STEP)
    assert kept and kept == [
        {name: str(value) for name, value in row.items()} for row in found if "a100" in str(row["set"])
    ]


@needs_data
def test_rows_of_engines_that_share_a_gpu(page: list[str]) -> None:
    profiles = [read_authors_caps(DATA / "e2e" / name, MAKE_STEP) for name in AUTHORS_FILES]
    found = [read_caps(DATA / "sharing" / FILE, MAKE_STEP), *profiles]
    for line in cap_table(one for caps in found for one in cap_errors(caps)).splitlines():
        assert line in page
    kept = read("pairs.csv")
    assert [{name: str(value) for name, value in row.items()} for row in pairs_of(DATA)] == kept


@needs_data
def test_the_profile_at_tp_2_over_all_shares_of_the_sms() -> None:
    """Each precision within 8 % (TPOT) and 13 % (TTFT), as fidelity.md prints them."""
    errors: dict[str, dict[str, list[NDArray[np.float64]]]] = {}
    for one in predict_set(read_set(DATA / "e2e" / AUTHORS_FILES[1], MAKE_STEP), MAKE_STEP):
        kept = errors.setdefault(one.case.label.precision, {"tpot": [], "ttft": []})
        kept["tpot"].append(relative(one.tpot_s, one.case.tpot_s))
        kept["ttft"].append(relative(one.ttft_s, one.case.ttft_s))
    medians = {
        name: [100 * float(np.nanmedian(np.abs(np.concatenate(errors[each][name])))) for each in PRECISIONS]
        for name in ("tpot", "ttft")
    }
    assert max(medians["tpot"]) <= 8
    assert max(medians["ttft"]) <= 13
    said = {name: "{:.1f}, {:.1f} and {:.1f}".format(*found) for name, found in medians.items()}
    assert f"the medians at TP 2 are {said['tpot']} % (TPOT) and {said['ttft']} % (TTFT)" in FIDELITY
