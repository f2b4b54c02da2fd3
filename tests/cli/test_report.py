"""The page from the command line: each run writes it, and report writes it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def results(call: Any, experiment: Path, tmp_path: Path) -> Path:
    assert call("run", str(experiment), "--quick", "--jobs", "1", "--out", "out").code == 0
    return tmp_path / "out"


def test_a_run_leaves_its_page_and_report_writes_it_again(call: Any, results: Path) -> None:
    first = (results / "report.html").read_bytes()
    (results / "report.html").unlink()
    done = call("report", str(results))
    assert (done.code, done.out.strip()) == (0, str(results / "report.html"))
    assert (results / "report.html").read_bytes() == first


@pytest.mark.slow
def test_several_folders_make_one_page_where_one_says(call: Any, results: Path) -> None:
    refused = call("report", str(results), str(results))
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "--out FILE" in refused.err
    assert call("report", str(results), str(results), "--out", "both.html").code == 0
    assert (results.parent / "both.html").read_text(encoding="utf-8").count('<main class="run">') == 2


def test_a_folder_without_results_is_one_line(call: Any, tmp_path: Path) -> None:
    done = call("report", str(tmp_path))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "no summary.json here" in done.err


@pytest.mark.slow
def test_diff_tells_what_changed_as_text_and_as_json(call: Any, experiment: Path, results: Path) -> None:
    other = ("run", str(experiment), "--quick", "--jobs", "1", "--out", "other", "--set", "slo.ttft_s=0.25")
    assert call(*other).code == 0
    told = call("diff", "out", "other")
    assert told.code == 0 and "slo.ttft_s: 0.5 -> 0.25" in told.out
    found = json.loads(call("diff", "out", "other", "--json").out)
    assert found["inputs"] == [{"key": "slo.ttft_s", "a": 0.5, "b": 0.25}]
    assert "The same in all 4 cells" in call("diff", "out", "out").out


def test_a_size_leaves_its_page_whether_it_finds_one_or_none(call: Any, trace: Path, tmp_path: Path) -> None:
    models = ("--model", "A=llama-3.1-8b:fp8", "--model", "B=llama-3.1-8b", "-s", "fineserve", "-s", "dedicated")
    size = ("size", str(trace), *models, "--target", "ttft:0.9", "--most-gpus", "2", "-j", "1")
    assert call(*size, "--ttft-slo", "0.3", "--out", "some").code == 0
    page = (tmp_path / "some" / "report.html").read_text(encoding="utf-8")
    assert "<h2>Search</h2>" in page and "The cheapest that keeps 90 % within the limit of TTFT: FineServe on 1" in page
    assert "<h2>Placement</h2>" in page and '"0/search/ttft_attainment":' in page
    told = call(*size, "--ttft-slo", "0.0001", "--out", "none")
    page = (tmp_path / "none" / "report.html").read_text(encoding="utf-8")
    none = "No number of h100-sxm keeps 90 % within the limit of TTFT: some requests are out of reach even alone on idle GPUs."
    assert told.code == 0 and none in told.out and page.count(none) == 2  # on the first screen, and over the table
    assert "None for FineServe, Dedicated: 0.0 % at most are within reach" in page
    assert "A (TP 1): 100.0 % of its requests cannot have a first token within 0.0001 s" in page
    assert "<h2>Placement</h2>" in page and (tmp_path / "none" / "summary.json").exists()  # of the closest cluster
