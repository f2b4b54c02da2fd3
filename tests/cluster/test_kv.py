"""The blocks of one engine: counted, of stages that share their instances, and named where prefixes are cached."""

from __future__ import annotations

import pytest

from fineserve_sim.cluster.engine.kv import CountedBlocks, PrefixBlocks
from fineserve_sim.cluster.engine.sequence import Prefix, SequenceState
from fineserve_sim.policy.memory.paged import BytePool, PagedPool


def sequence(prompt_tokens: int, *ids: int, cached: int = 0) -> SequenceState:
    """A sequence whose prefix is known by one id for each four tokens."""
    state = SequenceState(0, 0.0, prompt_tokens, 1)
    state.prefix = Prefix(ids, 4, 4 * len(ids)) if ids else None
    state.cached_tokens = cached
    return state


def test_finished_blocks_serve_the_next_request_and_are_given_up_on_demand() -> None:
    ranks = [PagedPool(16, BytePool(64)), PagedPool(10, BytePool(45))]
    kv = PrefixBlocks(ranks, 4)
    first = sequence(12, 7, 8, 9)
    assert kv.reuse(first) == 0 and kv.grow(first, 12) and kv.free_blocks() == 1
    first.cached_tokens = 12
    kv.release(first)
    assert kv.used_bytes() == 3 * 26 and kv.used_blocks() == 0 and kv.free_blocks() == 4
    second = sequence(12, 7, 8, 9)
    assert kv.reuse(second) == 8, "one token must be computed to yield the next"
    assert kv.free_blocks() == 2 and kv.used_blocks() == 2
    third = sequence(8)
    assert kv.grow(third, 8) and kv.free_blocks() == 0, "the record of the last block went"
    assert not kv.grow(second, 12)
    kv.release(third, computed=False)
    kv.release(second)
    kv.forget()
    assert kv.used_bytes() == 0 and [pool.free_blocks for pool in ranks] == [4, 4]


def test_records_behind_which_another_sequence_goes_on_are_free_memory() -> None:
    """Two requests of one prefix start side by side, and the first one ends."""
    pool = PagedPool(16, BytePool(64))
    kv = PrefixBlocks([pool], 4)
    first, second, third = sequence(5, 7), sequence(9, 7, 8), sequence(8)
    for each, tokens in ((first, 4), (second, 8)):
        assert kv.grow(each, tokens)
        each.cached_tokens = tokens
        kv.keep(each)
    kv.release(first)
    assert kv.free_blocks() == 2 and kv.grow(third, 8) and pool.free_blocks == 0
    kv.release(second)
    kv.release(third)
    kv.forget()
    assert kv.used_bytes() == 0


def test_tokens_under_way_are_not_kept() -> None:
    kv = PrefixBlocks([PagedPool(16, BytePool(64))], 4)
    lost = sequence(12, 7, 8, 9)
    assert kv.grow(lost, 12)
    lost.cached_tokens = 12
    kv.release(lost, computed=False)
    assert kv.reuse(sequence(12, 7, 8, 9)) == 0 and kv.used_bytes() == 0


def test_the_tightest_stage_bounds_an_engine_and_another_may_draw_beside_it() -> None:
    here, there = BytePool(100), BytePool(60)
    pipeline = CountedBlocks([PagedPool(10, here), PagedPool(10, there)], 4)
    alone = CountedBlocks([PagedPool(20, here)], 4)
    assert (pipeline.free_blocks(), alone.free_blocks()) == (6, 5)
    assert alone.take(3) and pipeline.free_blocks() == 4 and pipeline.capacity_blocks() == 6
    assert pipeline.take(4) and not alone.take(1)
    assert (here.used_bytes, there.used_bytes, pipeline.used_blocks(), alone.used_blocks()) == (100, 40, 4, 3)
    there.limit_bytes = 40
    pipeline.give(4)
    assert pipeline.capacity_blocks() == 4 and pipeline.pools[0].used_bytes == 0 and alone.pools[0].used_bytes == 60
    with pytest.raises(ValueError, match="4 blocks given back; it must be 0 to 3"):
        alone.give(4)


def test_what_comes_from_elsewhere_takes_all_its_blocks_or_none() -> None:
    kv = CountedBlocks([PagedPool(16, BytePool(64))], 4)
    assert kv.hold(sequence(12, cached=13), {}) and kv.free_blocks() == 0
    assert not kv.hold(sequence(12, cached=1), {})


def test_what_comes_from_elsewhere_with_the_same_prefix_shares_its_blocks() -> None:
    """Of nobody else, though, before it has come: a block under way is no use to a request that begins."""
    kv, came = PrefixBlocks([PagedPool(16, BytePool(80))], 4), dict[tuple[int, int], int]()
    first, second, third = sequence(12, 7, 8, cached=9), sequence(12, 7, 9, cached=10), sequence(12, 7, 8, 9, cached=12)
    assert kv.hold(first, came) and kv.free_blocks() == 2
    assert kv.hold(second, came) and kv.free_blocks() == 0
    assert first.blocks[0][0] == second.blocks[0][0] and not set(first.blocks[0][1:]) & set(second.blocks[0])
    assert not kv.hold(third, came) and not third.blocks and kv.used_bytes() == 80
    assert kv.reuse(sequence(12, 7, 8, 9)) == 0
    kv.keep(first)
    assert kv.reuse(third) == 8 and third.blocks[0] == first.blocks[0][:2]
    for each in (first, second, third):
        kv.release(each, computed=False)
    kv.forget()
    assert kv.used_bytes() == 0
