"""Models whose layers differ: published parameter counts, bytes of KV and state, splits, and what a config.json says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fineserve_sim.catalog import (
    CatalogError,
    ModelSpec,
    active_parameters,
    attention_layers,
    check_tp,
    checkpoint_precision,
    expert_work,
    kv_sequence_bytes,
    kv_token_bytes,
    mlp_layers,
    model,
    model_from_hf_config,
    models,
    parameters,
    precision,
    state_bytes,
    weight_bytes,
)

PUBLISHED = {  # parameters of the checkpoint on Hugging Face, or the model card where it holds other layers, too (MTP)
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "gpt-oss-20b": 20_914_757_184,  # OpenAI's model card, table 1: 20.91 B
    "gpt-oss-120b": 116_829_156_672,  # the same: 116.83 B
    "deepseek-v3": 671_026_419_200,  # DeepSeek-V3 report: 671 B, without the layer for multi-token prediction
    "kimi-k2": 1_026_408_232_448,
    "minimax-m2.5": 228_689_764_864,
    "glm-4.5-air": 106_852_245_504,  # the card: 106 B
    "glm-5": 744_000_000_000,  # the report: 744 B, without the layer for multi-token prediction
    "llama-4-scout": 108_641_793_536,
    "llama-4-maverick": 401_583_781_376,
    "qwen3.5-397b-a17b": 397_000_000_000,
    "qwen3.5-122b-a10b": 122_000_000_000,
    "qwen3.5-35b-a3b": 35_000_000_000,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-8b": 8_767_123_696,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-small-3.2-24b": 24_011_361_280,
    "mistral-large-2": 122_610_069_504,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-1.7b": 1_720_574_976,
}
ACTIVE_B = {  # parameters a token passes through, in billions, as the names or the cards have them, embeddings included
    "mixtral-8x7b": 12.9,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.2,
    "deepseek-v3": 37.6,
    "kimi-k2": 32.9,
    "minimax-m2.5": 11.0,
    "llama-4-scout": 18.0,
}
KV_BYTES_16BIT = {  # of one token over all layers: 2 x layers x KV heads x head dimension x 2, or (512 + 64) x 2 a layer
    "mixtral-8x7b": 131_072,
    "qwen3-30b-a3b": 98_304,
    "qwen3-235b-a22b": 192_512,
    "gpt-oss-20b": 49_152,
    "gpt-oss-120b": 73_728,
    "deepseek-v3": 70_272,
    "deepseek-v3.2": 70_272 + 61 * 132,  # and the index's key: 128 values of 8 bits, a scale of 32
    "glm-5": 78 * (1_152 + 132),
    "glm-5.2": 78 * 1_152 + 21 * 132,  # an index in 21 layers
    "kimi-k2.5": 70_272,
    "minimax-m2.5": 253_952,
    "glm-4.5": 376_832,
    "glm-4.5-air": 188_416,
    "llama-4-scout": 196_608,
    "qwen3.5-397b-a17b": 30_720,  # 15 of 60 layers
    "qwen3.5-9b": 32_768,  # 8 of 32 layers
    "qwen3.5-27b": 65_536,  # 16 of 64 layers
    "gemma-2-27b": 376_832,
    "gemma-3-27b": 507_904,
    "phi-3-mini": 393_216,
    "phi-4": 204_800,
    "mistral-nemo-12b": 163_840,
    "mistral-large-2": 360_448,
    "qwen2.5-0.5b": 12_288,
    "qwen2.5-7b": 57_344,
    "qwen2.5-72b": 327_680,
    "qwen3-8b": 147_456,
    "qwen3-32b": 262_144,
    "llama-3.1-8b": 131_072,
    "llama-3.1-70b": 327_680,
    "llama-3.2-1b": 32_768,
    "llama-3.2-3b": 114_688,
    "mixtral-8x22b": 229_376,
    "mistral-small-24b": 163_840,
    "gemma-2-9b": 344_064,
    "phi-4-mini": 131_072,
}
HALF = precision("bf16")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert parameters(model(name)) == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.parametrize("name", ACTIVE_B)
def test_active_parameters_are_the_published_ones(name: str) -> None:
    assert active_parameters(model(name)) / 1e9 == pytest.approx(ACTIVE_B[name], rel=0.02)


@pytest.mark.parametrize("name", KV_BYTES_16BIT)
def test_kv_bytes_of_a_token(name: str) -> None:
    assert kv_token_bytes(model(name), HALF, 1) == KV_BYTES_16BIT[name]


def test_every_layer_has_one_attention_and_one_mlp() -> None:
    for spec in models().values():
        assert sum(kind.layers for kind in attention_layers(spec)) == spec.layers
        assert sum(kind.layers for kind in mlp_layers(spec)) == spec.layers


def test_a_window_keeps_no_more_than_its_tokens() -> None:
    """gpt-oss-120b: 18 of 36 layers keep 128 tokens; 2,048 bytes a token and layer."""
    oss = model("gpt-oss-120b")
    assert kv_sequence_bytes(oss, HALF, 1, 100) == 100 * kv_token_bytes(oss, HALF, 1)
    assert kv_sequence_bytes(oss, HALF, 1, 8000) == 18 * 2048 * (8000 + 128)


def test_the_state_of_linear_attention_by_hand() -> None:
    """Qwen3.5-35B-A3B: 30 of 40 layers; 32 heads of 128 x 128 in 32 bits, and 3 inputs of 8,192 channels in 16 bits."""
    qwen = model("qwen3.5-35b-a3b")
    each = 32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert state_bytes(qwen, 1) == 30 * each
    assert kv_sequence_bytes(qwen, HALF, 1, 1000) == 30 * each + 1000 * kv_token_bytes(qwen, HALF, 1)
    assert state_bytes(qwen, 2) == 30 * each // 2


def test_latent_attention_is_kept_whole_on_every_gpu() -> None:
    assert len({kv_token_bytes(model("deepseek-v3"), HALF, tp) for tp in (1, 2, 4, 8)}) == 1


@given(st.sampled_from(sorted(models())), st.sampled_from([1, 2, 4, 8]), st.integers(1, 100_000), st.integers(1, 5000))
def test_longer_sequences_never_keep_less(name: str, tp: int, tokens: int, more: int) -> None:
    spec = model(name)
    try:
        check_tp(spec, tp)
    except CatalogError:
        return
    least, most = (kv_sequence_bytes(spec, HALF, tp, length) for length in (tokens, tokens + more))
    assert least <= most <= least + more * kv_token_bytes(spec, HALF, tp)


def _spread(name: str) -> ModelSpec:
    spec = model(name)
    assert spec.experts is not None
    return spec.model_copy(update={"experts": spec.experts.model_copy(update={"spread": "whole"})})


def test_split_and_whole_experts_are_the_same_bytes() -> None:
    for tp in (2, 4, 8):
        assert weight_bytes(_spread("qwen3-30b-a3b"), HALF, tp) == weight_bytes(model("qwen3-30b-a3b"), HALF, tp)
    whole, split = expert_work(_spread("qwen3-30b-a3b"), 4), expert_work(model("qwen3-30b-a3b"), 4)
    assert whole is not None and split is not None
    assert (whole.local, whole.width, split.local, split.width) == (32, 768, 128, 192)


def test_uneven_experts_are_refused() -> None:
    with pytest.raises(CatalogError, match=r"glm-4\.5 cannot run at TP 3: 160 whole experts must split evenly"):
        check_tp(_spread("glm-4.5").model_copy(update={"kv_heads": 6}), 3)


def test_mxfp4_is_for_experts_alone() -> None:
    """gpt-oss: the checkpoints are 60.8 and 12.8 GiB (OpenAI's model card, table 1), as they are for Triton."""
    as_stored = precision("W4A16-MXFP4-Triton")
    assert weight_bytes(model("gpt-oss-120b"), as_stored, 1) / 2**30 == pytest.approx(60.8, rel=0.005)
    assert weight_bytes(model("gpt-oss-20b"), as_stored, 1) / 2**30 == pytest.approx(12.8, rel=0.005)


def test_what_pads_experts_for_marlin_takes_memory() -> None:
    """Its experts are 3,072 x 2,944 where gpt-oss's are 2,880 x 2,880."""
    oss = model("gpt-oss-120b")
    more = weight_bytes(oss, precision("mxfp4"), 1) - weight_bytes(oss, precision("W4A16-MXFP4-Triton"), 1)
    assert more == pytest.approx(36 * 128 * 3 * (3072 * 2944 - 2880 * 2880) * 4.25 / 8, abs=1)


def test_each_checkpoint_is_in_a_precision_of_the_catalog() -> None:
    assert all(precision(spec.checkpoint).name == spec.checkpoint for spec in models().values())


# --- config.json -------------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "num_hidden_layers": 12,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}


def _read(folder: Path, **config: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(BASE | config), encoding="utf-8")
    return model_from_hf_config(folder)


def test_experts_of_each_family(tmp_path: Path) -> None:
    mixtral = _read(tmp_path, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2).experts
    assert mixtral is not None and (mixtral.count, mixtral.active, mixtral.width, mixtral.dense_layers) == (
        8,
        2,
        4096,
        0,
    )
    moe = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    qwen = _read(tmp_path, model_type="qwen3_moe", **moe, decoder_sparse_step=2, mlp_only_layers=[1]).experts
    assert qwen is not None and (qwen.width, qwen.dense_layers, qwen.shared_width) == (512, 7, 0)
    routed = {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "n_shared_experts": 2}
    glm = _read(
        tmp_path, model_type="glm4_moe", **routed, first_k_dense_replace=1, attention_bias=True, use_qk_norm=True
    )
    assert glm.experts is not None and (glm.experts.shared_width, glm.experts.dense_layers) == (1024, 1)
    assert (glm.bias, glm.qk_norm) == ("qkv", True)


def test_latent_and_sparse_attention(tmp_path: Path) -> None:
    mla = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    plain = _read(tmp_path, model_type="deepseek_v3", **mla)
    assert plain.latent is not None and (plain.kv_heads, plain.head_dim, plain.latent.index_tokens) == (1, 128, 0)
    index = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    sparse = _read(tmp_path, model_type="deepseek_v32", **mla, **index)
    assert [kind.window for kind in attention_layers(sparse)] == [2048]
    types = ["full", "shared", "shared", "shared"] * 3
    shared = _read(tmp_path, model_type="glm_moe_dsa", indexer_types=types, **mla, **index)
    assert attention_layers(shared) == (("latent", 3, 2048), ("chosen", 9, 2048))


def test_windows_of_each_family(tmp_path: Path) -> None:
    def windowed(**config: Any) -> tuple[int, int] | None:
        window = _read(tmp_path, **config).window
        return window and (window.layers, window.tokens)

    assert windowed(model_type="mistral", sliding_window=4096) == (12, 4096)
    assert windowed(model_type="mistral", sliding_window=None) is None
    assert windowed(model_type="qwen2", sliding_window=4096, use_sliding_window=False) is None
    assert windowed(model_type="gemma2", sliding_window=4096) == (6, 4096)
    assert windowed(model_type="gemma3", sliding_window=1024, sliding_window_pattern=6) == (10, 1024)
    kinds = ["sliding_attention", "full_attention"] * 6
    assert windowed(model_type="gemma3", sliding_window=512, layer_types=kinds) == (6, 512)
    assert windowed(model_type="llama4", attention_chunk_size=8192) == (9, 8192)
    assert windowed(model_type="phi3", sliding_window=262144) is None  # longer than the context


def test_linear_attention_and_vision(tmp_path: Path) -> None:
    linear = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    linear |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
    text = {**BASE, **linear, "model_type": "qwen3_5_text", "full_attention_interval": 4, "head_dim": 256}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 256, "out_hidden_size": 1024}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_5", "text_config": text, "vision_config": vision}), encoding="utf-8"
    )
    read = model_from_hf_config(tmp_path)
    assert read.linear is not None and (read.linear.layers, read.output_gate) == (9, True)
    assert read.other_parameters == 2 * (4 * 64 * 64 + 2 * 64 * 256) + 256 * (256 + 1024)


