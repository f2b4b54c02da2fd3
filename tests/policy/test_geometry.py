"""KV geometry against the papers' equations and published sizes; slab plans against brute force."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.memory.geometry import MAX_LCM_BYTES, KVGeometry, SlabPlan, plan_slabs

KIB, MIB = 2**10, 2**20
FP16, FP8, INT4 = 2, 1, 0.5

LLAMA3_8B_FP16 = KVGeometry(32, 8, 128, FP16)
LLAMA3_8B_FP8 = KVGeometry(32, 8, 128, FP8)
LLAMA3_8B_QOQ = KVGeometry(32, 8, 128, INT4, quant_bytes_per_head=4)
LLAMA3_70B_FP16 = KVGeometry(80, 8, 128, FP16)
QWEN3_32B_FP16 = KVGeometry(64, 8, 128, FP16)


@pytest.mark.parametrize(
    ("geometry", "token_kib"),
    [
        (LLAMA3_8B_FP16, 128),
        (LLAMA3_8B_FP8, 64),
        (LLAMA3_8B_QOQ, 34),
        (LLAMA3_70B_FP16, 320),
        (QWEN3_32B_FP16, 256),
        (KVGeometry(48, 8, 128, FP16), 192),  # Qwen2.5-14B; KunServe prints the same
        (KVGeometry(80, 8, 128, FP16), 320),  # Qwen2.5-72B
        (KVGeometry(32, 4, 128, FP16), 64),  # Yi-6B
        (KVGeometry(48, 4, 128, FP16), 96),  # Yi-9B
        (KVGeometry(60, 8, 128, FP16), 240),  # Yi-34B
        (KVGeometry(32, 32, 128, FP16), 512),  # Llama-2-7B, no grouped queries
    ],
)
def test_token_bytes_of_known_models(geometry: KVGeometry, token_kib: int) -> None:
    assert geometry.token_bytes == token_kib * KIB


@pytest.mark.parametrize(("element_bytes", "tp1"), [(FP16, 4096), (FP8, 2048), (INT4, 1024)])
def test_token_size_halves_per_precision_step_and_per_tp_doubling(element_bytes: float, tp1: int) -> None:
    """Claim FS-eq-tokensize."""
    sizes = [KVGeometry(32, 8, 128, element_bytes, tp=tp).token_layer_bytes for tp in (1, 2, 4, 8, 16, 32)]
    assert sizes == [tp1, tp1 // 2, tp1 // 4, tp1 // 8, tp1 // 8, tp1 // 8]  # past 8 GPUs a head is replicated


def test_block_bytes_include_quantisation_parameters() -> None:
    """Claim FS-eq-blocksize, a layer: 16 x 4096; 16 x 2048; 16 x (1024 + 8 heads x (K, V) x 4)."""
    layer = [g.block_layer_bytes for g in (LLAMA3_8B_FP16, LLAMA3_8B_FP8, LLAMA3_8B_QOQ)]
    assert layer == [65536, 32768, 16384 + 1024]
    assert LLAMA3_8B_QOQ.block_bytes == 544 * KIB


def test_tokens_per_gib_are_the_slopes_of_figure_3() -> None:
    """Claim FS-3-slope-values: tokens that fit 1 GiB; QoQ without and with parameters."""
    plain_int4 = KVGeometry(32, 8, 128, INT4)
    geometries = (LLAMA3_8B_FP16, LLAMA3_8B_FP8, plain_int4, LLAMA3_8B_QOQ)
    assert [2**30 // g.token_bytes for g in geometries] == [8192, 16384, 32768, 30840]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert LLAMA3_8B_FP16.blocks_for_tokens(tokens) == blocks


@pytest.mark.parametrize("scale", [2, 4])
def test_one_block_size_for_all_wastes_in_proportion_to_the_precision(scale: int) -> None:
    """Claim FS-5b: blocks of the FP16 size hold 2x tokens of FP8 and 4x of INT4. Over all lengths modulo the block, the
    tail wastes (B - 1) / 2 tokens a request: nearly 2x and 4x the waste, growing with the number of requests."""

    def wasted_tokens(geometry: KVGeometry, lengths: range) -> int:
        return sum(geometry.blocks_for_tokens(n) * geometry.tokens_per_block - n for n in lengths)

    low = KVGeometry(32, 8, 128, FP16 / scale)
    fixed = KVGeometry(32, 8, 128, FP16 / scale, tokens_per_block=LLAMA3_8B_FP16.block_bytes // low.token_bytes)
    assert fixed.tokens_per_block == 16 * scale and fixed.block_bytes == LLAMA3_8B_FP16.block_bytes
    lengths = range(1, 641)  # a whole number of blocks of every size
    own, waste = wasted_tokens(low, lengths), wasted_tokens(fixed, lengths)
    assert own == 640 * 15 / 2 and waste == 640 * (16 * scale - 1) / 2
    assert waste / own == pytest.approx(scale, rel=0.06)
    assert wasted_tokens(fixed, range(1, 1281)) == 2 * waste


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"tokens_per_block": 0}, "tokens_per_block is 0"),
        ({"kv_heads": 8, "tp": 3}, "8 KV heads do not spread over tp=3"),
        ({"kv_heads": 6, "tp": 4}, "do not spread"),
        ({"element_bytes": 0.3}, "element_bytes=0.3"),
        ({"element_bytes": 0}, "positive whole number"),
        ({"quant_bytes_per_head": -1}, "quant_bytes_per_head is -1"),
    ],
)
def test_impossible_geometry_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVGeometry(**({"layers": 32, "kv_heads": 8, "head_dim": 1, "element_bytes": 2} | fields))  # type: ignore[arg-type]


# -- slab plans


@pytest.mark.parametrize(
    ("models", "slab_mib"),
    [
        ([LLAMA3_8B_FP16, LLAMA3_8B_FP8], 2),
        ([LLAMA3_8B_FP16, LLAMA3_8B_FP8, LLAMA3_70B_FP16], 10),
        ([LLAMA3_8B_FP16, LLAMA3_8B_FP8, LLAMA3_70B_FP16, QWEN3_32B_FP16], 20),
        ([LLAMA3_8B_FP16, LLAMA3_8B_QOQ], 34),
        ([LLAMA3_8B_FP16, LLAMA3_8B_FP8, LLAMA3_70B_FP16, QWEN3_32B_FP16, LLAMA3_8B_QOQ], 340),
    ],
)
def test_lcm_growth(models: list[KVGeometry], slab_mib: int) -> None:
    plan = plan_slabs((model.block_bytes for model in models), cap_bytes=2**40)
    assert plan.slab_bytes == slab_mib * MIB
    assert not any(plan.is_grid(key) for key in plan.block_bytes)


def test_above_the_cap_the_key_that_lowers_the_lcm_most_is_dropped() -> None:
    """All five models: without QoQ's 544 KiB the LCM is 20 MiB, without 70B's 5 MiB it is 68, else still 340."""
    five = (LLAMA3_8B_FP16, LLAMA3_8B_FP8, LLAMA3_70B_FP16, QWEN3_32B_FP16, LLAMA3_8B_QOQ)
    plan = plan_slabs(model.block_bytes for model in five)
    assert plan.slab_bytes == 20 * MIB <= MAX_LCM_BYTES
    assert [key for key in plan.block_bytes if plan.is_grid(key)] == [544 * KIB]
    # 17 slabs are a period: 340 MiB / 544 KiB = 640 grid blocks, of which 16 straddle: 2.5 % is lost.
    spans = [plan.span(544 * KIB, slab) for slab in range(17)]
    assert sum(end - first for first, end in spans) == 624


def test_grid_spans_by_hand() -> None:
    """Slabs of 10 bytes, blocks of 4: the grid 0 4 8 12 16 20 ... loses block 2 (bytes 8 to 11)."""
    plan = SlabPlan(10, (4, 10))
    assert [plan.span(4, slab) for slab in range(4)] == [(0, 2), (3, 5), (5, 7), (8, 10)]
    assert [plan.span(10, slab) for slab in range(2)] == [(0, 1), (1, 2)]


def test_the_rule_repeats_until_the_lcm_is_below_the_cap() -> None:
    """{2, 7, 11, 13}: without 13 the LCM is 154, above 30; then without 11 it is 14. Two blocks of 13 need 2 x 14."""
    plan = plan_slabs([7, 2, 13, 11], cap_bytes=30)
    assert plan.slab_bytes == 28
    assert [key for key in plan.block_bytes if plan.is_grid(key)] == [11, 13]


def test_slabs_grow_beyond_the_cap_when_a_dropped_block_would_not_fit() -> None:
    """{6, 10, 15} is cut down to 10, but a slab must hold two blocks of 15."""
    assert plan_slabs([6, 10, 15], cap_bytes=12).slab_bytes == 30


def test_a_lone_key_above_the_cap_keeps_its_slab() -> None:
    assert plan_slabs([100, 100], cap_bytes=64) == SlabPlan(100, (100,))


def test_multiple_is_applied_to_the_lcm() -> None:
    assert plan_slabs([4, 6], multiple=3) == SlabPlan(36, (4, 6))


@pytest.mark.parametrize("sizes", [[], [0], [4, -1]])
def test_impossible_block_sizes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="block sizes"):
        plan_slabs(sizes)


@pytest.mark.parametrize("options", [{"cap_bytes": 0}, {"multiple": 0}])
def test_impossible_plan_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_slabs([4], **options)


SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=6)


@given(SIZES, st.integers(1, 200), st.integers(1, 4))
def test_plan_laws(sizes: list[int], cap: int, multiple: int) -> None:
    plan = plan_slabs(sizes, cap_bytes=cap, multiple=multiple)
    assert plan.block_bytes == tuple(sorted(set(sizes)))
    if (lcm := math.lcm(*sizes)) <= cap:
        assert plan.slab_bytes == lcm * multiple  # claim FS-eq-slab: no byte is lost under the LCM rule
    for key in plan.block_bytes:
        counts: list[int] = []
        for slab in range(70):
            low, high = slab * plan.slab_bytes, (slab + 1) * plan.slab_bytes
            inside = [b for b in range(low // key, high // key + 1) if low <= b * key and (b + 1) * key <= high]
            assert list(range(*plan.span(key, slab))) == inside
            assert plan.slab_bytes - len(inside) * key < 2 * key and inside
            assert plan.least_blocks(key) <= len(inside) <= plan.least_blocks(key) + 1
            if not plan.is_grid(key):
                assert inside[0] == slab * (plan.slab_bytes // key) and len(inside) * key == plan.slab_bytes
            counts.append(len(inside))
        period = counts[: key // math.gcd(key, plan.slab_bytes)]
        assert plan.slab_bytes - sum(period) * key / len(period) < key  # on average, less than a block is lost
