"""Measured sets of engines that prefill and engines that decode, and rows whose degrees count twice."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fineserve_evidence.commands import Latency, step_factory
from fineserve_evidence.validate.cases import Apart, Case, ClosedLoop, Label, MeasuredSet, OpenLoop, Serving
from fineserve_evidence.validate.layouts import read_set
from fineserve_evidence.validate.predict import predict_set

from fineserve_sim.catalog import deployment, gpu, model, precision, with_experts, with_ranks
from fineserve_sim.latency import StepModel, step_model_of

DOCS = Path(__file__).parents[2] / "docs"
E2E = Path(__file__).parents[3] / "shared" / "data" / "e2e"
needs_sets = pytest.mark.skipif(not E2E.is_dir(), reason="the shared/ folder with the measured sets is absent")
DEGREES = "tp_size,pp_size,attention_dp_size,moe_tp_size,moe_ep_size"
HEADER = (
    "backend,backend_version,model_path,system,precision,mode,isl,osl,gemm_quant_mode,silicon_ttft_ms,silicon_tpot_ms,"
    f"concurrency,source_kind,{DEGREES},prefill_num_workers,decode_num_workers,decode_batch_size,"
    + ",".join(f"{role}_{degree}" for role in ("prefill", "decode") for degree in DEGREES.split(","))
)
START = "trtllm,0.8.1.post1,deepseek-ai/DeepSeek-V3,h200_sxm,fp8"
SPLIT = ",,,,"
"""Degrees of a row whose engines do both: none."""


def apart_row(clients: str, workers: str, prefill: str, decode: str) -> str:
    return f"{START},disagg,1024,1024,fp8,800,20,{clients},inferencemax_db_dump,{SPLIT},{workers},{prefill},{decode}"


def both_row(degrees: str, source: str = "inferencemax_daily_csv") -> str:
    return f"{START},agg,1024,1024,fp8,300,15,8,{source},{degrees},,,,{SPLIT},{SPLIT}"


def read(folder: Path, *rows: str) -> MeasuredSet:
    path = folder / "set.csv"
    path.write_text("\n".join((HEADER, *rows)) + "\n", encoding="utf-8")
    return read_set(path, StepModel)


def test_rows_of_roles(tmp_path: Path) -> None:
    """Degrees of each role; a group of data-parallel ranks is one engine; without clients, those that decode."""
    found = read(
        tmp_path,
        apart_row("144", "1,9,16", "8,1,1,1,8", "8,1,1,1,8"),
        apart_row("", "2,3,8", "1,1,8,1,8", "1,1,8,1,8"),
        apart_row("144", ",,16", "8,1,1,1,8", "8,1,1,1,8"),
    )
    whole, ranks = found.cases
    assert whole.apart is not None and ranks.apart is not None
    assert (whole.apart.prefill, whole.apart.decode, whole.serving.tp, whole.apart.serving.tp) == (1, 9, 8, 8)
    assert isinstance(whole.load, ClosedLoop) and (whole.load.clients, whole.load.requests) == (144, 1440)
    assert ranks.serving.model.experts is not None and ranks.apart.serving.model.experts is not None
    assert (ranks.serving.tp, ranks.serving.model.experts.ranks, ranks.apart.serving.model.experts.ranks) == (1, 8, 8)
    assert isinstance(ranks.load, ClosedLoop) and ranks.load.clients == 3 * 8 * 8
    assert whole.label == Label("set, h200-sxm, prefill and decode apart", "trtllm", START.split(",")[2], "W8A8KV8", 8)
    assert [reason for _, _, reason in found.unsupported] == [
        "prefill and decode apart, number of engines not recorded"
    ]


def test_degrees_that_count_twice(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        both_row("64,1,1,8,8"),
        both_row("1,1,64,8,8"),
        both_row("4,1,4,1,16"),
        both_row("4,1,1,2,2", "aic_auto_gap_run"),
    )
    degrees = [
        (case.serving.tp, case.serving.model.experts.ranks, case.serving.model.experts.spread)
        for case in found.cases
        if case.serving.model.experts
    ]
    assert degrees[:2] == [(8, 1, "whole"), (1, 8, "whole")]
    assert [case.load.clients for case in found.cases if isinstance(case.load, ClosedLoop)] == [8, 8]
    reasons = sorted(reason for _, _, reason in found.unsupported)
    assert reasons == ["does not fit into the memory of h200-sxm at TP 4", "experts both split and spread"]


def case_of(load: ClosedLoop | OpenLoop, prefill: Serving, apart: Apart | None) -> Case:
    label = Label("s", "vllm", prefill.model.name, prefill.precision.name, prefill.tp)
    rows = len(load.arrival_s) if isinstance(load, OpenLoop) else 1
    return Case(label, prefill, load, np.ones(rows), np.ones(rows), apart=apart)


def serving(tp: int = 1, ranks: int = 1) -> Serving:
    spec = model("qwen3-30b-a3b") if ranks > 1 else model("llama-3.1-8b")
    spec = with_ranks(with_experts(spec, "whole"), ranks) if ranks > 1 else spec
    return Serving(spec, precision("fp16"), tp, gpu("h100-sxm"), deployment("vllm-cudagraph"), 2048, 64)


def test_prompts_take_what_they_take_where_nothing_decodes() -> None:
    """TTFT is that of requests of one token on the engine that prefills; TPOT that of the other's steps and the transfer."""
    rng = np.random.default_rng(0)
    n, zeros = 60, np.zeros(60, dtype=np.int64)
    sent_s, prompts = np.cumsum(rng.exponential(0.05, n)), rng.integers(50, 1500, n)
    load = OpenLoop(sent_s, zeros, prompts, rng.integers(2, 60, n), phases=1)
    alone = case_of(replace(load, output_tokens=np.ones(n, dtype=np.int64)), serving(), None)
    found = case_of(load, serving(), Apart(1, 1, serving(), setup_s=0.0))
    slow = case_of(load, serving(), Apart(1, 1, serving(), setup_s=0.5))
    first, both, late = predict_set(MeasuredSet("s", (alone, found, slow)), step_model_of)
    assert np.array_equal(first.ttft_s, both.ttft_s) and np.array_equal(first.ttft_s, late.ttft_s)
    assert (late.tpot_s * (load.output_tokens - 1) - both.tpot_s * (load.output_tokens - 1)).min() > 0.4


