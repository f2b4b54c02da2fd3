"""From the rows of a measured file to catalog entries: columns checked, benchmarks' names resolved, settings supported.

The numbers around an engine's steps are stated here once, for every set that was measured through an HTTP server. No set had
a say in them but LMBench's idle runs, which are not reported.
"""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from fineserve_evidence.validate.cases import Serving
from fineserve_evidence.validate.predict import block_bytes, kv_bytes
from fineserve_sim.catalog import (
    CatalogError,
    GpuSpec,
    ModelSpec,
    PrecisionSpec,
    check_tp,
    deployment,
    gpu,
    model,
    precision,
)
from fineserve_sim.latency.rates import resolve


class LayoutError(ValueError):
    """A file whose columns are none of the known layouts, or whose values cannot be read; one line."""


def read_columns(path: Path) -> pd.DataFrame:
    """The file as a frame. Raises LayoutError when it is no readable CSV."""
    try:
        return pd.read_csv(path)
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise LayoutError(f"{path}: not a readable CSV file ({error})") from error


def check_positive(frame: pd.DataFrame, columns: tuple[str, ...], path: Path, may_miss: tuple[str, ...] = ()) -> None:
    """Raises LayoutError naming file, row and column of the first value that is not a number above zero. Columns in
    ``may_miss`` may have empty fields: a row without that measurement."""
    for column in columns:
        numbers = pd.to_numeric(frame[column], errors="coerce")
        bad = ~(numbers > 0)
        if column in may_miss:
            bad &= frame[column].notna()
        if bad.any():
            row = int(bad.to_numpy().argmax())
            place = f"row {frame.index[row] + 1}, column {column}"
            raise LayoutError(f"{path}, {place}: {frame[column].iloc[row]} is no number above 0")


def stem(path: Path) -> str:
    """The file's name up to its first dot: the name of its set."""
    return path.name.split(".")[0]


_GPUS = {
    "h100_sxm": "h100-sxm",
    "h100": "h100-sxm",
    "nvidia h100 80gb hbm3": "h100-sxm",
    "h100_pcie": "h100-pcie",
    "h200_sxm": "h200-sxm",
    "h200": "h200-sxm",
    "h800": "h800",
    "a100_sxm": "a100-80gb",
    "a100": "a100-80gb",
    "a800": "a800",
    "l40s": "l40s",
    "b200_sxm": "b200",
    "b200": "b200",
}
_SUFFIXES = re.compile(
    r"-(instruct|chat|it|base|hf|bf16|fp16|fp8|fp8_kv8|dynamic|block|awq|gptq|int4|w4a16|w8a8|quantized|v\d\.\d|\d{4})(?=[-.]|$)"
)
_FAMILY = re.compile(r"^(llama|qwen|yi|opt|mistral)-?(?=\d)")
"""``llama3.1-8b`` and ``qwen-2.5-14b`` as the catalog spells them: Llama, Yi, OPT and Mistral with a dash, Qwen without."""
_EXPERTS = re.compile(r"mixtral|deepseek|gpt-oss|minimax|kimi|glm-|scout|maverick|dbrx|grok|-\d*a\d+b|\d+x\d+b")
_PRECISIONS = {
    "": "fp16",
    "bf16": "fp16",
    "fp16": "fp16",
    "float16": "fp16",
    "bfloat16": "fp16",
    "fp8": "fp8-kv16",
    "fp8_block": "fp8-kv16",
    "fp8_static": "fp8-kv16",
    "fp8_dynamic": "fp8-kv16",
    "fp8_ootb": "fp8-kv16",
    "w8a8": "fp8-kv16",
    "int4_wo": "awq",
    "w4a16": "awq",
    "awq": "awq",
    "int4_awq": "awq",
    "w4a16_awq": "awq",
    "org": "fp16",
    "fp8_kv8": "fp8",
    "qoq": "qoq",
}


class UnsupportedRow(ValueError):
    """A row that no case can stand for; the text is the reason under which it is counted."""


def model_named(name: str) -> ModelSpec:
    """The catalog's model of a checkpoint name such as ``meta-llama/Llama-3.1-8B-Instruct``. Raises UnsupportedRow."""
    short = str(name).rsplit("/", 1)[-1].lower().replace("_", "-").removeprefix("meta-")
    if _EXPERTS.search(short):
        raise UnsupportedRow("mixture of experts")
    plain = _FAMILY.sub(lambda found: found[1] if found[1] == "qwen" else f"{found[1]}-", _SUFFIXES.sub("", short))
    try:
        return model(plain)
    except CatalogError:
        raise UnsupportedRow("model not in the catalog") from None


def gpu_named(name: str) -> GpuSpec:
    """Raises UnsupportedRow for a GPU that the catalog does not hold."""
    key = str(name).lower()
    try:
        return gpu(_GPUS.get(key, key))
    except CatalogError:
        raise UnsupportedRow(f"GPU {name} not in the catalog") from None


def precision_named(name: str) -> PrecisionSpec:
    """The precision of a quantisation name; an empty one is 16-bit. Raises UnsupportedRow."""
    try:
        return precision(_PRECISIONS.get(str(name).lower(), str(name)))
    except CatalogError:
        raise UnsupportedRow(f"precision {name}") from None


def supported(serving: Serving) -> Serving:
    """``serving`` itself. Raises UnsupportedRow when the model does not split over its TP degree, does not fit into the GPU's
    memory, or its precision, TP degree or deployment has no rates there."""
    try:
        check_tp(serving.model, serving.tp)
        resolve(serving.gpu, serving.precision, serving.tp)
        serving.deployment.floor(serving.precision.name)
    except (CatalogError, ValueError) as error:
        raise UnsupportedRow(str(error)) from None
    if kv_bytes(serving) < block_bytes(serving):
        raise UnsupportedRow(f"does not fit into the memory of {serving.gpu.name} at TP {serving.tp}")
    return serving


FRONT_END_S = 0.0089
"""HTTP, tokenizer and, in LMBench, a gateway: median of what TTFT exceeds the engine's in LMBench's runs at up to
``lmbench.FITTED_QPS``, where nobody waits."""

SYNCHRONOUS_V1 = deployment("vllm-v1")
"""vLLM V1 with CUDA graphs before it scheduled a step ahead by default (0.8 to 0.13): scheduling, input copies and sampling
lie between two steps."""

STEPS_AHEAD = 1
"""Of vLLM from 0.14 on: while a step runs the next is scheduled, and a request that comes meanwhile is in the one after."""
