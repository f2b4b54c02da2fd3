"""FineServe's and kvcached's formulas, rooflines (Fig. 2) and block managers, evaluated: claims FS-eq-*, FS-2-*, FS-3-*,
FS-5*, FS-8-blkid, FS-C3-growth and PR-5.1-pages."""

from __future__ import annotations

from itertools import combinations

import fineserve_traces as traces
import numpy as np

from fineserve_sim.catalog import GpuSpec, PrecisionSpec, driver_costs, gpu, model, precision
from fineserve_sim.experiment.reproduce.judge import Evaluation, holds, numbers
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.policy.memory.geometry import KVGeometry, SlabPlan, plan_slabs
from fineserve_sim.policy.memory.slab import KVSlabManager
from fineserve_sim.policy.placement.mme import score_mean

TABLE_3 = (
    ("llama-3.1-8b", "W16A16"),
    ("llama-3.1-8b", "W8A8KV8"),
    ("llama-3.1-8b", "W4A16"),
    ("llama-3-8b", "W4A8KV4"),
    ("llama-3.1-70b", "W16A16"),
    ("llama-3.1-70b", "W8A8KV8"),
    ("llama-3.1-70b", "W4A16"),
    ("qwen3-32b", "W16A16"),
    ("qwen3-32b", "W8A8KV8"),
)
"""The models of FineServe's Table 3, TP 1."""


def _geometry(name: str, fmt: str, tp: int = 1, tokens_per_block: int = 16) -> KVGeometry:
    spec, numbers = model(name), precision(fmt)
    return KVGeometry(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=numbers.kv_bits / 8,
        quant_bytes_per_head=numbers.kv_quant_bytes,
        tokens_per_block=tokens_per_block,
        tp=tp,
    )


@claim("FS-eq-tokensize")
def token_sizes() -> Evaluation:
    """Bytes of a token in a layer: FP16, FP8, INT4 at TP 1, then FP16 at TP 2."""
    formats = ["W16A16", "W8A8KV8", "W4A8KV4"]
    sizes = [_geometry("llama-3.1-8b", fmt).token_layer_bytes for fmt in formats]
    halved = _geometry("llama-3.1-8b", "W16A16", tp=2).token_layer_bytes
    return numbers(
        *map(float, sizes),
        float(halved),
        detail="8 KV heads x 128 x 2 x bytes an element; every step down in precision and every doubling of TP halves it.",
    )


@claim("FS-eq-blocksize")
def block_sizes() -> Evaluation:
    """Bytes of a block of 16 tokens in a layer, quantisation parameters included."""
    sizes = [_geometry("llama-3.1-8b", fmt).block_layer_bytes for fmt in ("W16A16", "W8A8KV8", "W4A8KV4")]
    return numbers(
        *sizes,
        detail="16 tokens x TokenSize, and for QoQ an FP16 scale and zero point for each token and head of K and V.",
    )


@claim("FS-eq-slab")
def slab_loss() -> Evaluation:
    """Most bytes lost in a slab over all pairs and triples of Table 3 whose LCM stays under the cap."""
    sizes = sorted({_geometry(*entry).block_bytes for entry in TABLE_3})
    sets = [chosen for count in (1, 2, 3) for chosen in combinations(sizes, count)]
    plans = [(plan_slabs(chosen), chosen) for chosen in sets]
    under_lcm = [(plan, chosen) for plan, chosen in plans if not any(plan.is_grid(size) for size in chosen)]
    lost = max(plan.slab_bytes - plan.least_blocks(size) * size for plan, chosen in under_lcm for size in chosen)
    offsets = all(_offsets_are_affine(plan.slab_bytes, size) for plan, chosen in under_lcm for size in chosen)
    return numbers(
        float(lost) if offsets else float("nan"),
        detail=f"{len(under_lcm)} of {len(plans)} sets of up to 3 block sizes keep the LCM rule under the cap of 64 MiB; in "
        "each, every slab holds whole blocks and block id x block bytes is the byte offset.",
    )


