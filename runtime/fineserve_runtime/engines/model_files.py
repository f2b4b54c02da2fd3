"""What must be known of a model before its engine is built, read from its folder's JSON files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fineserve_runtime.engines.api import EngineConfig
from fineserve_runtime.formats import check_format
from fineserve_sim.policy.memory.geometry import KVGeometry

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json. Raises ValueError when there is none or it is no JSON object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"model folder {folder}: no config.json ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no JSON object")
    return config


def kv_geometry(config: Mapping[str, Any], engine: EngineConfig) -> KVGeometry:
    """The KV cache of the model as each rank of this engine keeps it. Raises ValueError for formats or models the slab does not
    serve, or that do not divide between the ranks."""
    check_format(config, engine.dtype, engine.kv_cache_dtype)
    text = config.get("text_config", config)
    if "kv_lora_rank" in text:
        raise ValueError(f"{engine.name}: multi-head latent attention is not served by the KV slab")
    try:
        heads = int(text["num_attention_heads"])
        kv_heads = int(text.get("num_key_value_heads") or heads)
        shards = max(1, len(engine.gpus)) // engine.stages
        _share(engine, heads, shards, "attention heads")
        return KVGeometry(
            layers=_share(engine, int(text["num_hidden_layers"]), engine.stages, "layers"),
            kv_heads=_share(
                engine, max(kv_heads, shards), shards, "KV heads"
            ),  # vLLM copies them where they are too few
            head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
            element_bytes=_ELEMENT_BYTES[_kv_dtype(text, engine)],
            tokens_per_block=engine.block_tokens,
        )
    except KeyError as missing:
        raise ValueError(f"{engine.name}: its config.json lacks {missing}") from None


def _share(engine: EngineConfig, count: int, parts: int, what: str) -> int:
    """Each rank has the same bytes of a block, because a slab has the same number on all devices."""
    if parts < 1 or count % parts:
        raise ValueError(f"{engine.name}: its {count} {what} do not divide into {parts} equal parts")
    return count // parts


def _kv_dtype(config: Mapping[str, Any], engine: EngineConfig) -> str:
    if engine.kv_cache_dtype != "auto":
        return engine.kv_cache_dtype
    stored = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return str(stored).removeprefix("torch.") if engine.dtype == "auto" else engine.dtype


def eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence tokens, from generation_config.json, else from config.json."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
