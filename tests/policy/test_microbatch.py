"""Microbatches: conservation and order for all formers, the balance of lookahead, and what the printed listing loses."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.groups.microbatch import (
    Chunk,
    ChunkCost,
    LookaheadMode,
    lookahead,
    split,
    token_count,
    tokens_of,
)

PER_TOKEN = ChunkCost(alpha=0.0, beta=1.0, gamma=0.0)
MODES: tuple[LookaheadMode, ...] = ("balanced", "literal", "direct")

work_lists = st.lists(
    st.builds(Chunk, st.integers(0, 0), st.integers(0, 5000), st.integers(1, 9000)), min_size=1, max_size=12
).map(lambda chunks: [Chunk(i, c.prefix, c.tokens) for i, c in enumerate(chunks)])
costs = st.builds(ChunkCost, st.floats(0, 1e-3), st.floats(0.5, 2), st.floats(0, 5), st.just(0.0))


def assert_conserved(work: list[Chunk], batches: list[list[Chunk]]) -> None:
    """Launched in order, the chunks of each request continue each other and make up all of it, requests in queue order."""
    assert all(batches)
    flat = [chunk for batch in batches for chunk in batch]
    assert [chunk.request for chunk in flat] == sorted(chunk.request for chunk in flat)
    for item in work:
        chunks = [chunk for chunk in flat if chunk.request == item.request]
        done = item.prefix
        for chunk in chunks:
            assert chunk.prefix == done and chunk.tokens > 0
            done += chunk.tokens
        assert done == item.prefix + item.tokens


@given(work_lists, costs, st.integers(64, 4096), st.sampled_from(MODES))
def test_lookahead_loses_and_reorders_nothing(
    work: list[Chunk], cost: ChunkCost, min_tokens: int, mode: LookaheadMode
) -> None:
    assert_conserved(work, lookahead(work, min_tokens, cost, mode))


@given(work_lists, st.integers(1, 4096))
def test_token_count_fills_every_microbatch_but_the_last(work: list[Chunk], budget: int) -> None:
    batches = token_count(work, budget)
    assert_conserved(work, batches)
    assert all(tokens_of(batch) == budget for batch in batches[:-1])
    assert tokens_of(batches[-1]) <= budget


@given(work_lists, costs, st.floats(0, 1))
def test_split_spends_at_most_the_target_and_misses_it_by_less_than_a_token(
    work: list[Chunk], cost: ChunkCost, part: float
) -> None:
    target = cost.batch(work) * part
    first, second = split(work, target, cost)
    assert cost.batch(first) <= target * (1 + 1e-9)
    if second:
        head = second[0]
        grown = [*first, Chunk(head.request, head.prefix, 1)]
        if first and first[-1].request == head.request:
            grown = [*first[:-1], Chunk(head.request, first[-1].prefix, first[-1].tokens + 1)]
        assert cost.batch(grown) > target * (1 - 1e-9)


def test_fig_9_token_count_puts_four_short_requests_beside_one_long() -> None:
    work = [Chunk(request, 0, 1) for request in range(4)] + [Chunk(4, 0, 4)]
    first, second = token_count(work, 4)
    assert [chunk.request for chunk in first] == [0, 1, 2, 3]
    assert second == [Chunk(4, 0, 4)]
    quadratic = ChunkCost(alpha=1.0, beta=1.0, gamma=0.0)
    assert quadratic.batch(second) > 1.5 * quadratic.batch(first)
    left, right = lookahead(work, 4, quadratic)
    unequal = abs(quadratic.batch(second) - quadratic.batch(first))
    assert abs(quadratic.batch(right) - quadratic.batch(left)) < unequal


def _prompts(seed: int) -> list[Chunk]:
    """Forty log-normal prompts of about 6K tokens in the mean."""
    rng = random.Random(seed)
    return [Chunk(i, 0, max(64, round(rng.lognormvariate(8.3, 0.9)))) for i in range(40)]


def _spread(batches: list[list[Chunk]], cost: ChunkCost) -> float:
    found = [cost.batch(batch) for batch in batches]
    return max(found) / min(found)


@pytest.mark.parametrize("alpha", [5e-5, 1e-4])
@pytest.mark.parametrize("seed", range(3))
def test_worked_example_balance_one_against_two_and_more(alpha: float, seed: int) -> None:
    cost, work = ChunkCost(alpha, 1.0, 0.0), _prompts(seed)
    assert _spread(lookahead(work, 2048, cost), cost) < 1.02
    assert _spread(lookahead(work, 2048, cost, "direct"), cost) < 1.02
    assert _spread(lookahead(work, 2048, cost, "literal"), cost) >= 1.9
    assert _spread(token_count(work, 2048)[:-1], cost) > 1.5


def test_the_listing_goes_below_the_minimum_and_the_default_does_so_only_with_late_chunks() -> None:
    cost, work = ChunkCost(1e-4, 1.0, 0.0), _prompts(0)
    assert min(map(tokens_of, lookahead(work, 2048, cost, "literal"))) < 2048
    flat = lookahead(work, 2048, PER_TOKEN)
    assert min(map(tokens_of, flat)) >= 2048


def test_number_of_microbatches() -> None:
    work = [Chunk(0, 0, 10_000)]
    assert len(lookahead(work, 2048, PER_TOKEN)) == 4  # 2 ** floor(log2(4.88))
    assert len(lookahead(work, 2048, PER_TOKEN, "direct")) == 5
    assert len(lookahead(work, 2048, PER_TOKEN, "literal")) == 8


def test_little_work_stays_together() -> None:
    assert lookahead([Chunk(0, 0, 100), Chunk(1, 50, 1)], 2048, PER_TOKEN) == [[Chunk(0, 0, 100), Chunk(1, 50, 1)]]
    assert lookahead([], 2048, PER_TOKEN) == []


def test_the_second_half_of_a_prompt_costs_more() -> None:
    cost = ChunkCost(alpha=1e-4, beta=1.0, gamma=3.0)
    assert cost.chunk(2048, 2048) > cost.chunk(0, 2048)
    whole = cost.chunk(0, 2048) + cost.chunk(2048, 2048)
    assert whole == pytest.approx(cost.chunk(0, 4096) + cost.gamma)  # only gamma is paid twice


def test_shared_weights_are_paid_once() -> None:
    cost = ChunkCost(0.0, 1.0, 5.0, shared=4.0)
    assert cost.batch([Chunk(0, 0, 1), Chunk(1, 0, 1), Chunk(2, 0, 1)]) == 3 * 6 - 2 * 4
    assert cost.batch([]) == 0.0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        lookahead([Chunk(0, 0, 1)], 0, PER_TOKEN)
    with pytest.raises(ValueError, match="at least 1"):
        token_count([Chunk(0, 0, 1)], 0)
