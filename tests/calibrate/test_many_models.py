"""NVIDIA's two models on one A100: read as what they are, predicted as the pages say."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_evidence.validate.cases import SharedLoop
from fineserve_evidence.validate.layouts import OWN_FILES, read_set
from fineserve_evidence.validate.many_models import load_of
from fineserve_evidence.validate.predict import Predicted, predict_set
from fineserve_evidence.validate.rows import UnsupportedRow
from fineserve_evidence.validate.shares import Share, draw_shares, shares

from docs.generate.errors import read, rows
from docs.generate.measure import OWN_STEP, errors_of, shares_of
from fineserve_sim.latency import StepModel

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "sharing" / "nvidia_many_models_a100.csv"
(FILE,) = OWN_FILES


@pytest.mark.skipif(not SHARED.is_file(), reason="the shared/ folder with the measurements is absent")
def test_the_facts_are_those_of_the_source() -> None:
    with SHARED.open(encoding="utf-8") as theirs, FILE.open(encoding="utf-8") as ours:
        for their, our in zip(csv.DictReader(theirs), csv.DictReader(ours), strict=True):
            assert their["configuration"] == our["configuration"]
            assert int(their["requests_per_gpu"]) == int(our["models"]) * int(our["clients"])
            assert float(their["tok_per_s_per_gpu"]) == float(our["tokens_per_s"])
            for moment in ("ttft", "itl"):
                assert float(their[f"{moment}_p50_ms"]) == pytest.approx(1e3 * float(our[f"{moment}_p50_s"]))


def test_every_row_is_a_case_at_both_budgets() -> None:
    found = read_set(FILE, StepModel)
    assert len(found.cases) == 30 and not found.unsupported
    assert {case.serving.token_budget for case in found.cases} == {2048, 8192}
    cached = [case for case in found.cases if np.isnan(case.ttft_s[0])]
    assert [case.load.clients for case in cached if isinstance(case.load, SharedLoop)] == [2, 4, 2, 4]


def test_the_benchmark_s_requests() -> None:
    few, many = load_of("time_slice", 2, 1), load_of("mps_50", 2, 16)
    assert (few.requests, few.warmup, few.sm_share) == (42, 2, 1.0)
    assert (many.requests, many.warmup, many.sm_share) == (176, 16, 0.5)
    with pytest.raises(UnsupportedRow, match="configuration mig"):
        load_of("mig", 2, 1)


def test_a_share_is_the_output_over_that_of_one_model_with_as_many_requests() -> None:
    found = [fed(one, measured=1.0, predicted=2.0) for one in read_set(FILE, StepModel).cases]
    doubled = [
        fed(one.case, measured=0.5, predicted=1.5) if one.case.load.models == 2 else one  # type: ignore[union-attr]
        for one in found
    ]
    every = list(shares(doubled))
    assert len(every) == 20 and {share[2:] for share in every} == {(0.5, 0.75)}
    assert every[0] == Share("time slices, budget 2048", 2, 0.5, 0.75)


def fed(case, *, measured: float, predicted: float) -> Predicted:
    """A case with these requests a second."""
    times = np.array([1.0])
    return Predicted(replace(case, throughput_per_s=np.array([measured])), times, times, np.array([predicted]))


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    found = [fed(case, measured=1.0, predicted=2.0) for case in read_set(FILE, StepModel).cases]
    assert sorted(path.name for path in draw_shares({"set": found}, tmp_path)) == ["shares.png", "shares.svg"]
    assert draw_shares({"set": []}, tmp_path) == []


def test_a_client_of_one_model_never_takes_the_turn_of_another() -> None:
    """Two models on one GPU send all their own requests, as many each."""
    (case,) = [
        case
        for case in read_set(FILE, StepModel).cases
        if isinstance(case.load, SharedLoop) and (case.load.models, case.load.clients) == (2, 2)
        if case.serving.token_budget == 2048 and case.load.sharing == "time_slice"
    ]
    few = replace(case, load=replace(case.load, requests=6, warmup=1, output_tokens=8))
    (one,) = predict_set(replace(read_set(FILE, StepModel), cases=(few,)), StepModel)
    assert one.throughput_per_s is not None and one.ttft_s[0] > 0 and one.throughput_per_s[0] > 0


@pytest.mark.slow
def test_the_errors_of_the_pages() -> None:
    for name, step in (("errors.csv", None), ("own_errors.csv", OWN_STEP)):
        kept = [row for row in read(name) if row["set"].startswith("nvidia")]
        found = errors_of(FILE) if step is None else errors_of(FILE, step)
        assert kept == [{key: str(value) for key, value in row.items()} for row in found]
    assert read("shares.csv") == [{key: str(value) for key, value in row.items()} for row in shares_of()]


def test_what_readme_and_the_page_say() -> None:
    """The blind prediction is that of the H100's tables, scaled: at 030b6a4 the A100 had none of its own."""
    page = " ".join((ROOT / "docs" / "shares.md").read_text(encoding="utf-8").split())
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    scaled = {row.set.partition(", ")[2]: row for row in rows() if row.set.startswith("nvidia")}
    slices, mps = scaled["time slices, budget 2048"], scaled["MPS 50 %, budget 2048"]
    tpot = [percent(one.tpot_median_abs) for one in (slices, mps)]
    output = [percent(one.throughput_median_abs) for one in (slices, mps)]
    assert f"time per token within {tpot[0]} % in time slices and {tpot[1]} % under MPS" in readme
    assert f"output within {output[0]} and {output[1]} %" in readme
    ttft = sorted(one.ttft_median_abs or 0.0 for name, one in scaled.items() if not name.startswith("alone"))
    assert f"(today: {100 * ttft[0]:.0f} to {100 * ttft[-1]:.0f} %)" in readme
    assert f"the time per token by {tpot[0]} % (time slices) and {tpot[1]} % (MPS) in the median" in page
    assert f"output by {output[0]} and {output[1]} %" in page
    at = [
        percent(scaled[f"{mode}, budget {budget}"].ttft_median_abs)
        for budget in (2048, 8192)
        for mode in ("time slices", "MPS 50 %")
    ]
    assert f"by {at[0]} and {at[1]} %, {at[2]} and {at[3]} %);" in page
    own = {row["set"].partition(", ")[2]: float(row["tpot_median_abs"]) for row in read("own_errors.csv")}
    found = [percent(own[f"{mode}, budget 2048"]) for mode in ("time slices", "MPS 50 %")]
    assert f"which runs use: {found[0]} and {found[1]} % in the time per token" in page
    assert f"the time per token is off by {found[0]} and {found[1]} %" in readme


def percent(value: float | None) -> str:
    assert value is not None
    return f"{100 * value:.1f}"
