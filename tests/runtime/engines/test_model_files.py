"""KV geometry and end tokens read from a model's folder, without vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fineserve_runtime.engines.api import EngineConfig
from fineserve_runtime.engines.model_files import eos_token_ids, kv_geometry, read_config
from fineserve_runtime.engines.process import build_slab_core

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
ENGINE = EngineConfig("llama", Path("/models/llama"), dtype="auto", block_tokens=16)


@pytest.mark.parametrize(
    ("model", "engine", "kib"),
    [
        ({}, {}, 2048),  # 32 layers x 8 heads x 128 x K and V x 2 bytes x 16 tokens
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, 1024),
        ({}, {"block_tokens": 32}, 4096),
        ({"torch_dtype": "float32"}, {}, 4096),
        ({"torch_dtype": "float32"}, {"dtype": "float16"}, 2048),
        ({"head_dim": 256}, {}, 4096),
        ({"num_key_value_heads": None}, {}, 8192),
        ({"dtype": "float16", "torch_dtype": None}, {}, 2048),
    ],
)
def test_block_bytes(model: dict[str, Any], engine: dict[str, Any], kib: int) -> None:
    assert kv_geometry(LLAMA_8B | model, replace(ENGINE, **engine)).block_bytes == kib * 1024


def test_text_part_of_a_multimodal_model() -> None:
    assert kv_geometry({"text_config": LLAMA_8B}, ENGINE).block_bytes == 2048 * 1024


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kv_lora_rank": 512}, "llama: multi-head latent attention is not served by the KV slab"),
        ({"num_hidden_layers": ...}, "llama: its config.json lacks 'num_hidden_layers'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' is not served"),
    ],
)
def test_models_that_are_refused(model: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in (LLAMA_8B | model).items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        kv_geometry(config, ENGINE)


@pytest.mark.parametrize(("content", "message"), [("{", "is no JSON"), ("[]", "is no JSON object")])
def test_broken_config(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_end_of_sequence_tokens(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, {}) == ()
    assert eos_token_ids(tmp_path, {"eos_token_id": 2}) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert eos_token_ids(tmp_path, {"eos_token_id": 2}) == (7, 8)


def test_an_engine_whose_folder_is_gone_says_so(tmp_path: Path) -> None:
    """vLLM takes it for a name on a hub, and says that it is none."""
    gone: Any = None
    with pytest.raises(ValueError, match=r"model folder .*/gone: no config\.json"):
        build_slab_core(EngineConfig("A", tmp_path / "gone"), tmp_path / "gone", gone, 0, ())
