"""LLMServingSim's bench runs of real vLLM: a row a request, and what the engine was told in a ``_meta.json`` beside it.

``RTXPRO6000_Qwen3-32B_requests.jsonl.gz`` has its GPU in its name, and ``RTXPRO6000_Qwen3-32B_meta.json`` beside it.
Times are the server's own: TTFT is the first token's less that of queueing. Source: casys-kaist/LLMServingSim @ 5daddb2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fineserve_evidence.validate.cases import Case, Label, MeasuredSet, OpenLoop, Sensitivity, Serving, with_serving
from fineserve_evidence.validate.predict import kv_bytes
from fineserve_evidence.validate.rows import (
    STEPS_AHEAD,
    LayoutError,
    UnsupportedRow,
    cases_of,
    check_positive,
    gpu_named,
    model_named,
    precision_named,
    stem,
    supported,
)
from fineserve_sim.catalog import CatalogError, ModelSpec, deployment, kv_token_bytes, with_experts, with_ranks

COLUMNS = ("request_id", "input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
ENDING, KV_TOKENS = "_requests.jsonl.gz", "num_kv_tokens"
MEMORY_UTILIZATION = 0.9
TOLD = ("model", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "dtype", "kv_cache_dtype")


def read_servingsim(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Read the run as one case, a row a request."""
    check_positive(frame, COLUMNS[1:], path)
    told = _told(path)
    cases, unsupported = cases_of(
        [told], lambda _: _case(frame, path, told), lambda _: ("vllm", str(told["model"])), lambda _: len(frame)
    )
    return MeasuredSet(
        stem(path),
        cases,
        unsupported,
        assumptions=(
            "settings as recorded; requests come when the server queued them, in turn to the ranks of attention in data "
            "parallel; no prompts begin alike",
            f"{MEMORY_UTILIZATION:g} of the GPU's memory (vLLM's default), or KV as recorded; steps are scheduled one ahead "
            "(vLLM 0.19)",
        ),
        sensitivities=(Sensitivity("no step scheduled ahead", with_serving(steps_ahead=0)),),
    )


def _told(path: Path) -> Mapping[str, Any]:
    """The engine's arguments, and the tokens of its KV cache where they are known (``KV_TOKENS``). Raises LayoutError where
    they are not beside the requests."""
    beside = path.with_name(path.name.removesuffix(ENDING) + "_meta.json")
    try:
        meta: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        told: dict[str, Any] = meta["engine_kwargs"] | {KV_TOKENS: meta.get("kv_cache", {}).get(KV_TOKENS)}
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise LayoutError(f"{beside}: expected the engine_kwargs of {path.name} ({problem})") from None
    if missing := [name for name in TOLD if name not in told]:
        raise LayoutError(f"{beside}: no {missing[0]} in engine_kwargs")
    return told


def _case(frame: pd.DataFrame, path: Path, told: Mapping[str, Any]) -> Case:
    ranks, tp = int(told.get("data_parallel_size", 1)), int(told["tensor_parallel_size"])
    if told["kv_cache_dtype"] != "auto":
        raise UnsupportedRow(f"KV cache in {told['kv_cache_dtype']}")
    serving = Serving(
        _in_ranks(model_named(told["model"]), ranks, whole=bool(told.get("enable_expert_parallel"))),
        precision_named(told["dtype"]),
        tp,
        gpu_named(path.name.split("_")[0]),
        deployment("vllm-cudagraph"),
        int(told["max_num_batched_tokens"]),
        int(told["max_num_seqs"]),
        MEMORY_UTILIZATION,
        steps_ahead=STEPS_AHEAD,
    )
    if told[KV_TOKENS] is not None:
        serving = _with_kv(serving, int(told[KV_TOKENS]))
    rows = frame.sort_values("queued_ts", kind="stable")
    queued_s, first_s, last_s = (rows[name].to_numpy(np.float64) for name in COLUMNS[3:])
    prompts, outputs = (rows[name].to_numpy(np.int64) for name in COLUMNS[1:3])
    load = OpenLoop(queued_s - queued_s[0], np.zeros(len(rows), dtype=np.int64), prompts, outputs, replicas=ranks)
    tpot_s = (last_s - first_s) / np.where(outputs > 1, outputs - 1, np.nan)
    label = Label(stem(path), "vllm", str(told["model"]), "W16A16", tp)
    return Case(label, supported(serving), load, first_s - queued_s, tpot_s)


def _with_kv(serving: Serving, tokens: int) -> Serving:
    """The engine with memory for so many tokens of KV on each GPU."""
    missing_bytes = tokens * kv_token_bytes(serving.model, serving.precision, serving.tp) - kv_bytes(serving)
    return replace(serving, memory_utilization=serving.memory_utilization + missing_bytes / serving.gpu.memory_bytes)


def _in_ranks(model: ModelSpec, ranks: int, *, whole: bool) -> ModelSpec:
    """Raises UnsupportedRow where the model has no such ranks."""
    try:
        spread = with_experts(model, "whole") if whole else model
        return with_ranks(spread, ranks) if ranks > 1 else spread
    except CatalogError as problem:
        raise UnsupportedRow(str(problem)) from None
