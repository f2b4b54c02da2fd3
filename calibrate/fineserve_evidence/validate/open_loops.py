"""Sets with open arrivals at one model: BLIS (means of long runs), its residency runs and DistServe (single requests)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from fineserve_traces import arrivals
from numpy.typing import NDArray

from fineserve_evidence.validate.cases import (
    SEED,
    Apart,
    Case,
    Label,
    MeasuredSet,
    OpenLoop,
    Sensitivity,
    Serving,
    blocks_of_conversations,
    with_load,
    with_serving,
    without_prefix_cache,
)
from fineserve_evidence.validate.front_end import HTTP
from fineserve_evidence.validate.rows import HIDDEN, STEPS_AHEAD, cases_of, check_positive, model_named, stem, supported
from fineserve_sim.catalog import deployment, gpu, precision

BLIS_COLUMNS = (
    "model", "tp", "gt_requests", "gt_ttft_ms", "gt_e2e_ms", "gt_arrival_rate_rps", "gt_input_mean", "gt_output_mean",
)  # fmt: skip
BLIS_REQUESTS = 2000
"""Requests simulated of each run of thousands. The means have settled by then."""
BLIS_PROMPTS = 44
"""Different prompts of a run, in turn. inference-perf's shared-prefix load draws the questions of all users once. Each user
asks the same again (11 groups of 4 users in its code generation profile)."""
BLIS_SEQUENCES = 128

SERVER_TOKENS = 0.963
"""Tokens that the server counted for each word of a prompt. The client draws a word for each token that is asked for. Source:
``server_input_tokens`` of trace.csv, 1T_agg_2rps/vanilla, its first 91 requests."""
RESIDENCY_COLUMNS = ("tenant_id", "ttft_ms", "tpot_ms", "e2e_ms", "num_input_tokens", "num_output_tokens", "start_time")
RESIDENCY_BUDGET, RESIDENCY_SEQUENCES = 8192, 256
RESIDENCY_S, RESIDENCY_CLIENTS = 600.0, 256
"""Seconds in which requests of a run are due, and the connections of its client: six runs have 263 to 270 requests under way,
for 94 to 99 % of their time 250 and more, and no other has over 92."""
STOCK, PATCHED_FACTOR = "vanilla", 1.01
"""The runs on a server as released, by their names; the others' server was patched, which takes about 1 %. Source: the study's
repository."""
FITTED_RATE = 1.0
APART = "distserve-c21d11"
"""DistServe's runs whose degrees are in their name: context at TP 2, decoding at TP 1."""
DISTSERVE_COLUMNS = ("system", "rate", "run_requests", "issue_s", "prompt_len", "output_len", "ttft_ms", "tpot_ms")


