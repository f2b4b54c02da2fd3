"""Read a model's geometry from its Hugging Face ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from fineserve_sim.catalog.load import CatalogError
from fineserve_sim.catalog.specs import ModelSpec, PrecisionSpec

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
QUANTIZED_BITS = {"awq": 4, "fp8": 8}
"""Bits of a weight by ``quant_method``, where the config does not say them."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def _read(path: str | Path) -> tuple[dict[str, Any], Path]:
    """What a config.json holds, and where it is. Raises CatalogError for a file that cannot be read or is none."""
    where = Path(path)
    if where.is_dir():
        where = where / "config.json"
    try:
        config = json.loads(where.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"{where}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{where}: not a readable JSON file: {error}") from None
    if not isinstance(config, dict):
        raise CatalogError(f"{where}: expected a JSON object")
    return config, where


def _check(config: dict[str, Any], where: Path) -> None:
    model_type = config.get("model_type")
    if any(key in config for key in EXPERT_KEYS):
        raise CatalogError(f"{where}: mixture-of-experts model ({model_type}); only dense models are supported")
    if model_type not in SUPPORTED:
        raise CatalogError(f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(SUPPORTED)}")
    missing = [key for key in REQUIRED if config.get(key) is None]
    if missing:
        raise CatalogError(f"{where}: missing {', '.join(missing)}")
    for key in (*REQUIRED, "num_key_value_heads", "head_dim"):
        if config.get(key) is not None:
            _check_count(config[key], key, where)
    _check_heads(config, where)
    if config.get("sliding_window") and config.get("use_sliding_window", model_type == "mistral"):
        raise CatalogError(f"{where}: sliding-window attention is not supported; only full attention is")


def _check_count(value: Any, key: str, where: Path) -> None:
    if type(value) is not int or value < 1:
        raise CatalogError(f"{where}: {key} must be a whole number above 0, not {value!r}")


def _check_heads(config: dict[str, Any], where: Path) -> None:
    """Query heads share KV heads evenly, and the hidden size is a whole number of heads where no head says how wide it is."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CatalogError(
            f"{where}: num_key_value_heads must divide num_attention_heads, {heads}; {kv_heads} does not"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise CatalogError(f"{where}: num_attention_heads must divide hidden_size, {hidden}; {heads} does not")


def _bias(config: dict[str, Any], where: Path) -> Literal["none", "qkv"]:
    if config["model_type"] == "qwen2":
        return "qkv"
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise CatalogError(f"{where}: attention_bias and mlp_bias are not supported for {config['model_type']}")
    return "none"


def model_from_hf_config(path: str | Path) -> ModelSpec:
    """The model of a ``config.json``, or of a folder that holds one; named after the folder.

    Raises CatalogError for an unreadable file, a missing field, or an architecture other than dense Llama, Mistral,
    Qwen2 and Qwen3 with full attention.
    """
    config, where = _read(path)
    _check(config, where)
    heads = config["num_attention_heads"]
    return ModelSpec(
        name=where.resolve().parent.name,
        layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        q_heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_context_tokens=config["max_position_embeddings"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        bias=_bias(config, where),
        qk_norm=config["model_type"] == "qwen3",
        source=f"{where}",
    )


def check_checkpoint_precision(path: str | Path, precision: PrecisionSpec) -> None:
    """Raises CatalogError when the checkpoint of a ``config.json`` is quantized to other bits a weight than ``precision``."""
    config, where = _read(path)
    quantized = config.get("quantization_config")
    if not isinstance(quantized, dict):
        return
    method = quantized.get("quant_method", "unknown")
    bits = quantized.get("bits") or _grouped_bits(quantized) or QUANTIZED_BITS.get(method)
    if precision.weight_bits != bits if bits else precision.weight_bits >= 16:
        has = f"{bits}-bit weights" if bits else "quantized weights"
        raise CatalogError(
            f"{where}: quantization_config says {method}, {has}; {precision.name} has {precision.weight_bits} bits a weight"
        )


def _grouped_bits(quantized: dict[str, Any]) -> int | None:
    """Bits of a weight as compressed-tensors writes them."""
    groups = quantized.get("config_groups")
    if not isinstance(groups, dict):
        return None
    return next((group["weights"].get("num_bits") for group in groups.values() if group.get("weights")), None)
