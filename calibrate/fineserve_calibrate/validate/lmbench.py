"""llm-d's LMBench runs (vLLM, April and May 2025): single requests at replicas of Llama-3.1-70B, or of 8B.

Its users hold conversations. The short-input runs name them; of the ShareGPT runs the lengths tell who asks again (``turns``).
A prompt begins with the one before it: not with the answer, since prompts are the same in all runs and answers are not.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from fineserve_calibrate.validate.cases import Case, Floats, Ints, Label, MeasuredSet, OpenLoop, Sensitivity, Serving
from fineserve_calibrate.validate.changes import (
    with_budget,
    with_one_run,
    with_replicas,
    with_tp,
    with_utilization,
    without_prefix_cache,
)
from fineserve_calibrate.validate.hosts import FRONT_END_S, SYNCHRONOUS_V1
from fineserve_calibrate.validate.names import UnsupportedRow, gpu_named, model_named
from fineserve_calibrate.validate.supported import supported
from fineserve_calibrate.validate.tables import check_positive, stem
from fineserve_calibrate.validate.turns import conversations
from fineserve_sim.catalog import precision

COLUMNS = (
    "config", "gpu", "scenario", "qps", "launch_s", "prompt_tokens", "generation_tokens", "ttft_s", "generation_s",
)  # fmt: skip
CONFIGURATION = re.compile(r"\w+-vllm-(?P<size>8b|70b)(-(?P<replicas>\d+)replicas)?")
MODELS = {"8b": ("llama-3.1-8b", 1), "70b": ("llama-3.1-70b", 2)}
"""Model and TP degree by the size in a configuration's name; the TP degree is not recorded."""
FITTED_CONFIGURATION, FITTED_SCENARIO, FITTED_QPS = "exp3-vllm-70b-2replicas", "short_input", 1.0
"""Its runs at up to this rate, where nobody waits, gave the time of the front end, and are not reported."""
COMPLETE = 0.9
"""A run with a smaller part of its stated rate was broken off: requests that loaded the engines are not recorded."""


def read_lmbench(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """One case a run (configuration, scenario, rate); its rows are requests."""
    cases, unsupported, fitted = [], Counter[tuple[str, str, str]](), 0
    for (config, scenario, qps), rows in frame.groupby(["config", "scenario", "qps"], sort=False):
        try:
            case = _case(str(config), str(scenario), float(str(qps)), rows, path)
        except UnsupportedRow as reason:
            unsupported["vllm", str(config), str(reason)] += len(rows)
            continue
        if (config, scenario) == (FITTED_CONFIGURATION, FITTED_SCENARIO) and float(str(qps)) <= FITTED_QPS:
            fitted += len(rows)
        else:
            cases.append(case)
    return MeasuredSet(
        stem(path),
        tuple(cases),
        unsupported,
        assumptions=(
            "70B at TP 2, 8B at TP 1, 16-bit, replicas in turn; token budget 2048; memory utilization 0.9 (vLLM's default); "
            "prefix cache as vLLM 0.8 has by default",
            f"{FRONT_END_S * 1e3:g} ms before the engine sees a request, fitted on the short-input runs of "
            f"{FITTED_CONFIGURATION} at up to {FITTED_QPS:g} requests/s ({fitted} rows here, not reported)",
            "ShareGPT runs: who asks again is read off the lengths of prompts and answers",
            "a request's time is its mean over the moments of a step at which it may come",
        ),
        sensitivities=(
            Sensitivity("one run, requests at the recorded times", with_one_run),
            Sensitivity("no prefix cache", without_prefix_cache),
            Sensitivity("TP 4 a replica", with_tp(4)),
            Sensitivity("GPU memory utilization 0.95", with_utilization(0.95)),
            Sensitivity("GPU memory utilization 0.95, one replica", with_replicas(1, 0.95)),
            Sensitivity("token budget 8192", with_budget(8192)),
        ),
        shares_prefixes=True,
        kind="fitted on part of the set" if fitted else "prediction",
    )


def _case(config: str, scenario: str, qps: float, rows: pd.DataFrame, path: Path) -> Case:
    if "scout" in config:
        raise UnsupportedRow("mixture of experts")
    found = CONFIGURATION.fullmatch(config)
    if found is None:
        raise UnsupportedRow("not plain vLLM replicas of Llama-3.1 8B or 70B")
    name, tp = MODELS[found["size"]]
    rows = rows.sort_values("launch_s", kind="stable")
    check_positive(rows, ("prompt_tokens", "generation_tokens", "ttft_s"), path)
    if (len(rows) - 1) < COMPLETE * qps * np.ptp(rows.launch_s.to_numpy(np.float64)):
        raise UnsupportedRow("broken off: requests that were sent are not recorded")
    n, outputs = len(rows), rows.generation_tokens.to_numpy(np.int64)
    load = OpenLoop(
        arrival_s=rows.launch_s.to_numpy(np.float64),
        model=np.zeros(n, dtype=np.int64),
        prompt_tokens=rows.prompt_tokens.to_numpy(np.int64),
        output_tokens=outputs,
        replicas=int(found["replicas"] or 1),
        conversation=_conversations(rows),
    )
    served = model_named(name)
    device = gpu_named(str(rows.gpu.iloc[0]))
    engine = Serving(served, precision("fp16"), tp, device, SYNCHRONOUS_V1, 2048, 256, front_end_s=FRONT_END_S)
    label = Label(f"{stem(path)}, {scenario}", "vllm", served.name, "W16A16", tp)
    return Case(
        label, supported(engine), load, rows.ttft_s.to_numpy(np.float64), _per_token(rows.generation_s, outputs)
    )


def _conversations(rows: pd.DataFrame) -> Ints:
    """Who asks, by name where the rows have one, else by the lengths; rows come in order of arrival."""
    if "user_id" in rows and rows.user_id.notna().all():
        return pd.factorize(rows.user_id)[0].astype(np.int64)
    return conversations(rows.prompt_tokens.to_numpy(np.int64), rows.generation_tokens.to_numpy(np.int64))


def _per_token(seconds: pd.Series, outputs: Ints) -> Floats:
    gaps = np.where(outputs > 1, outputs - 1, np.nan)
    result: Floats = seconds.to_numpy(np.float64) / gaps
    return result
