"""Mixtures of experts in an experiment: how experts are spread, the precision of a checkpoint, and what the answer says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.catalog import kv_sequence_bytes, kv_token_bytes, model, models, precision
from fineserve_sim.cluster.compose.memory import geometry
from fineserve_sim.cluster.scenario import EngineSettings, ServedModel
from fineserve_sim.experiment import ConfigError, load_experiment
from fineserve_sim.experiment.results.summary import simplified

WriteFile = Callable[..., Path]
DENSE = "{id: A, model: llama-3.1-8b, precision: W16A16, share: 2}"


def test_experts_are_split_unless_they_are_to_be_whole(write_file: WriteFile) -> None:
    spread = []
    for experts in ("", "experts: split, ", "experts: whole, "):
        entry = f"{{id: A, model: gpt-oss-20b, precision: checkpoint, tp: 2, {experts}share: 2}}"
        setup = load_experiment(write_file((DENSE, entry))).setup
        found = setup.models[0].spec.experts
        assert found is not None and setup.models[0].precision.name == "W4A16-MXFP4"
        spread.append(found.spread)
    assert spread == ["split", "split", "whole"]


def test_a_dense_model_has_no_experts_to_spread(write_file: WriteFile) -> None:
    entry = "{id: A, model: llama-3.1-8b, precision: fp8, experts: whole, share: 2}"
    with pytest.raises(ConfigError, match=r"models\.0\.experts.*llama-3\.1-8b has no experts"):
        load_experiment(write_file((DENSE, entry)))


def test_the_precision_of_a_config_json(write_file: WriteFile, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024}
    config |= {"num_attention_heads": 8, "vocab_size": 1000, "max_position_embeddings": 4096}
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "own.json").write_text(json.dumps(config | quantized), encoding="utf-8")
    entry = "{id: A, model: {config: own.json}, precision: checkpoint, share: 2}"
    (found, _) = load_experiment(write_file((DENSE, entry))).setup.models
    assert found.precision.name == "W8A8-block"


@given(st.sampled_from(sorted(models())), st.integers(1, 20_000), st.integers(2, 4000))
def test_memory_policies_count_a_sequence_of_usual_length_as_it_is(name: str, prompt: int, output: int) -> None:
    """Within a byte a layer and token: windows and states are in the mean of such a sequence."""
    spec, half = model(name), precision("fp16")
    served = ServedModel("m", spec, half, 1, 1.0, 1.0, prompt, output)
    tokens = prompt + (output + 1) // 2
    counted = tokens * geometry(served, EngineSettings()).token_bytes
    exact = kv_sequence_bytes(spec, half, 1, tokens)
    assert exact <= counted <= exact + tokens * spec.layers


def test_without_lengths_a_token_takes_what_it_adds() -> None:
    served = ServedModel("m", model("gemma-3-27b"), precision("fp16"), 1, 1.0, 1.0, 0.0, 0.0)
    assert geometry(served, EngineSettings()).token_bytes == kv_token_bytes(served.model, served.precision, 1)
    longer = geometry(replace(served, mean_prompt_tokens=50_000), EngineSettings()).token_bytes
    assert longer < kv_token_bytes(served.model, served.precision, 1) / 5


def test_the_answer_says_what_is_simplified() -> None:
    assert list(simplified([("a", model("llama-3.1-8b")), ("b", model("qwen2.5-3b"))])) == []
    lines = list(simplified([("x", model("gpt-oss-20b")), ("y", model("gemma-3-27b")), ("z", model("deepseek-v3.2"))]))
    assert [line.split(":")[0] for line in lines] == ["x, z", "x, y", "y", "z"]
    assert any("sparse attention by roofline" in line for line in lines)


SYSTEMS = 'systems: [fineserve, "prism*"]'
MIXED = "{id: A, model: qwen3-30b-a3b, precision: fp16, share: 2, "


def test_data_parallel_ranks_of_an_experiment(write_file: WriteFile) -> None:
    entry = MIXED + "dp: 2, experts: whole}"
    setup = load_experiment(write_file((DENSE, entry), (SYSTEMS, "systems: [dedicated]"))).setup
    assert setup.models[0].spec.experts is not None and setup.models[0].spec.experts.ranks == 2


@pytest.mark.parametrize(
    ("entry", "systems", "text"),
    [
        ("{id: A, model: llama-3.1-8b, precision: fp8, dp: 2, share: 2}", "dedicated", "llama-3.1-8b has no experts"),
        (MIXED + "dp: 3}", "dedicated", r"among 3 ranks was measured; known: 1, 2, 4, 8"),
        (MIXED + "dp: 0}", "dedicated", "must be greater than or equal to 1, not 0"),
        (MIXED + "tp: auto, dp: 2}", "dedicated", "needs a number for tp"),
        (MIXED + "dp: 2, speculative: {tokens: 2, acceptance: 0.5}}", "dedicated", "not with speculative"),
        (MIXED + "dp: 8}", "dedicated", "8 ranks at tp 1 take 8 GPUs of one node, which has 2; lower dp or tp"),
        (MIXED + "dp: 2}", "fineserve", "dp takes placement dedicated or pinned, and system fineserve has"),
        (MIXED + "dp: 2}", "prism", "system prism has residency"),
    ],
)
def test_ranks_that_cannot_be_are_refused_where_they_stand(
    write_file: WriteFile, entry: str, systems: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=rf"models\.0\.dp.*{text}"):
        load_experiment(write_file((DENSE, entry), (SYSTEMS, f"systems: [{systems}]")))
