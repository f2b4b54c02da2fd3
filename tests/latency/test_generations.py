"""What engines of this year do otherwise: compiled small kernels, one attention kernel, experts padded for Marlin."""

from __future__ import annotations

import itertools
import math
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fineserve_sim.catalog import (
    Linear,
    deployment,
    expert_work,
    gpu,
    model,
    padded,
    parameters,
    precision,
    weight_bytes,
)
from fineserve_sim.latency import StepModel, measured_on
from fineserve_sim.latency.attention import IDLE_TILE_S, TAIL_SMS, TILE_ROWS, WAVE_TILES
from fineserve_sim.latency.operators import FEW_ROWS, float32_product
from fineserve_sim.latency.rates import FUSED_REACHES, compiled, resolve
from fineserve_sim.latency.tables import shipped
from tests.latency.stepkit import chunk, engine, part_s

PROFILES = Path(__file__).parents[3] / "shared" / "data" / "fleets" / "llmservingsim_bench" / "profiler_tables.tar.gz"


def test_compiled_kernels_move_memory_at_one_rate() -> None:
    """Norms, additions, rotations and activations; a step of a prompt is shorter by what they take less."""
    before, after = engine(by="vllm-cudagraph"), engine(by="vllm-0.16")
    rates = resolve(gpu("h100-sxm"), precision("fp16"), 1)
    fused = compiled(rates, gpu("h100-sxm"))
    assert fused.activation.bytes_per_s.value == fused.norm.bytes_per_s.value == FUSED_REACHES * 3.35e12
    assert 6 / fused.residual_add.bytes_per_s.value == pytest.approx(4 / fused.norm.bytes_per_s.value)  # 2 of 3 arrays
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
    idle_s = 100 * 7 * 32 * 32 * IDLE_TILE_S / 108  # of eight tiles for 500 tokens; 32 layers, 32 heads, 108 SMs
    assert part_s(tiled, *beside)["decode_attention"] == pytest.approx(tile_s + idle_s)
    assert tile_s > 2 * part_s(plain, *beside)["decode_attention"]
    device_s = tiled.device(*beside[:5], 600, 101)[0]
    assert tiled.step_s(*beside) == pytest.approx(tiled.overhead_s + 101 * tiled.sequence_s + device_s)
    hopper = [part_s(engine(by=by), *beside)["decode_attention"] for by in ("vllm-cudagraph", "vllm-0.11")]
    assert hopper[0] == hopper[1]


needs_profiles = pytest.mark.skipif(
    not PROFILES.is_file(), reason="the shared/ folder with the measured sets is absent"
)
MEASURED = {
    "rtx-4090": ("RTX4090", "meta-llama/Llama-3.1-8B", 1),
    "rtx-pro-6000-server": ("RTXPRO6000", "Qwen/Qwen3-32B", 2),
}
"""By GPU, one of the profiles of vLLM 0.19: as its folder names the GPU, model and TP degree."""


def profile(gpu_name: str, table: str) -> pd.DataFrame:
    folder, name, tp = MEASURED[gpu_name]
    with tarfile.open(PROFILES) as archive:
        file = archive.extractfile(f"profiler/perf/{folder}/{name}/bf16/tp{tp}/{table}.csv")
        assert file is not None
        return pd.read_csv(file)


def engine_on(gpu_name: str, by: str) -> StepModel:
    _, name, tp = MEASURED[gpu_name]
    device = gpu(gpu_name)
    own = model(name.split("/")[1].lower()), precision("fp16"), tp, device
    return StepModel(*own, deployment(by), measured_on(device))


@needs_profiles
@pytest.mark.parametrize(("gpu_name", "within"), [("rtx-4090", 0.11), ("rtx-pro-6000-server", 0.09)])
def test_mixed_batches_take_as_long_as_measured(gpu_name: str, within: float) -> None:
    """One layer, 8 to 128 decodes of 256 to 1,024 tokens beside a chunk of 64 to 2,048 tokens: the mean error."""
    rows = profile(gpu_name, "attention")
    rows = rows[(rows.prefill_chunk >= 64) & rows.n_decode.between(8, 128) & rows.kv_decode.between(256, 1024)]
    rows = rows[rows.kv_prefill <= 2048]
    plain, tiled = (engine_on(gpu_name, by) for by in ("vllm-cudagraph", "vllm-0.16"))
    off = []
    for step in (plain, tiled):
        found = []
        for tokens, behind, decodes, context, measured_us in rows.itertuples(index=False):
            pairs = tokens * behind + tokens * (tokens + 1) / 2
            parts = step.attention_s(decodes, (context - 1) * decodes, tokens, pairs, behind)
            found.append(sum(parts) / step.model.layers * 1e6 / measured_us - 1)
        off.append(float(np.abs(found).mean()))
    assert len(rows) > 300 and off[0] > 2.5 * off[1]
    assert off[1] == pytest.approx(within, abs=0.005)  # docs/fidelity.md


