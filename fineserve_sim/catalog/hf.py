"""Read a model's geometry from its Hugging Face ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from fineserve_sim.catalog.load import CatalogError
from fineserve_sim.catalog.specs import ModelSpec

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def _check(config: dict[str, Any], where: Path) -> None:
    model_type = config.get("model_type")
    if any(key in config for key in EXPERT_KEYS):
        raise CatalogError(f"{where}: mixture-of-experts model ({model_type}); only dense models are supported")
    if model_type not in SUPPORTED:
        raise CatalogError(f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(SUPPORTED)}")
    missing = [key for key in REQUIRED if config.get(key) is None]
    if missing:
        raise CatalogError(f"{where}: missing {', '.join(missing)}")
    if config.get("sliding_window") and config.get("use_sliding_window", model_type == "mistral"):
        raise CatalogError(f"{where}: sliding-window attention is not supported; only full attention is")


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
    where = Path(path)
    if where.is_dir():
        where = where / "config.json"
    try:
        config = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CatalogError(f"{where}: not a readable JSON file ({error})") from error
    if not isinstance(config, dict):
        raise CatalogError(f"{where}: expected a JSON object")
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
