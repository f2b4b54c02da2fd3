"""LLMServingSim's bench runs of real vLLM: a row a request, and what the engine was told in a ``_meta.json`` beside it.

``RTXPRO6000_Qwen3-32B_requests.jsonl.gz`` has its GPU in its name, and ``RTXPRO6000_Qwen3-32B_meta.json`` beside it. That names
the workload, whose tokens tell which prompts begin alike. Times are the server's own: TTFT is the first token's less that of
queueing. The engines cached prefixes. Source: casys-kaist/LLMServingSim @ 5daddb2.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fineserve_evidence.validate.cases import (
    BLOCK_TOKENS,
    Blocks,
    Case,
    Label,
    MeasuredSet,
    OpenLoop,
    Sensitivity,
    Serving,
    with_serving,
    without_prefix_cache,
)
from fineserve_evidence.validate.predict import kv_bytes
from fineserve_evidence.validate.rows import (
    HIDDEN,
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
ENDING, KV_TOKENS, WORKLOAD = "_requests.jsonl.gz", "num_kv_tokens", "dataset_path"
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
            "parallel; prompts begin alike where the workload's tokens do, and a preempted request finds its own blocks",
            f"{MEMORY_UTILIZATION:g} of the GPU's memory (vLLM's default), or KV as recorded; steps are scheduled one ahead "
            "(vLLM 0.19)",
        ),
        sensitivities=(
            Sensitivity("no step scheduled ahead", with_serving(steps_ahead=0)),
            Sensitivity("no prefix cache", without_prefix_cache),
        ),
        shares_prefixes=True,
    )


def _told(path: Path) -> Mapping[str, Any]:
    """The engine's arguments, and the tokens of its KV cache where they are known (``KV_TOKENS``). Raises LayoutError where
    they are not beside the requests."""
    beside = path.with_name(path.name.removesuffix(ENDING) + "_meta.json")
    try:
        meta: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        told: dict[str, Any] = meta["engine_kwargs"] | {KV_TOKENS: meta.get("kv_cache", {}).get(KV_TOKENS)}
        told[WORKLOAD] = meta[WORKLOAD]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise LayoutError(f"{beside}: expected engine_kwargs and {WORKLOAD} of {path.name} ({problem})") from None
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
        deployment(HIDDEN),
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
    prompts_of = dict(zip(rows.request_id, prompts.tolist(), strict=True))
    found = _prompts(path.with_name(Path(told[WORKLOAD]).name + ".gz"), prompts_of)
    load = OpenLoop(
        queued_s - queued_s[0],
        np.zeros(len(rows), dtype=np.int64),
        prompts,
        outputs,
        replicas=ranks,
        blocks=_blocks(found, outputs.tolist()),
    )
    tpot_s = (last_s - first_s) / np.where(outputs > 1, outputs - 1, np.nan)
    label = Label(stem(path), "vllm", str(told["model"]), "W16A16", tp)
    return Case(label, supported(serving), load, first_s - queued_s, tpot_s)


def _prompts(workload: Path, lengths: Mapping[str, int]) -> list[list[int]]:
    """The tokens of the prompts of these requests: ``bench-7`` is the eighth of the workload. Raises LayoutError where they
    are not as long."""
    try:
        with gzip.open(workload, "rt", encoding="utf-8") as lines:
            prompts = [json.loads(line)["input_tok_ids"] for line in lines]
        found = [prompts[int(name.removeprefix("bench-"))] for name in lengths]
    except (OSError, ValueError, LookupError, TypeError) as problem:
        raise LayoutError(f"{workload}: expected JSON lines with input_tok_ids, one a request ({problem})") from None
    if [*map(len, found)] != [*lengths.values()]:
        raise LayoutError(f"{workload}: expected prompts as long as the requests of the run record")
    return found


def _blocks(prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> Blocks:
    """Name the blocks of each request. Prompts share the blocks with which they begin alike; outputs are each request's own."""
    names: dict[tuple[int, tuple[int, ...]], int] = {}
    named: list[tuple[int, ...]] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        own = [0]
        for start in range(0, len(prompt) + output - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            tokens = tuple(prompt[start : start + BLOCK_TOKENS])
            key = (own[-1], tokens if len(tokens) == BLOCK_TOKENS else (-len(named),))
            own.append(names.setdefault(key, len(names) + 1))
        named.append(tuple(own[1:]))
    return tuple(named)


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
