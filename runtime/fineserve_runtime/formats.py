"""The quantisation formats that are served: each was run against a de-quantised reference and agreed.

vLLM takes more than it gets right: some formats fail late, some are ignored without a word, some give wrong tokens. So
everything that is not on the list is refused before an engine starts (docs/runtime.md says what was tried).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

KV_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
DTYPES = ("auto", "bfloat16", "float16", "float32")
_GOOD = "unquantised, awq (4 bits), gptq (4 bits), compressed-tensors W4A16, W8A8 INT8 or FP8"


def check_format(config: Mapping[str, Any], dtype: str, kv_cache_dtype: str, quantization: str | None = None) -> None:
    """Raise ValueError, one sentence, unless the model of this ``config.json`` runs right with these types. ``quantization``
    is the user's wish, which can only name the checkpoint's own format."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not served; known good are {', '.join(DTYPES)}")
    if kv_cache_dtype not in KV_DTYPES:
        raise ValueError(f"kv_cache_dtype {kv_cache_dtype!r} is not served; known good are {', '.join(KV_DTYPES)}")
    stored = config.get("torch_dtype") or config.get("dtype")
    if kv_cache_dtype == "bfloat16" and (dtype == "float32" or (dtype == "auto" and stored == "float32")):
        raise ValueError("a float32 model with a bfloat16 KV cache gives wrong tokens; use kv_cache_dtype auto")
    quantized = config.get("quantization_config") or {}
    if quantization not in (None, quantized.get("quant_method")):
        stored = quantized.get("quant_method") or "unquantised"
        raise ValueError(
            f"quantization {quantization!r} is not served for a checkpoint that is {stored}; known good: {_GOOD}"
        )
    if quantized:
        _check_weights(quantized)


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest sequence that vLLM lets this model have; None where its config.json does not say."""
    text = config.get("text_config", config)
    given = [text[key] for key in _LENGTHS if isinstance(text.get(key), int)]
    if not given:
        return None
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    factor = scaling.get("factor") or 1.0 if kind in ("linear", "dynamic", "ntk") else 1.0
    return max(int(min(given) * factor), text.get("model_max_length") or 0)


_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


def parser_names() -> tuple[str, ...]:
    """The names of vLLM's tool parsers, read from its source: to import it takes ten seconds. None where it is not found."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return ()
    try:
        source = (Path(vllm.origin).parent / "tool_parsers" / "__init__.py").read_text(encoding="utf-8")
    except OSError:
        return ()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_TOOL_PARSERS_TO_REGISTER":
            return tuple(ast.literal_eval(node.value))
    return ()


def _check_weights(quantized: Mapping[str, Any]) -> None:
    method = quantized.get("quant_method")
    if method in ("awq", "gptq"):
        bits = quantized.get("bits", quantized.get("w_bit"))
        if bits != 4:
            raise ValueError(f"{method} weights of {bits} bits are not served; known good: {_GOOD}")
    elif method == "compressed-tensors":
        for group in (quantized.get("config_groups") or {}).values():
            _check_group(group)
    else:
        raise ValueError(f"quantisation {method!r} is not served; known good: {_GOOD}")


def _check_group(group: Mapping[str, Any]) -> None:
    """One group of layers: 4-bit integer weights alone, or 8-bit weights and activations of one type."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    scheme = (weights.get("type"), weights.get("num_bits"), inputs and (inputs.get("type"), inputs.get("num_bits")))
    good = (("int", 4, None), ("int", 8, ("int", 8)), ("float", 8, ("float", 8)))
    if scheme not in good:
        kind, bits, activations = scheme
        taken = "16-bit" if not activations else f"{activations[0]}{activations[1]}"
        raise ValueError(
            f"compressed-tensors weights {kind}{bits} with {taken} activations are not served; known good: {_GOOD}"
        )
