"""The catalog: published parameter counts, the KV sizes of systems.md 1.1, look-ups, Hugging Face configs."""

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
    activation_bytes,
    deployment,
    deployments,
    gpu,
    gpus,
    kernel_rates,
    kv_token_bytes,
    model,
    model_from_hf_config,
    models,
    parameters,
    precision,
    precisions,
    weight_bytes,
)
from fineserve_sim.latency.tables import DEVICES

PUBLISHED_PARAMETERS = {  # as model cards and checkpoint indices state them
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-2-7b": 6_738_415_616,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-72b": 72_706_203_648,
    "yi-6b": 6_061_035_520,
    "yi-9b": 8_829_407_232,
    "yi-34b": 34_388_917_248,
    "opt-13b": 12_853_473_280,
    "llama-3.1-405b": 405_853_388_800,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "opt-6.7b": 6_658_473_984,
    "opt-30b": 29_974_540_288,
}
KV_KIB_FP16 = {
    "llama-3-8b": 128,
    "llama-3.1-8b": 128,
    "llama-3.1-70b": 320,
    "qwen3-32b": 256,
    "qwen2.5-14b": 192,
    "qwen2.5-72b": 320,
    "yi-6b": 64,
    "yi-9b": 96,
    "yi-34b": 240,
    "llama-2-7b": 512,
    # 2 x layers x KV heads x head dimension x 2 bytes, from the model cards
    "llama-3.1-405b": 504,
    "llama-2-70b": 320,
    "codellama-34b": 192,
    "mistral-7b": 128,
    "qwen2.5-7b": 56,
    "qwen2.5-32b": 256,
    "qwen3-8b": 144,
    "qwen3-14b": 160,
    "opt-13b": 800,
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert parameters(model(name)) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", KV_KIB_FP16)
def test_kv_token_bytes_are_those_of_the_specification(name: str) -> None:
    assert kv_token_bytes(model(name), precision("fp16"), 1) == KV_KIB_FP16[name] * 1024


@pytest.mark.parametrize(("name", "kib"), [("fp8", 64), ("awq", 128), ("qoq", 34), ("W8A8", 128)])
def test_kv_token_bytes_by_precision(name: str, kib: int) -> None:
    assert kv_token_bytes(model("llama-3.1-8b"), precision(name), 1) == kib * 1024


@pytest.mark.parametrize(("name", "gib"), [("llama-3.1-405b", 756), ("nemotron-253b", 472), ("qwen2.5-72b", 136)])
def test_weights_are_those_of_kunserves_table_1(name: str, gib: int) -> None:
    """Table 1 gives whole GiB; Qwen2.5-14B's 28 stands for 27.5."""
    assert weight_bytes(model(name), precision("fp16"), 1) / 2**30 == pytest.approx(gib, abs=0.75)


def test_the_models_of_the_four_papers_are_there() -> None:
    """FineServe table 3, KunServe table 1 and section 7, vTensor section 7, Prism's figures."""
    papers = "llama-3.1-8b llama-3-8b llama-3.1-70b qwen3-32b qwen2.5-14b qwen2.5-72b nemotron-253b llama-3.1-405b"
    papers += " yi-6b-200k yi-9b-32k yi-34b-32k llama-2-7b llama-3.2-1b llama-3.2-3b"
    assert set(papers.split()) <= set(models())


def test_every_gpu_is_there_and_says_whether_it_was_measured() -> None:
    assert {"h100-sxm", "h100-pcie", "h200-sxm", "a100-80gb", "a800", "h800", "l40s", "b200"} <= set(gpus())
    assert {"a100-40gb", "rtx-pro-6000-server", "l4", "a10", "gh200"} <= set(gpus())
    assert all(spec.tables_from in DEVICES for spec in gpus().values() if spec.tables_from)
    assert [name for name, spec in gpus().items() if spec.efficiency == "measured"] == ["h100-sxm"]


def test_launches_grow_with_the_layers_and_graphs_have_none() -> None:
    eager = deployment("vllm-0.9.1-authors")
    measured = eager.floor("W8A8KV8")
    deep = eager.floor("W8A8KV8", layers=80)
    assert measured is not None and deep is not None
    assert deep.value == pytest.approx(measured.value * 80 / 32)
    assert (measured.kind, deep.kind) == ("fitted", "assumed")
    assert eager.floor("W8A8KV8", layers=32) == measured
    assert deployment("trtllm").floor("W8A8KV8", layers=80) is None


def test_every_kind_of_engine_has_a_deployment() -> None:
    assert {"vllm-cudagraph", "vllm-eager", "vllm-v0", "trtllm", "sglang"} <= set(deployments())


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    yi = model("yi-6b")  # 4 KV heads
    assert [kv_token_bytes(yi, precision("fp16"), tp) // 1024 for tp in (1, 2, 4, 8)] == [64, 32, 16, 16]


def test_weight_bytes_in_16_bits_are_twice_the_parameters() -> None:
    for spec in models().values():
        wider = spec.layers * spec.hidden_size * spec.experts.count if spec.experts and spec.float32_router else 0
        assert weight_bytes(spec, precision("bf16"), 1) == 2 * (parameters(spec) + wider)


def test_awq_weight_bytes_by_hand() -> None:
    # 32 layers of 218,103,808 weights at 4 + 20/128 bits; two 128256 x 4096 tables and 65 norms in 16 bits
    linear = 32 * 218_103_808 * (4 + 20 / 128) / 8
    assert weight_bytes(model("llama-3.1-8b"), precision("awq"), 1) == linear + 2 * (2 * 128256 * 4096 + 65 * 4096)


@given(st.sampled_from(sorted(models())), st.sampled_from(sorted(precisions())), st.sampled_from([2, 4, 8]))
def test_tensor_parallel_weights_cover_the_model(name: str, fmt: str, tp: int) -> None:
    whole = weight_bytes(model(name), precision(fmt), 1)
    try:
        share = weight_bytes(model(name), precision(fmt), tp)
    except CatalogError:
        uneven = model(name).q_heads % tp or model(name).intermediate_size % tp
        assert uneven or (model(name).kv_heads % tp and tp % model(name).kv_heads)
        return
    # norms, positions, routers, compressions and scarce KV heads are replicated
    assert whole <= tp * share <= 1.09 * whole


def test_uneven_tensor_parallelism_is_refused() -> None:
    with pytest.raises(CatalogError, match=r"qwen2.5-14b cannot run at TP 3: 40 query heads"):
        weight_bytes(model("qwen2.5-14b"), precision("fp16"), 3)


def test_activation_bytes_by_hand() -> None:
    # in a layer 2 x 4096 + 28672 + 14336 elements of 2 bytes; in the sampler 2 x 4096, and a row of 128256 logits of 35 bytes
    assert activation_bytes(model("llama-3.1-8b"), 1, 10_000, 10) == 10_000 * 51200 * 2
    assert activation_bytes(model("llama-3.1-8b"), 1, 10_000, 300) == 10_000 * 8192 * 2 + 300 * 128256 * 35


def test_every_entry_names_its_source() -> None:
    assert all(entry.source for entry in gpus().values())
    assert all(entry.source for entry in models().values())
    assert all(entry.source for entry in precisions().values())
    assert all(entry.overhead_s.source for entry in deployments().values())


def test_every_precision_has_kernel_rates_and_every_floor_a_precision() -> None:
    assert set(kernel_rates().gemm) == set(precisions())
    assert {spec.kv_bits for spec in precisions().values()} <= set(kernel_rates().kv_bytes_per_s)
    floors = [set(d.host_floors) for d in deployments().values() if d.host_floors is not None]
    assert floors and all(names <= set(precisions()) for names in floors)


def test_no_measured_rate_exceeds_the_reference_gpu() -> None:
    reference = gpu(kernel_rates().reference_gpu)
    for name, kernel in kernel_rates().gemm.items():
        assert kernel.flops_per_s.value < reference.peak_flops_per_s(precision(name).on(reference).tensor_core) or (
            kernel.flops_per_s.kind == "assumed"
        )
        assert kernel.bytes_per_s.value < reference.memory_bytes_per_s
    for name, kernel in kernel_rates().experts.items():
        assert kernel.flops_per_s.value < reference.peak_flops_per_s(precision(name).on(reference).tensor_core)
        assert kernel.bytes_per_s.value < reference.memory_bytes_per_s
    assert reference.efficiency == "measured"


def test_precisions_answer_to_aliases_in_any_case() -> None:
    assert precision("AWQ") is precision("W4A16") is precision("w4a16")
    spellings = [s.lower() for spec in precisions().values() for s in (spec.name, *spec.aliases)]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(
    ("look_up", "name", "message"),
    [
        (model, "llama3.1-8b", r"unknown model 'llama3.1-8b'; nearest: .*llama-3.1-8b"),
        (gpu, "h100", r"unknown GPU 'h100'; nearest: .*h100-sxm"),
        (precision, "W4A8", r"unknown precision 'W4A8'; nearest: .*W4A8KV4"),
        (deployment, "vllm-cuda", r"unknown deployment 'vllm-cuda'; nearest: vllm-cudagraph"),
        (gpu, "zzz", r"unknown GPU 'zzz'; known: a10, a100-40gb, a100-80gb, "),
    ],
)
def test_unknown_names_list_the_nearest(look_up: Any, name: str, message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        look_up(name)


def test_specs_are_immutable_and_refuse_unknown_keys() -> None:
    with pytest.raises(ValidationError):
        model("yi-6b").layers = 3
    with pytest.raises(ValidationError, match="n_layers"):
        ModelSpec.model_validate({**model("yi-6b").model_dump(), "n_layers": 3})


def test_a_gpu_without_the_tensor_cores_says_so() -> None:
    with pytest.raises(ValueError, match="a100-80gb has no fp8 tensor cores"):
        gpu("a100-80gb").peak_flops_per_s("fp8")


LLAMA_CONFIG: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def _write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def test_a_hugging_face_config_gives_the_catalogued_geometry(tmp_path: Path) -> None:
    read = model_from_hf_config(_write(tmp_path, LLAMA_CONFIG))
    ours = model("llama-3.1-8b")
    assert read.model_dump(exclude={"name", "source"}) == ours.model_dump(exclude={"name", "source"})
    assert read.name == tmp_path.name
    assert model_from_hf_config(tmp_path) == read


def test_qwen_configs_carry_biases_and_head_norms(tmp_path: Path) -> None:
    qwen2 = model_from_hf_config(_write(tmp_path, {**LLAMA_CONFIG, "model_type": "qwen2", "use_sliding_window": False}))
    assert (qwen2.bias, qwen2.qk_norm) == ("qkv", False)
    qwen3 = model_from_hf_config(_write(tmp_path, {**LLAMA_CONFIG, "model_type": "qwen3", "head_dim": 64}))
    assert (qwen3.bias, qwen3.qk_norm, qwen3.head_dim) == ("none", True, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None, "hidden_size": None}, "missing hidden_size, vocab_size"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_experts_per_tok must be a whole number above 0"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(CatalogError, match=message):
        model_from_hf_config(_write(tmp_path, {**LLAMA_CONFIG, **change}))


def test_an_unreadable_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CatalogError, match="not a readable JSON file"):
        model_from_hf_config(tmp_path)
    with pytest.raises(CatalogError, match="expected a JSON object"):
        model_from_hf_config(_write(tmp_path, []))