@pytest.mark.parametrize(
    ("quantized", "expected"),
    [
        (None, "W16A16"),
        ({"quant_method": "fp8"}, "W8A8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "W8A8-block"),
        ({"quant_method": "awq", "bits": 4}, "W4A16"),
        ({"quant_method": "gptq", "bits": 4}, "W4A16"),
        ({"quant_method": "mxfp4"}, "W4A16-MXFP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "W4A4-NVFP4"),
        ({"quant_method": "compressed-tensors", "float": (8, 8, "channel")}, "W8A8"),
        ({"quant_method": "compressed-tensors", "float": (8, 8, "block")}, "W8A8-block"),
        ({"quant_method": "compressed-tensors", "float": (4, 4, "group")}, "W4A4-NVFP4"),
        ({"quant_method": "compressed-tensors", "int": (4, None, "group")}, "W4A16"),
        (
            {"quant_method": "compressed-tensors", "int": (4, None, "group"), "ignore": ["re:.*self_attn.*"]},
            "W4A16-experts",
        ),
    ],
)
def test_how_a_checkpoint_stores_its_weights(tmp_path: Path, quantized: dict[str, Any] | None, expected: str) -> None:
    config = BASE | ({"quantization_config": _groups(quantized)} if quantized else {})
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert checkpoint_precision(tmp_path).name == expected


def _groups(quantized: dict[str, Any]) -> dict[str, Any]:
    """The groups of compressed-tensors from a short form."""
    kind = next((kind for kind in ("float", "int") if kind in quantized), None)
    if kind is None:
        return quantized
    bits, inputs, strategy = quantized.pop(kind)
    weights = {"num_bits": bits, "type": kind, "strategy": strategy}
    return quantized | {
        "config_groups": {"g": {"weights": weights, "input_activations": inputs and {"num_bits": inputs}}}
    }


@pytest.mark.parametrize("quantized", [{"quant_method": "gptq", "bits": 8}, {"quant_method": "quip"}])
def test_unknown_quantisations_are_refused_by_name(tmp_path: Path, quantized: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"quantization_config": quantized}), encoding="utf-8")
    with pytest.raises(CatalogError, match=f"quantization_config says {quantized['quant_method']}, which no precision"):
        checkpoint_precision(tmp_path)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"window": {"layers": 20, "tokens": 128}}, "window and linear attention: 20 layers, where the model has 16"),
        ({"experts": {"count": 4, "active": 2, "width": 64, "dense_layers": 17}}, "dense layers beside experts: 17"),
    ],
)
def test_parts_have_no_more_layers_than_the_model(part: dict[str, Any], message: str) -> None:
    small = model("llama-3.2-1b").model_dump() | part
    with pytest.raises(ValidationError, match=message):
        ModelSpec.model_validate(small)


def test_a_config_with_more_dense_layers_than_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="dense layers beside experts: 90 layers, where the model has 12"):
        _read(
            tmp_path,
            model_type="glm4_moe",
            n_routed_experts=8,
            moe_intermediate_size=64,
            **{"num_experts_per_tok": 2, "first_k_dense_replace": 90},
        )
