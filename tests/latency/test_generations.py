"""What engines of this year do otherwise: compiled small kernels, one attention kernel, experts padded for Marlin."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fineserve_sim.catalog import deployment, expert_work, gpu, model, padded, precision
from fineserve_sim.latency import StepModel, measured_on
from fineserve_sim.latency.attention import TILE_ROWS
from fineserve_sim.latency.rates import FUSED_REACHES, compiled, resolve
from tests.latency.stepkit import chunk, engine, part_s

PROFILES = Path(__file__).parents[3] / "shared" / "data" / "fleets" / "llmservingsim_bench" / "profiler_tables.tar.gz"
ATTENTION = "profiler/perf/RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1/attention.csv"


def test_compiled_kernels_move_memory_at_one_rate() -> None:
    """Norms, additions, rotations and activations; a step of a prompt is shorter by what they take less."""
    before, after = engine(by="vllm-cudagraph"), engine(by="vllm-0.16")
    rates = resolve(gpu("h100-sxm"), precision("fp16"), 1)
    assert compiled(rates, gpu("h100-sxm")).activation.bytes_per_s.value == FUSED_REACHES * 3.35e12
    old, new = (part_s(step, 0, 0, *chunk(1000), 1) for step in (before, after))
    changed = {name for name in old if new[name] != old[name]}
    assert changed == {"norm", "residual_add", "rope", "activation", "host_overhead"}
    moved_bytes = 1000 * 3 * 14336 * 2
    launch_s = rates.activation.launch_s.value
    assert new["activation"] == pytest.approx(32 * (launch_s + moved_bytes / (FUSED_REACHES * 3.35e12)))


def test_a_decode_beside_a_prompt_fills_a_tile() -> None:
    """Where the kernel is FlashAttention 2. Alone, decodes take as long as ever; Hopper's kernel has no such tiles."""
    plain, tiled = (engine(on="a100-80gb", by=by) for by in ("vllm-cudagraph", "vllm-0.11"))
    alone = 100, 100_000, 0, 0, 0, 100
    beside = 100, 100_000, *chunk(500), 101
    assert part_s(tiled, *alone)["decode_attention"] == part_s(plain, *alone)["decode_attention"]
    tile_s = TILE_ROWS * (100_000 + 100) * tiled.attention.pair_s  # by roofline
    assert part_s(tiled, *beside)["decode_attention"] == pytest.approx(tile_s)
    assert tile_s > 2 * part_s(plain, *beside)["decode_attention"]
    device_s = tiled.device(*beside[:5], 600, 101)[0]
    assert tiled.step_s(*beside) == pytest.approx(tiled.overhead_s + 101 * tiled.sequence_s + device_s)
    hopper = [part_s(engine(by=by), *beside)["decode_attention"] for by in ("vllm-cudagraph", "vllm-0.11")]
    assert hopper[0] == hopper[1]


@pytest.mark.skipif(not PROFILES.is_file(), reason="the shared/ folder with the measured sets is absent")
def test_tiles_are_as_long_as_measured() -> None:
    """One layer of Llama-3.1-8B on an RTX PRO 6000 under vLLM 0.19: decodes at 1,024 tokens each beside a prompt of 1,024."""
    with tarfile.open(PROFILES) as archive:
        file = archive.extractfile(ATTENTION)
        assert file is not None
        rows = pd.read_csv(file)
    rows = rows[(rows.prefill_chunk == 1024) & (rows.kv_prefill == 0)]
    alone_us = float(rows[rows.n_decode == 0].time_us.iloc[0])
    device = gpu("rtx-pro-6000-server")
    own = (model("llama-3.1-8b"), precision("fp16"), 1, device)
    plain, tiled = (
        StepModel(*own, deployment(by), measured_on(device)).attention_s for by in ("vllm-cudagraph", "vllm-0.16")
    )
    for decodes in (32, 64, 128):
        measured_us = float(rows[(rows.n_decode == decodes) & (rows.kv_decode == 1024)].time_us.iloc[0]) - alone_us
        found = [of(decodes, 1024 * decodes, *chunk(1024))[0] / 32 * 1e6 for of in (plain, tiled)]
        assert found[0] < 0.75 * measured_us
        assert found[1] == pytest.approx(measured_us, rel=0.25)


@pytest.mark.parametrize(("tp", "width"), [(1, 2944), (2, 1536), (4, 768), (8, 384)])
def test_experts_in_mxfp4_are_padded_for_marlin(tp: int, width: int) -> None:
    """gpt-oss: 2,880 wide, on a hidden size of 2,880. Other formats stay as they are."""
    work = expert_work(model("gpt-oss-120b"), tp)
    assert work is not None
    whole = padded(work, precision("mxfp4"))
    assert (whole.hidden, whole.width) == (3072, width)
    assert (whole.experts, whole.active, whole.spread) == (work.experts, work.active, work.spread)
    assert all(padded(work, precision(name)) == work for name in ("fp16", "W4A16-MXFP4-Triton", "W4A16-experts"))


@pytest.mark.parametrize(("tp", "width"), [(4, 384), (8, 256)])
def test_experts_in_fp8_are_padded_to_blocks_of_scales(tp: int, width: int) -> None:
    """MiniMax-M2.5: experts 1,536 wide, 192 of them on each of 8 GPUs."""
    work = expert_work(model("minimax-m2.5"), tp)
    assert work is not None
    assert padded(work, precision("W8A8")) == work._replace(width=width)


def test_padded_experts_take_longer_by_their_weights() -> None:
    """Where products bind: in proportion to the weights of an expert."""
    step = engine("gpt-oss-120b", "mxfp4")
    work = expert_work(model("gpt-oss-120b"), 1)
    assert work is not None
    found = step.operators.by_tokens(np.array([8192.0]))["experts"]
    flops_s = (
        8192 * work.active * 2 * 3 * 3072 * 2944 / resolve(step.gpu, step.precision, 1, True).experts.flops_per_s.value
    )  # type: ignore[union-attr]
    assert found.compute_s[0] == pytest.approx(work.layers * flops_s)
