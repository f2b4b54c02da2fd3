"""From the names that benchmarks print to catalog entries; and why a row cannot be predicted."""

from __future__ import annotations

import re

from fineserve_sim.catalog import CatalogError, GpuSpec, ModelSpec, PrecisionSpec, gpu, model, precision

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
