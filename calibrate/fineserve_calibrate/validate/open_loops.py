"""Sets with open arrivals: BLIS (means of long runs), llm-d LMBench and DistServe (single requests), kvcached (several models
on one GPU, means a model)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from fineserve_traces import arrivals

from fineserve_calibrate.validate.cases import Case, Floats, Label, MeasuredSet, OpenLoop, Sensitivity, Serving
from fineserve_calibrate.validate.changes import with_budget, with_cached_prefix, with_tp, with_utilization
from fineserve_calibrate.validate.names import UnsupportedRow, gpu_named, model_named
from fineserve_calibrate.validate.supported import supported
from fineserve_calibrate.validate.tables import check_positive, stem
from fineserve_sim.catalog import deployment, gpu, precision

HOST = "vllm-cudagraph"
SEED = 20240711

BLIS_COLUMNS = (
    "model", "tp", "gt_requests", "gt_ttft_ms", "gt_e2e_ms", "gt_arrival_rate_rps", "gt_input_mean", "gt_output_mean",
)  # fmt: skip
BLIS_REQUESTS = 2000
"""Requests simulated of each run of thousands: its means have settled by then."""

LMBENCH_COLUMNS = (
    "config", "gpu", "scenario", "qps", "launch_s", "prompt_tokens", "generation_tokens", "ttft_s", "generation_s",
)  # fmt: skip
LMBENCH_TP = 2
LMBENCH_FRONT_END_S = 0.0097
"""Gateway, HTTP and tokenizer: median of what TTFT exceeds the engine's in the runs at up to ``LMBENCH_FITTED_QPS``, where
nobody waits. Those runs are not reported."""
LMBENCH_FITTED_QPS = 1.0

FITTED_RATE = 1.0
DISTSERVE_COLUMNS = ("system", "rate", "run_requests", "issue_s", "prompt_len", "output_len", "ttft_ms", "tpot_ms")

KVCACHED_COLUMNS = (
    "set", "file", "hardware", "kvcached", "model_id", "completed", "request_rate", "burstiness", "total_input_tokens",
    "total_output_tokens", "mean_ttft_ms", "mean_tpot_ms",
)  # fmt: skip
_KVCACHED_FILE = re.compile(r"-(?P<instance>\d+)-delay-(?P<delay_s>\d+)-model-num-(?P<models>\d+)\.json$")


def read_blis(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Poisson arrivals at the measured rate, all requests of mean length. TPOT is (E2E - TTFT) / (output - 1): the set's ITL
    column holds half of it. What an input holds beyond its question (``spec_question_len``, where recorded) is the prefix that
    the prompts share, and found in vLLM's prefix cache."""
    check_positive(frame, BLIS_COLUMNS[1:], path)
    cases, unsupported = [], Counter[tuple[str, str, str]]()
    for row in frame.to_dict("records"):
        try:
            cases.append(_blis_case(row, stem(path)))
        except UnsupportedRow as reason:
            unsupported["vllm", row["model"], str(reason)] += 1
    return MeasuredSet(
        stem(path),
        tuple(cases),
        unsupported,
        assumptions=(
            f"Poisson arrivals, first {BLIS_REQUESTS} requests, mean lengths, 16-bit, token budget 2048, 256 sequences",
            "the shared prefix (input beyond the question) is cached and not computed; its keys are not read either",
        ),
        sensitivities=(
            Sensitivity("token budget 8192", with_budget(8192)),
            Sensitivity("a prefix of a quarter more computed", with_cached_prefix(-0.25)),
            Sensitivity("half of each question cached", with_cached_prefix(0.5)),
        ),
        shares_prefixes=True,
    )


def _blis_case(row: dict[Any, Any], name: str) -> Case:
    tp, served = int(row["tp"]), model_named(row["model"])
    n = min(BLIS_REQUESTS, int(row["gt_requests"]))
    computed = min(row["gt_input_mean"], row.get("spec_question_len", row["gt_input_mean"]))
    load = OpenLoop(
        arrival_s=arrivals.poisson(np.random.default_rng(SEED), row["gt_arrival_rate_rps"], n),
        model=np.zeros(n, dtype=np.int64),
        prompt_tokens=np.full(n, round(computed)),
        output_tokens=np.full(n, round(row["gt_output_mean"])),
        each=False,
    )
    serving = supported(Serving(served, precision("fp16"), tp, gpu("h100-sxm"), deployment(HOST), 2048, 256))
    tpot_s = (row["gt_e2e_ms"] - row["gt_ttft_ms"]) / (row["gt_output_mean"] - 1) / 1e3
    label = Label(name, "vllm", str(row["model"]), "W16A16", tp)
    return Case(label, serving, load, np.array([row["gt_ttft_ms"] / 1e3]), np.array([tpot_s]))