def test_roles_have_degrees_and_ranks_of_their_own() -> None:
    load = ClosedLoop(12, 48, 700, 40)
    found = case_of(load, serving(2, 2), Apart(2, 1, serving(1, 4)))
    fewer = case_of(load, serving(2, 2), Apart(1, 1, serving(1, 4)))
    two, one = predict_set(MeasuredSet("s", (found, fewer)), step_model_of)
    assert np.isfinite(two.ttft_s).all() and np.isfinite(two.tpot_s).all()
    assert two.ttft_s[0] < one.ttft_s[0]


def test_distserve_says_its_degrees_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "set.csv"
    header = "system,rate,run_requests,issue_s,prompt_len,output_len,ttft_ms,tpot_ms\n"
    systems = ("distserve-c21d11", "distserve-c21d12", "distserve")
    path.write_text(header + "".join(f"{name},2.0,1,0.0,55,4,83,33\n" for name in systems), encoding="utf-8")
    found = read_set(path, StepModel)
    (one,) = found.cases
    assert one.apart is not None and (one.serving.tp, one.apart.serving.tp, one.apart.nodes) == (2, 1, False)
    assert sorted(reason for _, _, reason in found.unsupported) == [
        "TP degrees of the engines not recorded",
        "pipeline",
    ]


def test_the_page_has_the_errors_of_the_measured_sets() -> None:
    """The files of ``python -m docs.generate --measure``."""
    page = " ".join((DOCS / "disaggregation.md").read_text(encoding="utf-8").split())
    with (DOCS / "data" / "own_errors.csv").open(encoding="utf-8") as file:
        mine = {
            row["backend"]: row
            for row in csv.DictReader(file)
            if row["set"] == "aic_silicon_hopper, h200-sxm, prefill and decode apart"
            or row["backend"].startswith("distserve-")
        }
    assert len(mine) == 3
    for row, words in (
        (mine["sglang"], "{} and {} % under SGLang ({} rows)"),
        (mine["trtllm"], "{} and {} % under TensorRT-LLM ({} rows"),
        (mine["distserve-c21d11"], "on A100 by {} and {} %"),
    ):
        tpot, ttft = (round(100 * float(row[f"{name}_median_abs"])) for name in ("tpot", "ttft"))
        assert words.format(tpot, ttft, row["n"]) in page
    assert f"DistServe's {int(mine['distserve-c21d11']['n']):,} requests" in page


@pytest.mark.slow
@needs_sets
def test_measured_roles_are_predicted() -> None:
    """Nothing is fitted to them. Medians; TTFT of the closed loops is mostly a queue (docs/fidelity.md)."""
    by_tables = step_factory(Latency.TABLES)
    found = read_set(E2E / "aic_silicon_hopper.csv.gz", by_tables)
    mine = [
        one for one in found.cases if one.apart and one.serving.model.name == "deepseek-v3" and one.load.clients < 600
    ]  # type: ignore[union-attr]
    assert len(mine) == 23
    off = [
        abs(one.tpot_s[0] / one.case.tpot_s[0] - 1) for one in predict_set(replace(found, cases=tuple(mine)), by_tables)
    ]
    assert np.median(off) < 0.06 and max(off) < 0.2
    found = read_set(E2E / "distserve_opt13b_a100_requests.csv.gz", by_tables)
    mine = [one for one in found.cases if one.apart]
    assert sum(len(one.ttft_s) for one in mine) == 7050
    for one in predict_set(replace(found, cases=tuple(mine)), by_tables):
        ttft, tpot = (
            np.nanmedian(np.abs(predicted / measured - 1))
            for predicted, measured in ((one.ttft_s, one.case.ttft_s), (one.tpot_s, one.case.tpot_s))
        )
        assert ttft < 0.22 and tpot < 0.25
