"""LLMServingSim's bench runs: the reader on tiny files, and data-parallel ranks against the measured run."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_evidence.commands import Latency, step_factory
from fineserve_evidence.validate.cases import OpenLoop, with_load
from fineserve_evidence.validate.layouts import read_set
from fineserve_evidence.validate.predict import kv_bytes, predict_set
from fineserve_evidence.validate.rows import LayoutError
from servingsimkit import ProfiledRanks, profiled

from fineserve_sim.catalog import kv_token_bytes

BENCH = Path(__file__).parents[3] / "shared" / "data" / "fleets" / "llmservingsim_bench"
RUN = "RTXPRO6000_Qwen3-30B-A3B-Instruct-2507"
MIXTURE = "Qwen/Qwen3-30B-A3B-Instruct-2507"
TOLD: dict[str, Any] = {
    "model": MIXTURE,
    "tensor_parallel_size": 1,
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
}
ROWS = [
    {"request_id": f"bench-{i}", "input_toks": 100 + i, "output_toks": 1 + 9 * (i > 0), "arrival_time": 1e9 + i}
    | {
        "queued_ts": 50.0 + i,
        "scheduled_ts": 50.1 + i,
        "first_token_ts": 50.2 + i,
        "last_token_ts": 50.2 + i + 0.9 * (i > 0),
    }
    for i in range(4)
]
by_tables = step_factory(Latency.TABLES)


def _write(folder: Path, told: dict[str, Any] | None, name: str = "RTXPRO6000_Small") -> Path:
    path = folder / f"{name}_requests.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, reversed(ROWS))).encode()))
    if told is not None:
        (folder / f"{name}_meta.json").write_text(json.dumps({"engine_kwargs": told}), encoding="utf-8")
    return path


def test_a_run_is_a_case_with_its_ranks(tmp_path: Path) -> None:
    measured = read_set(_write(tmp_path, TOLD), by_tables)
    (case,) = measured.cases
    experts = case.serving.model.experts
    assert experts is not None and (experts.ranks, experts.spread) == (2, "whole")
    assert (case.serving.tp, case.serving.max_sequences, case.serving.token_budget) == (1, 128, 2048)
    assert isinstance(case.load, OpenLoop) and case.load.replicas == 2
    assert case.load.arrival_s.tolist() == [0, 1, 2, 3] and case.load.prompt_tokens.tolist() == [100, 101, 102, 103]
    assert case.ttft_s == pytest.approx(np.full(4, 0.2))
    assert case.tpot_s[1:] == pytest.approx(np.full(3, 0.1)) and np.isnan(case.tpot_s[0])
    (predicted,) = predict_set(measured, by_tables)
    assert np.isfinite(predicted.ttft_s).all() and np.isfinite(predicted.tpot_s[1:]).all()


def test_kv_is_as_large_as_recorded(tmp_path: Path) -> None:
    path = _write(tmp_path, TOLD)
    beside = path.with_name("RTXPRO6000_Small_meta.json")
    plain = read_set(path, by_tables).cases[0].serving
    beside.write_text(json.dumps({"engine_kwargs": TOLD, "kv_cache": {"num_kv_tokens": 41408}}), encoding="utf-8")
    known = read_set(path, by_tables).cases[0].serving
    token_bytes = kv_token_bytes(known.model, known.precision, known.tp)
    assert kv_bytes(known) == pytest.approx(41408 * token_bytes, abs=token_bytes) and kv_bytes(known) < kv_bytes(plain)


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("RTX0000_Small", {}, "GPU RTX0000 not in the catalog"),
        ("RTXPRO6000_Small", {"model": "meta-llama/Llama-3.1-8B"}, "no experts"),
        ("RTXPRO6000_Small", {"kv_cache_dtype": "fp8"}, "KV cache in fp8"),
    ],
)
def test_runs_that_no_case_stands_for_are_counted(
    tmp_path: Path, name: str, changed: dict[str, Any], reason: str
) -> None:
    measured = read_set(_write(tmp_path, TOLD | changed, name), by_tables)
    ((_, model, why),) = measured.unsupported
    assert not measured.cases and measured.unsupported.total() == 4
    assert model == (TOLD | changed)["model"] and reason in why


def test_settings_must_be_beside_the_requests(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"RTXPRO6000_Small_meta\.json: expected the engine_kwargs"):
        read_set(_write(tmp_path, None), by_tables)
    without = {name: value for name, value in TOLD.items() if name != "dtype"}
    with pytest.raises(LayoutError, match="no dtype in engine_kwargs"):
        read_set(_write(tmp_path, without), by_tables)


def test_a_broken_file_says_what_it_should_be(tmp_path: Path) -> None:
    path = tmp_path / "x_requests.jsonl.gz"
    path.write_bytes(gzip.compress(b"{not json"))
    with pytest.raises(LayoutError, match="not a readable file of JSON lines"):
        read_set(path, by_tables)


@pytest.mark.skipif(not BENCH.is_dir(), reason="the shared/ folder with the measured sets is absent")
def test_ranks_take_as_long_as_measured_where_operators_are_known() -> None:
    """Qwen3-30B-A3B in two ranks, experts over both. With operators and link of the machine itself, means are within 3 %
    (TPOT), 4 % (end to end) and 10 % (TTFT); with our tables and the link of another machine TPOT is 21 % too short."""
    tables = profiled(BENCH, "RTXPRO6000", MIXTURE, RUN)
    off = {}
    for name, make_step in (("own", partial(ProfiledRanks, tables)), ("ours", by_tables)):
        measured = read_set(BENCH / f"{RUN}_requests.jsonl.gz", make_step)
        once = replace(measured, cases=tuple(map(with_load(OpenLoop, phases=1), measured.cases)))
        (found,) = predict_set(once, make_step)
        case, gaps = found.case, found.case.load.output_tokens - 1
        pairs = [(found.tpot_s, case.tpot_s), (found.ttft_s, case.ttft_s)]
        pairs.append((found.ttft_s + found.tpot_s * gaps, case.ttft_s + case.tpot_s * gaps))
        off[name] = [np.nanmean(predicted) / np.nanmean(real) - 1 for predicted, real in pairs]
    tpot, ttft, e2e = off["own"]
    assert abs(tpot) < 0.03 and abs(e2e) < 0.04 and abs(ttft) < 0.10, off
    assert off["own"] == pytest.approx([-0.015, -0.067, -0.016], abs=0.001)  # docs/experiments.md
    assert off["ours"][0] == pytest.approx(-0.21, abs=0.005)


@pytest.mark.skipif(not BENCH.is_dir(), reason="the shared/ folder with the measured sets is absent")
def test_dense_runs_are_off_by_as_much_as_the_page_says() -> None:
    """Means of TPOT, end to end and TTFT, in percent: Llama-3.1-8B on an RTX 4090 whose KV is full, and on an RTX PRO 6000."""
    off = {}
    for run in ("RTX4090_Llama-3.1-8B", "RTXPRO6000_Llama-3.1-8B"):
        measured = read_set(BENCH / f"{run}_requests.jsonl.gz", by_tables)
        once = replace(measured, cases=tuple(map(with_load(OpenLoop, phases=1), measured.cases)))
        (found,) = predict_set(once, by_tables)
        case, gaps = found.case, found.case.load.output_tokens - 1
        whole = found.ttft_s + found.tpot_s * gaps, case.ttft_s + case.tpot_s * gaps
        pairs = [(found.tpot_s, case.tpot_s), whole, (found.ttft_s, case.ttft_s)]
        off[run] = [100 * (np.nanmean(predicted) / np.nanmean(real) - 1) for predicted, real in pairs]
    assert off["RTX4090_Llama-3.1-8B"] == pytest.approx([6.5, 8.7, 9.4], abs=0.1)  # docs/fidelity.md
    assert off["RTXPRO6000_Llama-3.1-8B"] == pytest.approx([-6.1, -8.1, -13.7], abs=0.1)
