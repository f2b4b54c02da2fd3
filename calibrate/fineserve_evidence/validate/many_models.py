"""NVIDIA's measurements of GPU sharing: Qwen3-4B in BF16 under vLLM on an A100-40GB, alone and two on a GPU.

Source: the documentation of Dynamo, "Interpreting GPU Sharing Results" (ai-dynamo/dynamo, November 2026, Apache-2.0). AIPerf
sends 2,048 prompt tokens and asks for 256, without deviation. So many clients of each model wait for their answers. They send
at most 16 requests, two each, before max(40, 10 clients) that are measured. The rows are figures of a GPU: output tokens a
second, and medians of TTFT and of the time between tokens.

The token budget of these engines is not recorded. Every row is predicted at both budgets that vLLM has had as its default.
The first two rows with one model have a TTFT below what the prompt takes of the GPU's compute, so their prompts were cached;
their TTFT is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fineserve_evidence.validate.cases import Case, Label, MeasuredSet, Serving, SharedLoop
from fineserve_evidence.validate.front_end import HTTP
from fineserve_evidence.validate.rows import UnsupportedRow, cases_of, check_positive, stem, supported
from fineserve_sim.catalog import deployment, gpu, model, precision

FILE = Path(__file__).parent / "nvidia_many_models_a100.csv"
COLUMNS = (
    "configuration", "models", "clients", "tokens_per_s", "ttft_p50_s", "itl_p50_s",
)  # fmt: skip
PROMPT_TOKENS, OUTPUT_TOKENS, MAX_SEQUENCES = 2048, 256, 32
BUDGETS = (2048, 8192)
UTILIZATION = 0.85
CACHED_BELOW_S = 0.053
"""What 2,048 tokens of Qwen3-4B take of 312 TFLOP/s: a TTFT below it was not computed."""
HOST = "vllm-cudagraph"


class Mode(NamedTuple):
    """A way of sharing: its name for people, the law of the engines' pace, and the part of the SMs that each may take."""

    title: str
    law: str
    sm_share: float = 1.0


MODES = {
    "baseline": Mode("alone", "fluid"),
    "time_slice": Mode("time slices", "time_slice"),
    "mps_50": Mode("MPS 50 %", "mps", 0.5),
}


def read_many_models(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Make a case of each row at each token budget. Raises LayoutError when a number is not positive."""
    check_positive(frame, COLUMNS[1:], path)
    wanted = [(row, budget) for budget in BUDGETS for row in frame.to_dict("records")]
    cases, unsupported = cases_of(
        wanted, lambda each: _case(*each, stem(path)), lambda each: ("vllm", str(each[0]["configuration"]))
    )
    return MeasuredSet(
        stem(path),
        cases,
        unsupported,
        assumptions=(
            f"token budget not recorded: {' and '.join(map(str, BUDGETS))}, vLLM's defaults; at most {MAX_SEQUENCES} sequences",
            f"memory utilization {UTILIZATION}, over the models of a GPU; it never binds",
            "TTFT below the GPU's peak is that of cached prompts, and left out",
        ),
    )


def load_of(configuration: str, models: int, clients: int) -> SharedLoop:
    """The load of a row. Raises UnsupportedRow for a configuration that is not known."""
    if configuration not in MODES:
        raise UnsupportedRow(f"configuration {configuration}")
    mode, warmup = MODES[configuration], min(16, 2 * clients)
    requests = warmup + max(40, 10 * clients)
    return SharedLoop(clients, requests, warmup, PROMPT_TOKENS, OUTPUT_TOKENS, models, mode.law, mode.sm_share)


def _case(row: dict[Any, Any], token_budget: int, name: str) -> Case:
    configuration, models = str(row["configuration"]), int(row["models"])
    load = load_of(configuration, models, int(row["clients"]))
    serving = supported(
        Serving(
            *(model("qwen3-4b"), precision("fp16"), 1, gpu("a100-40gb"), deployment(HOST), token_budget, MAX_SEQUENCES),
            memory_utilization=UTILIZATION / models,
            api=HTTP,
        )
    )
    label = Label(f"{name}, {MODES[configuration].title}, budget {token_budget}", "vllm", "qwen3-4b", "W16A16", 1)
    ttft_s = float(row["ttft_p50_s"])
    return Case(
        label,
        serving,
        load,
        np.array([ttft_s if ttft_s >= CACHED_BELOW_S else np.nan]),
        np.array([float(row["itl_p50_s"])]),
        throughput_per_s=np.array([float(row["tokens_per_s"]) / OUTPUT_TOKENS]),
    )