def _offsets_are_affine(slab_bytes: int, block_bytes: int) -> bool:
    """Whether slab 1's first block, by the manager's own id, starts where slab 1 does."""
    manager = KVSlabManager(2 * slab_bytes, {0: block_bytes}, plan=SlabPlan(slab_bytes, (block_bytes,)))
    second = slab_bytes // block_bytes
    return manager.locate(0, second) == (1, 0) and second * block_bytes == slab_bytes


@claim("FS-3-slope-values")
def tokens_a_gib() -> Evaluation:
    """Tokens that a GiB of KV memory holds: the upper bound of Fig. 3's slopes."""
    formats = (
        ("llama-3.1-8b", "W16A16"),
        ("llama-3.1-8b", "W8A8KV8"),
        ("llama-3.1-8b", "W4A16"),
        ("llama-3-8b", "W4A8KV4"),
    )
    tokens = [2**30 // _geometry(*entry).token_bytes for entry in formats]
    return numbers(*tokens, detail="2^30 over the bytes of a token in all layers; AWQ keeps its KV in FP16.")


@claim("FS-eq3-props")
def score_properties() -> Evaluation:
    """The three properties of eq. 3's score, over 1,000 random sets of residents and a model that comes to them."""
    rng = np.random.default_rng(0)
    monotone = fewer_gain_more = damped = True
    for _ in range(1000):
        residents = rng.uniform(1, 10, rng.integers(1, 6)).tolist()
        mu = float(rng.uniform(10, 20))
        score, gain = score_mean(1, [*residents, mu]), score_mean(1, [*residents, mu]) - score_mean(1, residents)
        monotone &= score_mean(1, [*residents, 1.1 * mu]) > score
        crowded = residents * 2  # the same mean, twice as many
        fewer_gain_more &= gain > score_mean(1, [*crowded, mu]) - score_mean(1, crowded)
        slope = (score_mean(1, [*residents, 1e9]) - score) / (1e9 - mu)
        damped &= abs(slope * (len(residents) + 1) - 1) < 1e-6
    return holds(
        monotone and fewer_gain_more and damped,
        "The score grows with the mu of the model that comes, more where fewer models live, and by 1/n of it.",
    )


@claim("FS-8-blkid")
def block_ids() -> Evaluation:
    """Fig. 8: a slab of two FP16 or four FP8 blocks."""
    manager = KVSlabManager(8, {0: 2, 1: 1}, plan=plan_slabs([2, 1], multiple=2))
    fp8 = manager.alloc(1, 4) or []
    fp16 = manager.alloc(0, 1) or []
    places = manager.locate(0, fp16[0]), manager.locate(1, fp8[-1])
    return numbers(
        float(fp16[0]),
        float(fp8[-1]),
        detail=f"Four FP8 blocks fill slab 0, so the FP16 block opens slab 1: (slab, local) {places[0]} and {places[1]}.",
    )


@claim("FS-5a-external")
def external_fragmentation() -> Evaluation:
    """A first-fit arena of mixed blocks against slabs, after the FP8 requests' first blocks are freed."""
    fp16, fp8 = _geometry("llama-3.1-8b", "W16A16").block_bytes, _geometry("llama-3.1-8b", "W8A8KV8").block_bytes
    blocks = [fp8, fp16] * 16  # interleaved as they come, end to end, until the memory is full
    total = sum(blocks)
    holes = [size for size in blocks if size == fp8]  # every FP8 block is freed; its neighbours stay
    arena_usable = sum(hole // fp16 * fp16 for hole in holes)
    manager = KVSlabManager(total, {0: fp16, 1: fp8})
    held = []
    for size in blocks:
        ids = manager.alloc(0 if size == fp16 else 1, 1)
        if ids and size == fp8:
            held += ids
    manager.free(1, held)
    slab_usable = manager.free_blocks(0) * fp16
    return holds(
        arena_usable < fp16 <= slab_usable,
        f"Of {sum(holes)} bytes freed, FP16 blocks can use {arena_usable} in the arena and {slab_usable} in slabs.",
    )


@claim("FS-5b-internal")
def internal_fragmentation() -> Evaluation:
    """Expected tail waste of a request with the FP16 block size for FP8 (twice the tokens a block), over ShareGPT lengths."""
    source = traces.length_source("sharegpt_v3_first_turn")
    prompts, outputs = source.sample(np.random.default_rng(0), 100_000)
    tokens = prompts + outputs
    waste = {block: float((-tokens % block).mean()) for block in (16, 32, 64)}
    return numbers(
        waste[32] / waste[16],
        detail=f"Tokens unused in a request's last block of 16, 32, 64 tokens: {waste[16]:.2f}, {waste[32]:.2f}, "
        f"{waste[64]:.2f}; INT4 {waste[64] / waste[16]:.2f} times. Waste is a sum over live "
        "requests, so it grows in proportion to them.",
    )


@claim("FS-C3-growth")
def page_growth() -> Evaluation:
    """One page in every tensor of a 32-layer model, by the driver costs that the simulator uses."""
    costs = driver_costs()
    tensors = 2 * model("llama-3.1-8b").layers
    return numbers(
        1000 * tensors * (costs.create_s.value + costs.map_s.value),
        detail=f"{tensors} physical pages at {1e6 * (costs.create_s.value + costs.map_s.value):.1f} us, which public reports "
        "of kvcached give and nobody here measured: an input, not evidence.",
    )


FORMATS = ("W16A16", "W8A8KV8", "W4A16", "W4A8KV4")
"""FP16, FP8, AWQ and QoQ."""

TOKENS = [2**exponent for exponent in range(13)]
"""Tokens a batch, over which a matrix product is looked at."""


def _seconds_per_weight(spec: GpuSpec, fmt: PrecisionSpec, tokens: int) -> float:
    """The roofline of a matrix product, per weight: two operations a token, or reading the weight's ideal bits."""
    return max(2 * tokens / spec.peak_flops_per_s(fmt.tensor_core), fmt.weight_bits / 8 / spec.memory_bytes_per_s)


def _relative_rates(tokens: int) -> tuple[float, ...]:
    """Rate of each format over FP16's."""
    spec = gpu("h100-sxm")
    seconds = [_seconds_per_weight(spec, precision(name), tokens) for name in FORMATS]
    return tuple(seconds[0] / each for each in seconds)


@claim("FS-2-compute")
def compute_roofs() -> Evaluation:
    """What FP8 and QoQ gain over FP16 where computing is the limit; AWQ computes as FP16 does."""
    fp16, fp8, awq, qoq = _relative_rates(TOKENS[-1])
    return numbers(
        fp8 / fp16, qoq / awq, detail=f"Peaks of the H100 at {TOKENS[-1]:,} tokens: data-sheet rates, no kernel."
    )


@claim("FS-2-memory")
def memory_roofs() -> Evaluation:
    """Rates over FP16's at one token, where reading weights is the limit."""
    fp16, fp8, awq, qoq = _relative_rates(1)
    return numbers(fp16, fp8, awq, qoq, detail="Bits of a weight alone, group scales left out.")


@claim("FS-2-qoq-region")
def qoq_envelope() -> Evaluation:
    """QoQ against the better of FP8 and AWQ at every number of tokens."""
    rates = {tokens: _relative_rates(tokens) for tokens in TOKENS}
    better = [tokens for tokens, (_, fp8, awq, qoq) in rates.items() if qoq > 1.01 * max(fp8, awq)]
    never_below = all(qoq >= 0.999 * max(fp8, awq) for _, fp8, awq, qoq in rates.values())
    return holds(
        never_below and bool(better),
        f"1 to {TOKENS[-1]:,} tokens; QoQ is strictly better at {', '.join(map(str, better))}.",
    )