def read_blis(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Read one case a row: evenly spaced arrivals at the measured rate, all requests of mean length.

    TPOT is (E2E - TTFT) / (output - 1): the set's ITL column holds half of it. Prompts recur, and vLLM's prefix cache has them.

    The engines' settings and the load generator: inference-sim/inference-sim hypotheses/h-stepml/problem.md @ 2b8e42ccd1ad
    (vLLM 0.15.1, 2,048 batched tokens, 128 sequences, prefix caching) and its profiles of inference-perf.
    """
    check_positive(frame, BLIS_COLUMNS[1:], path)
    return MeasuredSet(
        stem(path),
        *cases_of(
            frame.to_dict("records"), lambda row: _blis_case(row, stem(path)), lambda row: ("vllm", row["model"])
        ),
        assumptions=(
            f"evenly spaced arrivals at the mean rate (the runs had two rates, not recorded), first {BLIS_REQUESTS} "
            f"requests, mean lengths, 16-bit, token budget 2048, {BLIS_SEQUENCES} sequences",
            f"{BLIS_PROMPTS} prompts in turn: from the second time on, all of one but its last block is in the prefix cache",
            f"{HTTP}; steps are scheduled one ahead (vLLM 0.15)",
        ),
        sensitivities=(
            Sensitivity("no prompt is cached", without_prefix_cache),
            Sensitivity("Poisson arrivals", _poisson),
            Sensitivity("no step scheduled ahead", with_serving(steps_ahead=0)),
            Sensitivity("token budget 8192", with_serving(token_budget=8192)),
        ),
        shares_prefixes=True,
    )


def _poisson(case: Case) -> Case:
    """Arrivals at random, at the same mean rate."""
    assert isinstance(case.load, OpenLoop)
    times = case.load.arrival_s
    rate_per_s = (len(times) - 1) / float(times[-1] - times[0])
    return with_load(OpenLoop, arrival_s=arrivals.poisson(np.random.default_rng(SEED), rate_per_s, len(times)))(case)


def _blis_case(row: dict[Any, Any], name: str) -> Case:
    tp, served = int(row["tp"]), model_named(row["model"])
    n = min(BLIS_REQUESTS, int(row["gt_requests"]))
    prompts = np.full(n, round(row["gt_input_mean"]))
    load = OpenLoop(
        arrival_s=np.arange(n) / row["gt_arrival_rate_rps"],
        model=np.zeros(n, dtype=np.int64),
        prompt_tokens=prompts,
        output_tokens=np.full(n, round(row["gt_output_mean"])),
        each=False,
        blocks=blocks_of_conversations(np.arange(n) % BLIS_PROMPTS, prompts),
    )
    host, device = deployment("vllm-cudagraph"), gpu("h100-sxm")
    engine = Serving(
        served,
        precision("fp16"),
        tp,
        device,
        host,
        2048,
        BLIS_SEQUENCES,
        api=HTTP,
        steps_ahead=STEPS_AHEAD,
    )
    later = row["gt_output_mean"] - 1 if row["gt_output_mean"] > 1 else np.nan
    tpot_s = (row["gt_e2e_ms"] - row["gt_ttft_ms"]) / later / 1e3
    label = Label(name, "vllm", str(row["model"]), "W16A16", tp)
    return Case(label, supported(engine), load, np.array([row["gt_ttft_ms"] / 1e3]), np.array([tpot_s]))


def _most_under_way(sent_s: NDArray[np.float64], took_s: NDArray[np.float64]) -> int:
    """The largest number of requests that are sent and not answered at one time."""
    ends_s = np.sort(sent_s + took_s)
    return int(np.max(np.arange(1, len(sent_s) + 1) - np.searchsorted(ends_s, sent_s, side="right")))


def read_residency(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Read a run of BLIS' residency study as one case, a row a request: Qwen3-14B on one H100 under vLLM 0.23.

    The engine's settings are recorded (``server_config.json`` of inference-sim/residency-vllm @ 2641b57). Prompts are random,
    so that none begin alike.
    """
    check_positive(frame, RESIDENCY_COLUMNS[1:-1], path)
    rows = frame.sort_values("start_time", kind="stable")
    prompts, outputs = (rows[name].to_numpy(np.int64) for name in ("num_input_tokens", "num_output_tokens"))
    sent_s = rows["start_time"].to_numpy(np.float64)
    serving = Serving(
        model_named("qwen3-14b"),
        precision("fp16"),
        1,
        gpu("h100-sxm"),
        deployment(HIDDEN),
        RESIDENCY_BUDGET,
        RESIDENCY_SEQUENCES,
        api=HTTP,
        steps_ahead=STEPS_AHEAD,
        step_time_factor=1.0 if STOCK in stem(path) else PATCHED_FACTOR,
    )
    counted = np.rint(SERVER_TOKENS * prompts).astype(np.int64)
    load = OpenLoop(sent_s - sent_s[0], np.zeros(len(rows), dtype=np.int64), counted, outputs)
    if _most_under_way(sent_s, rows["e2e_ms"].to_numpy(np.float64) / 1e3) >= RESIDENCY_CLIENTS:
        due_s = arrivals.poisson(np.random.default_rng(SEED), len(rows) / RESIDENCY_S, len(rows))
        load = replace(load, arrival_s=due_s, most_under_way=RESIDENCY_CLIENTS, phases=1)
    ttft_s, tpot_s = (rows[name].to_numpy(np.float64) / 1e3 for name in ("ttft_ms", "tpot_ms"))
    label = Label(stem(path), "vllm", "qwen3-14b", "W16A16", 1)
    return MeasuredSet(
        stem(path),
        (Case(label, supported(serving), load, ttft_s, np.where(outputs > 1, tpot_s, np.nan)),),
        assumptions=(
            f"settings as recorded: token budget {RESIDENCY_BUDGET}, {RESIDENCY_SEQUENCES} sequences; steps are one ahead",
            f"a server that is not {STOCK} takes {PATCHED_FACTOR - 1:.0%} more",
            f"{HTTP}; prompts of {SERVER_TOKENS:g} tokens for each that was asked for, as the server counted",
            f"the client has {RESIDENCY_CLIENTS} connections: where they are all taken, requests are due as a Poisson process "
            "of the run's rate, and wait with the client",
        ),
        sensitivities=(Sensitivity("no step scheduled ahead", with_serving(steps_ahead=0)),),
    )


def read_distserve(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Read the requests of runs of OPT-13B on A100: vLLM's on one, and DistServe's, where two prefill and one decodes.

    The host time of vLLM's first generation was fitted on the run at ``FITTED_RATE``, which is not reported.
    """
    cases, unsupported, fitted = [], Counter[tuple[str, str, str]](), 0
    for (system, rate, _), rows in frame.groupby(["system", "rate", "run_requests"], sort=False):
        if system == "vllm" and rate == FITTED_RATE:
            fitted += len(rows)
        elif system in ("vllm", APART):
            cases.append(_distserve_case(rows.sort_values("issue_s", kind="stable"), path, str(system)))
        else:
            reason = "TP degrees of the engines not recorded" if system == "distserve" else "pipeline"
            unsupported[str(system), "opt-13b", reason] += len(rows)
    return MeasuredSet(
        stem(path),
        tuple(cases),
        unsupported,
        assumptions=(
            "TP 1, 16-bit, token budget 2048 (whole prompts of vLLM 0.2-0.3 read as chunks); 256 sequences",
            f"{APART}: prompts at TP 2, decodes at TP 1, KV over the links of a node; host time and kernels of vLLM",
            f"host time fitted on the run at {FITTED_RATE:g} requests/s ({fitted} rows, not reported)",
        ),
        sensitivities=(Sensitivity("token budget 512", with_serving(token_budget=512)),),
        fitted=fitted,
    )


def _distserve_case(rows: pd.DataFrame, path: Path, system: str) -> Case:
    check_positive(rows, ("prompt_len", "output_len", "ttft_ms"), path)
    n, outputs = len(rows), rows.output_len.to_numpy(np.int64)
    load = OpenLoop(
        rows.issue_s.to_numpy(np.float64), np.zeros(n, dtype=np.int64), rows.prompt_len.to_numpy(np.int64), outputs
    )
    host, device = deployment("vllm-v0"), gpu("a100-80gb")
    serving = Serving(model_named("opt-13b"), precision("fp16"), 1, device, host, 2048, 256, api=HTTP)
    tpot_s = np.where(outputs > 1, rows.tpot_ms.to_numpy(np.float64) / 1e3, np.nan)
    label = Label(stem(path), system, "opt-13b", "W16A16", 1)
    case = Case(label, serving, load, rows.ttft_ms.to_numpy(np.float64) / 1e3, tpot_s)
    if system != APART:
        return case
    return replace(case, serving=replace(serving, tp=2), apart=Apart(1, 1, serving, nodes=False))