def read_lmbench(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """One case a run (configuration, scenario, rate); its rows are requests."""
    cases, unsupported, fitted = [], Counter[tuple[str, str, str]](), 0
    for (config, scenario, qps), rows in frame.groupby(["config", "scenario", "qps"], sort=False):
        try:
            case = _lmbench_case(str(config), str(scenario), rows, path)
        except UnsupportedRow as reason:
            unsupported["vllm", str(config), str(reason)] += len(rows)
            continue
        if float(str(qps)) <= LMBENCH_FITTED_QPS:
            fitted += len(rows)
        else:
            cases.append(case)
    return MeasuredSet(
        stem(path),
        tuple(cases),
        unsupported,
        assumptions=(
            f"two replicas at TP {LMBENCH_TP}, 16-bit, round robin; token budget 2048; memory utilization 0.9 (vLLM's default)",
            f"{LMBENCH_FRONT_END_S * 1e3:g} ms before the engine sees a request, fitted on the runs at up to "
            f"{LMBENCH_FITTED_QPS:g} requests/s ({fitted} rows, not reported)",
            "predicted without prefix cache",
        ),
        sensitivities=(
            Sensitivity("TP 4 a replica", with_tp(4)),
            Sensitivity("GPU memory utilization 0.95", with_utilization(0.95)),
            Sensitivity("token budget 8192", with_budget(8192)),
            Sensitivity("half of each prompt cached", with_cached_prefix(0.5)),
        ),
        shares_prefixes=True,
        kind="fitted on part of the set" if fitted else "prediction",
    )


def _lmbench_case(config: str, scenario: str, rows: pd.DataFrame, path: Path) -> Case:
    if "scout" in config:
        raise UnsupportedRow("mixture of experts")
    if not re.fullmatch(r"exp\d+-vllm-70b-2replicas", config):
        raise UnsupportedRow("not plain vLLM replicas of the 70B model")
    rows = rows.sort_values("launch_s", kind="stable")
    check_positive(rows, ("prompt_tokens", "generation_tokens", "ttft_s"), path)
    n, outputs = len(rows), rows.generation_tokens.to_numpy(np.int64)
    load = OpenLoop(
        arrival_s=rows.launch_s.to_numpy(np.float64),
        model=np.zeros(n, dtype=np.int64),
        prompt_tokens=rows.prompt_tokens.to_numpy(np.int64),
        output_tokens=outputs,
        replicas=2,
    )
    served = model_named("llama-3.1-70b")
    device = gpu_named(str(rows.gpu.iloc[0]))
    engine = Serving(served, precision("fp16"), LMBENCH_TP, device, deployment(HOST), 2048, 256)
    serving = supported(replace(engine, front_end_s=LMBENCH_FRONT_END_S))
    label = Label(f"{stem(path)}, {scenario}", "vllm", served.name, "W16A16", LMBENCH_TP)
    return Case(label, serving, load, rows.ttft_s.to_numpy(np.float64), _per_token(rows.generation_s, outputs))


def _per_token(seconds: pd.Series, outputs: np.ndarray[Any, np.dtype[np.int64]]) -> Floats:
    gaps = np.where(outputs > 1, outputs - 1, np.nan)
    result: Floats = seconds.to_numpy(np.float64) / gaps
    return result


def read_distserve(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """OPT-13B on one A100: the requests of vLLM's runs. DistServe's own split prefill and decode. The host time of vLLM's first
    generation was fitted on the run at ``FITTED_RATE``, which is not reported."""
    cases, unsupported, fitted = [], Counter[tuple[str, str, str]](), 0
    for (system, rate, _), rows in frame.groupby(["system", "rate", "run_requests"], sort=False):
        if system != "vllm":
            unsupported[str(system), "opt-13b", "prefill and decode on different engines"] += len(rows)
        elif rate == FITTED_RATE:
            fitted += len(rows)
        else:
            cases.append(_distserve_case(rows.sort_values("issue_s", kind="stable"), path))
    return MeasuredSet(
        stem(path),
        tuple(cases),
        unsupported,
        assumptions=(
            "TP 1, 16-bit, token budget 2048 (whole prompts of vLLM 0.2-0.3 read as chunks); 256 sequences",
            f"host time fitted on the run at {FITTED_RATE:g} requests/s ({fitted} rows, not reported)",
        ),
        sensitivities=(Sensitivity("token budget 512", with_budget(512)),),
        kind="fitted on part of the set" if fitted else "prediction",
    )


def _distserve_case(rows: pd.DataFrame, path: Path) -> Case:
    check_positive(rows, ("prompt_len", "output_len", "ttft_ms"), path)
    n, outputs = len(rows), rows.output_len.to_numpy(np.int64)
    load = OpenLoop(
        rows.issue_s.to_numpy(np.float64), np.zeros(n, dtype=np.int64), rows.prompt_len.to_numpy(np.int64), outputs
    )
    serving = Serving(model_named("opt-13b"), precision("fp16"), 1, gpu("a100-80gb"), deployment("vllm-v0"), 2048, 256)
    tpot_s = np.where(outputs > 1, rows.tpot_ms.to_numpy(np.float64) / 1e3, np.nan)
    label = Label(stem(path), "vllm", "opt-13b", "W16A16", 1)
    return Case(label, serving, load, rows.ttft_ms.to_numpy(np.float64) / 1e3, tpot_s)


def read_kvcached(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Several copies of a model on one A100, started one after the other at a fixed rate; one row of means a copy.

    Runs whose neighbours or arrivals the set does not record, and those on other vendors' GPUs, are unsupported.
    """
    cases, unsupported = [], Counter[tuple[str, str, str]]()
    shared_run = frame["file"].str.extract(_KVCACHED_FILE)
    frame = frame.assign(run=frame["file"].str.replace(_KVCACHED_FILE, "", regex=True), **shared_run)
    for (_, _, served), rows in frame.groupby(["set", "run", "model_id"], sort=False):
        try:
            cases.append(_kvcached_case(rows, path))
        except UnsupportedRow as reason:
            unsupported["vllm", str(served), str(reason)] += len(rows)
    return MeasuredSet(
        stem(path),
        tuple(cases),
        unsupported,
        assumptions=(
            "copy i starts (i - 1) x delay after the first; mean lengths; an equal share of 0.9 of the GPU each, or with "
            "kvcached one KV memory for all; token budget 2048 (vLLM's default on an A100), 256 sequences",
        ),
        sensitivities=(Sensitivity("token budget 8192", with_budget(8192)),),
    )


def _kvcached_case(rows: pd.DataFrame, path: Path) -> Case:
    first = rows.iloc[0]
    if not str(first["hardware"]).startswith("A100"):
        raise UnsupportedRow(f"hardware {first['hardware']}")
    if pd.isna(first["models"]) or len(rows) != int(first["models"]):
        raise UnsupportedRow("models that ran beside it are not recorded")
    if not np.isfinite(first["request_rate"]):
        raise UnsupportedRow("arrivals of a ramp are not recorded")
    rows = rows.assign(instance=rows["instance"].astype(int)).sort_values("instance")
    check_positive(rows, ("completed", "total_input_tokens", "total_output_tokens", "mean_ttft_ms"), path)
    served, elastic = model_named(str(first["model_id"])), bool(first["kvcached"])
    share = 0.9 / len(rows)
    serving = supported(Serving(served, precision("fp16"), 1, gpu("a100-80gb"), deployment(HOST), 2048, 256, share))
    label = Label(f"{stem(path)}, {'kvcached' if elastic else 'fixed shares'}", "vllm", served.name, "W16A16", 1)
    ttft_s, tpot_s = (rows[column].to_numpy(np.float64) / 1e3 for column in ("mean_ttft_ms", "mean_tpot_ms"))
    return Case(label, serving, _kvcached_load(rows, elastic), ttft_s, tpot_s)


def _kvcached_load(rows: pd.DataFrame, elastic: bool) -> OpenLoop:
    """Gamma arrivals with vLLM's burstiness (its shape: 1 is Poisson) for each copy, merged in time."""
    rng = np.random.default_rng(SEED)
    columns: list[np.ndarray[Any, np.dtype[np.float64]]] = []
    for copy, row in enumerate(rows.to_dict("records")):
        n = int(row["completed"])
        start_s = copy * float(row["delay_s"])
        times = start_s + arrivals.gamma(rng, row["request_rate"], row["burstiness"] ** -0.5, n)
        prompt, output = (max(1, round(row[name] / n)) for name in ("total_input_tokens", "total_output_tokens"))
        columns.append(np.stack([times, np.full(n, copy), np.full(n, prompt), np.full(n, output)]))
    merged = np.concatenate(columns, axis=1)
    times, copies, prompts, outputs = merged[:, np.argsort(merged[0], kind="stable")]
    return OpenLoop(
        arrival_s=times,
        model=copies.astype(np.int64),
        prompt_tokens=prompts.astype(np.int64),
        output_tokens=outputs.astype(np.int64),
        models=len(rows),
        shared_kv=elastic,
        each=False,
    )
