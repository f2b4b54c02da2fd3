"""Static batches of vLLM 0.5.1 on one GPU: the profiles that Aegaeon (SOSP'25) schedules by.

That vLLM prefills whole prompts, as many as its token budget holds, before it decodes. So a batch beyond the budget is
prefilled in groups, and the first group's requests wait for the others before their second token: its times are the row's.
The host time of the generation was fitted on ``FITTED_INPUTS``, which are not reported.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fineserve_evidence.validate.cases import Case, Label, MeasuredSet, Sensitivity, Serving, StaticBatch, with_budget
from fineserve_evidence.validate.rows import UnsupportedRow, check_positive, gpu_named, model_named, stem, supported
from fineserve_sim.catalog import deployment, precision

COLUMNS = ("model", "gpu", "input_len", "batch", "prefill_s", "decode_s")
HOST = "vllm-0.5"
FITTED_MODEL, FITTED_INPUTS = "qwen2.5-7b", (16, 64, 256, 1024)
BUDGETS = {"h800": 8192}
"""Prompt tokens of one prefill by GPU, read off the rows: prefill times stop growing there."""
USUAL_BUDGET = 4096
OUTPUT_TOKENS = 10
"""The first token, and the nine whose mean step is recorded."""


def fitted_on(frame: pd.DataFrame) -> pd.Series:
    """Which rows the host time of the generation was fitted on."""
    named = frame.model.map(lambda name: FITTED_MODEL in _spelled(str(name)))
    return named & frame.input_len.isin(FITTED_INPUTS)


def read_aegaeon(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """One case a row. Raises LayoutError when a number is not positive."""
    check_positive(frame, COLUMNS[2:], path)
    fitted = fitted_on(frame)
    cases, unsupported = [], Counter[tuple[str, str, str]]()
    for row in frame[~fitted].to_dict("records"):
        try:
            cases.append(_case(row, stem(path)))
        except UnsupportedRow as reason:
            unsupported["vllm", str(row["model"]), str(reason)] += 1
    return MeasuredSet(
        stem(path),
        tuple(cases),
        unsupported,
        assumptions=(
            f"host time fitted on rows of {FITTED_MODEL} with input {', '.join(map(str, FITTED_INPUTS))}: {int(fitted.sum())} "
            "here, not reported",
            f"whole prompts, up to {USUAL_BUDGET} tokens a prefill and as many of context; "
            f"{', '.join(f'{budget} on {name}' for name, budget in BUDGETS.items())}; both read off the rows",
        ),
        sensitivities=(Sensitivity("token budget 2048", with_budget(2048)), Sensitivity("16384", with_budget(16384))),
        kind="fitted on part of the set" if fitted.any() else "prediction",
    )


def _spelled(name: str) -> str:
    """``qwen2_5_7b`` as checkpoints are named."""
    return re.sub(r"(\d)_(\d+)_(?=\d+b)", r"\1.\2-", name)


def _case(row: dict[Any, Any], name: str) -> Case:
    served, device, tp = model_named(_spelled(str(row["model"]))), gpu_named(str(row["gpu"])), int(row.get("tp", 1))
    budget = BUDGETS.get(device.name, USUAL_BUDGET)
    prompt = int(row["input_len"])
    if prompt + OUTPUT_TOKENS > budget:
        raise UnsupportedRow(f"a prompt of {prompt} tokens leaves no output within {budget} tokens of context")
    serving = supported(Serving(served, precision("fp16"), tp, device, deployment(HOST), budget, 256))
    label = Label(f"{name}, {device.name}", "vllm", served.name, "W16A16", tp)
    load = StaticBatch(int(row["batch"]), prompt, OUTPUT_TOKENS, whole_prompts=True)
    return Case(label, serving, load, np.array([row["prefill_s"]]), np.array([row["decode_s"]]))
