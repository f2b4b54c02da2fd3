"""Static batches of vLLM 0.5.1 on one GPU: the profiles that Aegaeon (SOSP'25) schedules by.

That vLLM prefills whole prompts, as many as its token budget holds, before it decodes. A batch beyond the budget is prefilled
in groups. The first group's requests wait for the others before their second token, and the row's times are theirs. The host
time of the generation was fitted on ``FITTED_INPUTS``, which are not reported.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fineserve_evidence.validate.cases import Case, Label, MeasuredSet, Sensitivity, Serving, StaticBatch, with_serving
from fineserve_evidence.validate.rows import (
    UnsupportedRow,
    cases_of,
    check_positive,
    gpu_named,
    model_named,
    stem,
    supported,
)
from fineserve_sim.catalog import deployment, precision

COLUMNS = ("model", "gpu", "input_len", "batch", "prefill_s", "decode_s")
HOST = "vllm-0.5"
FITTED_MODEL, FITTED_INPUTS = "qwen2.5-7b", (16, 64, 256, 1024)
BUDGETS = {"h800": 8192}
"""Prompt tokens of one prefill by GPU, read off the rows: prefill times stop growing there."""
USUAL_BUDGET = 4096
OUTPUT_TOKENS = 10
"""The first token, and the nine tokens whose mean step is recorded."""


def fitted_on(frame: pd.DataFrame) -> pd.Series:
    """Mark the rows on which the host time of the generation was fitted."""
    named = frame.model.map(lambda name: FITTED_MODEL in _spelled(str(name)))
    return named & frame.input_len.isin(FITTED_INPUTS)


def read_aegaeon(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Make one case a row. Raises LayoutError when a number is not positive."""
    check_positive(frame, COLUMNS[2:], path)
    fitted = fitted_on(frame)
    records = frame[~fitted].to_dict("records")
    return MeasuredSet(
        stem(path),
        *cases_of(records, lambda row: _case(row, stem(path)), lambda row: ("vllm", str(row["model"]))),
        assumptions=(
            f"host time fitted on rows of {FITTED_MODEL} with input {', '.join(map(str, FITTED_INPUTS))}: {int(fitted.sum())} "
            "here, not reported",
            f"whole prompts, up to {USUAL_BUDGET} tokens a prefill and as many of context; "
            f"{', '.join(f'{budget} on {name}' for name, budget in BUDGETS.items())}; both read off the rows",
        ),
        sensitivities=(
            Sensitivity("token budget 2048", with_serving(token_budget=2048)),
            Sensitivity("16384", with_serving(token_budget=16384)),
        ),
        fitted=int(fitted.sum()),
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