@needs_profiles
@pytest.mark.parametrize("gpu_name", MEASURED)
def test_an_idle_tile_takes_as_long_as_measured(gpu_name: str) -> None:
    """What 64 and 128 decodes take longer beside 2,048 tokens than beside 64, by the tiles that have no rows."""
    rows = profile(gpu_name, "attention")
    rows = rows[(rows.kv_prefill == 0) & rows.kv_decode.isin([0, 256, 1024])]
    took_us = {(tokens, decodes, keys): us for tokens, _, decodes, keys, us in rows.itertuples(index=False)}
    found = []
    for decodes, keys in itertools.product((64, 128), (256, 1024)):
        beside_us = [took_us[tokens, decodes, keys] - took_us[tokens, 0, 0] for tokens in (64, 2048)]
        tiles = (
            decodes * (2048 - 64) / TILE_ROWS * engine_on(gpu_name, "vllm-0.16").model.q_heads / MEASURED[gpu_name][2]
        )
        found.append((beside_us[1] - beside_us[0]) * 1e-6 / tiles * (gpu(gpu_name).tiling_sms or 0))
    assert float(np.median(found)) == pytest.approx(IDLE_TILE_S, rel=0.05)


@needs_profiles
@pytest.mark.parametrize("gpu_name", MEASURED)
def test_the_longest_of_uneven_decodes_ends_last_as_measured(gpu_name: str) -> None:
    """A few decodes of four times the context: nothing below two tiles an SM, then a time that does not grow with the batch."""
    rows, step = profile(gpu_name, "skew"), engine_on(gpu_name, "vllm-0.16")
    rows = rows[(rows.pc == 0) & (rows.kv_mean <= 2500) & (rows.ratio <= 0.25) & (rows.t_max_us > 1.3 * rows.t_mean_us)]
    sms, heads = gpu(gpu_name).tiling_sms or 0, step.model.kv_heads // step.tp
    more_tokens = (rows.t_skew_us / rows.t_mean_us - 1) * rows.kv_mean * rows.n / (rows.kv_big - rows.kv_mean)
    found = (more_tokens * heads / sms).groupby(rows.n).median()
    tiles = found.index * heads / sms
    assert (found[tiles < WAVE_TILES].abs() < 0.02).all()
    beyond = found[(tiles >= WAVE_TILES) & (tiles < 9)].tolist()
    assert len(beyond) > 1 and beyond == pytest.approx([TAIL_SMS] * len(beyond), rel=0.45)
    assert step.tail is not None and step.tail.least == math.ceil(WAVE_TILES * sms / heads)
    assert step.tail.tokens(100, 1500, 100_000) == int(TAIL_SMS * sms / heads * 500)


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


CUBLAS_GB200_US = {
    4: 20.2,
    8: 16.7,
    16: 22.3,
    32: 63.2,
    48: 63.4,
    64: 63.3,
    96: 64.1,
    128: 69.3,
    256: 77.8,
    512: 96.8,
    1024: 111,
}
"""Microseconds of a product in 32 bits, 6,144 to 256, by rows, on a GB200; vLLM pull request 47973."""
GB200_FLOPS_PER_S = 80e12
"""Of its CUDA cores (NVIDIA's data sheet of the GB200 NVL72, divided by 72)."""


def test_products_in_32_bits_take_the_depth_of_their_inputs_and_the_flops_of_cuda_cores() -> None:
    rows, measured_us = (
        np.array(list(found), dtype=np.float64) for found in zip(*CUBLAS_GB200_US.items(), strict=True)
    )
    found_us = float32_product(Linear(6144, 256), rows, GB200_FLOPS_PER_S).seconds * 1e6
    assert found_us == pytest.approx(measured_us, rel=0.2)
    assert found_us[rows > FEW_ROWS] == pytest.approx(measured_us[rows > FEW_ROWS], rel=0.15)


def test_a_router_in_32_bits_is_not_looked_up_among_products_in_16() -> None:
    wide = model("minimax-m2.5")
    narrow = wide.model_copy(update={"float32_router": False})
    rows, of_engine = (
        np.array([8.0, 64.0, 8192.0]),
        (precision("W8A8-block"), 8, gpu("h200-sxm"), deployment("vllm-0.16")),
    )
    steps = [StepModel(found, *of_engine, shipped()) for found in (narrow, wide)]
    theirs, ours = (step.operators.by_tokens(rows)["router"].seconds / wide.layers for step in steps)
    assert (ours > 2 * theirs).all() and ours[-1] == pytest.approx(2 * 8192 * 3072 * 256 / 67e12, rel=0.4)


def test_weights_of_a_router_in_32_bits_take_twice_the_bytes() -> None:
    wide = model("minimax-m2.5")
    narrow = wide.model_copy(update={"float32_router": False})
    more_bytes = [weight_bytes(one, precision("W8A8-block"), 4) for one in (wide, narrow)]
    assert more_bytes[0] - more_bytes[1] == 62 * 3072 * 256 * 2
    assert parameters(wide) == parameters(narrow)
