"""From the names that benchmarks print to catalog entries; and why a row cannot be predicted."""

from __future__ import annotations

import re

from fineserve_sim.catalog import CatalogError, GpuSpec, ModelSpec, PrecisionSpec, gpu, model, precision

_GPUS = {
    "h100_sxm": "h100-sxm",
    "h100": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "a100_sxm": "a100-80gb",
    "a100": "a100-80gb",
    "l40s": "l40s",
    "b200_sxm": "b200",
}
_SUFFIXES = re.compile(r"-(instruct|hf|fp8|awq|chat|v0\.\d)(?=-|$)")
_EXPERTS = re.compile(r"mixtral|deepseek|gpt-oss|minimax|kimi|glm-5|scout|maverick|-a\d+b")
_PRECISIONS = {
    "": "fp16",
    "bf16": "fp16",
    "fp16": "fp16",
    "bfloat16": "fp16",
    "fp8": "fp8-kv16",
    "fp8_block": "fp8-kv16",
    "int4_wo": "awq",
    "awq": "awq",
    "org": "fp16",
    "fp8_kv8": "fp8",
    "qoq": "qoq",
}


class UnsupportedRow(ValueError):
    """A row that no case can stand for; the text is the reason under which it is counted."""


def model_named(name: str) -> ModelSpec:
    """The catalog's model of a checkpoint name such as ``meta-llama/Llama-3.1-8B-Instruct``. Raises UnsupportedRow."""
    short = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    if _EXPERTS.search(short):
        raise UnsupportedRow("mixture of experts")
    try:
        return model(_SUFFIXES.sub("", short))
    except CatalogError:
        raise UnsupportedRow("model not in the catalog") from None


def gpu_named(name: str) -> GpuSpec:
    """Raises UnsupportedRow for a GPU that the catalog does not hold."""
    key = name.lower()
    if key not in _GPUS:
        raise UnsupportedRow(f"GPU {name} not in the catalog")
    return gpu(_GPUS[key])


def precision_named(name: str) -> PrecisionSpec:
    """The precision of a quantisation name; an empty one is 16-bit. Raises UnsupportedRow."""
    if name not in _PRECISIONS:
        raise UnsupportedRow(f"precision {name}")
    return precision(_PRECISIONS[name])
