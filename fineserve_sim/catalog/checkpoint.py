"""Read how the weights of a checkpoint are stored, from the ``quantization_config`` of its ``config.json``.

The catalog's precision of a checkpoint follows from its bits, its groups and what it leaves in 16 bits. A checkpoint of which
attention stays in 16 bits has quantised experts alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fineserve_sim.catalog.hf import read_config
from fineserve_sim.catalog.load import CatalogError, precision
from fineserve_sim.catalog.specs import PrecisionSpec

QUANTIZED_BITS = {"awq": 4, "gptq": 4, "fp8": 8, "mxfp4": 4}
"""Bits of a weight by ``quant_method``, where the config does not say them."""
MODELOPT = {"FP8": "W8A8", "NVFP4": "W4A4-NVFP4", "W4A16_AWQ": "W4A16", "FP8_PB_WO": "W8A8-block"}
"""Precisions by ``quant_algo`` of NVIDIA's ModelOpt."""


def _quantized(config: dict[str, Any]) -> dict[str, Any] | None:
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    return found if isinstance(found, dict) else None


def checkpoint_precision(path: str | Path) -> PrecisionSpec:
    """The catalog's precision of the checkpoint of a ``config.json``: 16 bits where it has no ``quantization_config``.

    Raises CatalogError for an unreadable file, or a quantisation that no precision of the catalog describes.
    """
    config, where = read_config(path)
    quantized = _quantized(config)
    if quantized is None:
        return precision("W16A16")
    name = _name(quantized)
    if name is None:
        method = quantized.get("quant_method", "unknown")
        raise CatalogError(f"{where}: quantization_config says {method}, which no precision of the catalog describes")
    return precision(name)


def _name(quantized: dict[str, Any]) -> str | None:
    method = str(quantized.get("quant_method"))
    if method == "fp8":
        return "W8A8-block" if quantized.get("weight_block_size") else "W8A8"
    if method == "mxfp4":
        return "W4A16-MXFP4"
    if method in ("awq", "gptq"):
        return "W4A16" if (quantized.get("bits") or QUANTIZED_BITS[method]) == 4 else None
    if method == "modelopt":
        return MODELOPT.get(str(quantized.get("quant_algo")))
    return _compressed(quantized) if method == "compressed-tensors" else None


def _compressed(quantized: dict[str, Any]) -> str | None:
    """As compressed-tensors writes it: groups of layers with the type and bits of weights and of activations."""
    group = next(_groups(quantized), None)
    if group is None:
        return None
    weights, inputs = group["weights"], group.get("input_activations")
    kind = weights.get("type"), weights.get("num_bits"), inputs.get("num_bits") if inputs else 16
    if kind == ("float", 8, 8):
        return "W8A8-block" if weights.get("strategy") == "block" else "W8A8"
    if kind == ("int", 4, 16):
        return "W4A16-experts" if _leaves_attention(quantized) else "W4A16"
    return "W4A4-NVFP4" if kind == ("float", 4, 4) else None


def _groups(quantized: dict[str, Any]) -> Any:
    groups = quantized.get("config_groups")
    values = groups.values() if isinstance(groups, dict) else ()
    return (group for group in values if isinstance(group, dict) and group.get("weights"))


def _leaves_attention(quantized: dict[str, Any]) -> bool:
    left = (*(quantized.get("ignore") or ()), *(quantized.get("modules_to_not_convert") or ()))
    return any("self_attn" in str(name) for name in left)


def check_checkpoint_precision(path: str | Path, precision: PrecisionSpec) -> None:
    """Raises CatalogError when the checkpoint of a ``config.json`` is quantized to other bits a weight than ``precision``."""
    config, where = read_config(path)
    quantized = _quantized(config)
    if quantized is None:
        return
    method = quantized.get("quant_method", "unknown")
    grouped = next((group["weights"].get("num_bits") for group in _groups(quantized)), None)
    bits = quantized.get("bits") or grouped or QUANTIZED_BITS.get(method)
    if precision.weight_bits != bits if bits else precision.weight_bits >= 16:
        has = f"{bits}-bit weights" if bits else "quantized weights"
        raise CatalogError(
            f"{where}: quantization_config says {method}, {has}; {precision.name} has {precision.weight_bits} bits a weight"
        )
