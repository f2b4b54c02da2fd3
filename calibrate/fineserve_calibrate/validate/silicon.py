"""aiconfigurator's "silicon" points: means of closed-loop benchmark runs by model, TP, lengths and number of clients.

Its InferenceMAX rows ran ``max_num_seqs`` = clients, 8,192 batch tokens, no prefix cache, ten requests a client, lengths
uniform in 0.8-1.0 of the nominal ones (README of InferenceMAX). Its own gap runs state only the clients: the rest is a reading
by engine and version (``readings``).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fineserve_calibrate.validate.cases import Case, ClosedLoop, Label, MeasuredSet, Sensitivity, Serving
from fineserve_calibrate.validate.changes import (
    with_8bit_kv,
    with_budget,
    with_cached_prefix,
    with_full_lengths,
    with_rounds,
    with_steps_ahead,
)
from fineserve_calibrate.validate.hosts import FRONT_END_S
from fineserve_calibrate.validate.names import UnsupportedRow, gpu_named, model_named, precision_named
from fineserve_calibrate.validate.readings import is_fitted, of_campaigns, reading_of
from fineserve_calibrate.validate.supported import supported
from fineserve_calibrate.validate.tables import check_positive, stem
from fineserve_sim.catalog import PrecisionSpec, deployment

COLUMNS = (
    "backend", "model_path", "system", "precision", "mode", "isl", "osl", "gemm_quant_mode", "tp_size", "pp_size",
    "attention_dp_size", "silicon_ttft_ms", "silicon_tpot_ms", "concurrency", "source_kind",
)  # fmt: skip
LOAD, MEASURED = ("isl", "osl", "concurrency"), ("silicon_ttft_ms", "silicon_tpot_ms")
ROUNDS = 10
TOKEN_BUDGET = 8192
INFERENCEMAX_SHORTEST = 0.8
DEPLOYMENTS = {"vllm": "vllm-cudagraph", "trtllm": "trtllm-1.0", "sglang": "sglang-0.5"}
"""Host time by backend."""
GENERATIONS = {("vllm", "0.12.0"): "vllm-v1"}
"""Host time of versions that differ."""


def read_silicon(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Aggregated serving of dense models; other rows are counted as unsupported."""
    name = stem(path)
    cases: list[Case] = []
    unsupported: Counter[tuple[str, str, str]] = Counter()
    for index, row in enumerate(frame.to_dict("records")):
        try:
            case = _case(row, name)
            check_positive(frame.iloc[index : index + 1], (*LOAD, *MEASURED), path, may_miss=MEASURED)
            cases.append(case)
        except UnsupportedRow as reason:
            unsupported[row["backend"], row["model_path"], str(reason)] += 1
    return MeasuredSet(
        name,
        tuple(cases),
        unsupported,
        assumptions=(
            f"InferenceMAX rows: {ROUNDS} requests a client, token budget {TOKEN_BUDGET}, a slot for every client, lengths "
            f"uniform in {INFERENCEMAX_SHORTEST}-1.0 of nominal",
            "gap runs: nominal lengths; the rest as their engine and version is read, below",
            "FP8 checkpoints: 8-bit KV on TensorRT-LLM, 16-bit elsewhere; block-scaled FP8 as per-tensor FP8",
            f"kernels of vLLM, whatever the backend; {FRONT_END_S * 1e3:g} ms before the engine, as in LMBench",
        ),
        sensitivities=(
            Sensitivity("5 requests a client", with_rounds(5)),
            Sensitivity("token budget 2048", with_budget(2048)),
            Sensitivity("nominal lengths everywhere", with_full_lengths),
            Sensitivity("FP8 checkpoints with 8-bit KV", with_8bit_kv),
            Sensitivity("half of each prompt found in a prefix cache", with_cached_prefix(0.5)),
            Sensitivity("steps are scheduled one ahead", with_steps_ahead(1)),
        ),
        readings=of_campaigns(),
    )


def _quantised(row: dict[Any, Any]) -> str:
    """The row's quantisation; where it records none, what the checkpoint's name ends on."""
    for column in ("gemm_quant_mode", "precision"):
        if isinstance(row[column], str):
            return str(row[column])
    return next((name for name in ("fp8", "awq") if str(row["model_path"]).lower().endswith(f"-{name}")), "")


def _precision(backend: str, quantised: str) -> PrecisionSpec:
    """TensorRT-LLM takes the 8-bit KV that NVIDIA's FP8 checkpoints name; vLLM and SGLang keep 16 bits unless told."""
    return precision_named("fp8_kv8" if backend == "trtllm" and quantised.startswith("fp8") else quantised)


def _case(row: dict[Any, Any], name: str) -> Case:
    if row["mode"] != "agg":
        raise UnsupportedRow("prefill and decode on different engines")
    served = model_named(row["model_path"])
    if row["pp_size"] > 1 or row["attention_dp_size"] > 1:  # empty where a run does not know them
        raise UnsupportedRow("pipeline or attention data parallelism")
    if row["backend"] not in DEPLOYMENTS:
        raise UnsupportedRow(f"backend {row['backend']}")
    precision = _precision(row["backend"], _quantised(row))
    if not (row["tp_size"] > 0 and row["concurrency"] > 0):
        raise UnsupportedRow("TP degree or number of clients not recorded")
    tp, clients = int(row["tp_size"]), int(row["concurrency"])
    gpu, version = gpu_named(row["system"]), str(row.get("backend_version", ""))
    engine = (row["backend"], version)
    inferencemax = str(row["source_kind"]).startswith("inferencemax")
    fitted = not inferencemax and is_fitted(*engine, served.name, tp, gpu.name)
    name = f"{name}, {gpu.name}{', reading chosen on these rows' if fitted else ''}"
    label = Label(name, row["backend"], row["model_path"], precision.name, tp)
    host = deployment(GENERATIONS.get(engine, DEPLOYMENTS[row["backend"]]))
    serving = supported(Serving(served, precision, tp, gpu, host, TOKEN_BUDGET, clients, front_end_s=FRONT_END_S))
    shortest = INFERENCEMAX_SHORTEST if inferencemax else 1.0
    load = ClosedLoop(clients, ROUNDS * clients, int(row["isl"]), int(row["osl"]), shortest, clients)
    ttft_s, tpot_s = (np.array([row[column] / 1e3]) for column in MEASURED)
    case = Case(label, serving, load, ttft_s, tpot_s, campaign=" ".join((row["backend"], version, served.name)))
    return case if inferencemax else reading_of(*engine, served.name).of(case)
