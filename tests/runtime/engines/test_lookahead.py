"""Microbatches of a real pipeline by the core's lookahead: equal by cost, complete, and void where a step got less."""

from __future__ import annotations

from collections import Counter

import pytest
from fineserve_runtime.engines.lookahead import LookaheadParts

from fineserve_sim.policy.groups.microbatch import Chunk, ChunkCost

COST = ChunkCost(1e-6, 2e-5, 3e-4)
WORK = [Chunk(1, 0, 300), Chunk(2, 100, 200), Chunk(3, 0, 524)]
BUDGET = 256


def parts_with_costs() -> LookaheadParts:
    """Its cost is that of the steps that it has seen."""
    parts = LookaheadParts(BUDGET, "balanced")
    for prefix in (0, 100, 400):
        for tokens in (16, 64, 250):
            chunks = [Chunk(9, prefix, tokens), Chunk(8, 2 * prefix, 1)]
            parts.observe(chunks, COST.batch(chunks))
    return parts


def steps(parts: LookaheadParts, work: list[Chunk]) -> list[dict[int, int]]:
    """Steps until the work is done; each gets all that it may."""
    left = {chunk.request: chunk for chunk in work}
    found = []
    while left:
        parts.begin(list(left.values()))
        budget, got = BUDGET, dict[int, int]()
        for id, (_, prefix, tokens) in list(left.items()):
            if (size := min(budget, parts.share(id, tokens))) == 0:
                continue
            budget, got[id] = budget - size, size
            left[id] = Chunk(id, prefix + size, tokens - size)
            if size == tokens:
                del left[id]
        parts.end(got)
        found.append(got)
    return found


def test_the_cost_of_chunks_is_found_from_steps() -> None:
    cost = parts_with_costs().cost
    assert (cost.alpha, cost.beta, cost.gamma) == pytest.approx((COST.alpha, COST.beta, COST.gamma))


def test_all_that_waits_is_cut_into_parts_of_equal_cost_within_the_budget() -> None:
    found = steps(parts_with_costs(), WORK)
    done = Counter[int]()
    costs = []
    prefixes = {chunk.request: chunk.prefix for chunk in WORK}
    for step in found:
        costs.append(COST.batch([Chunk(id, prefixes[id] + done[id], tokens) for id, tokens in step.items()]))
        done.update(step)
    assert done == {chunk.request: chunk.tokens for chunk in WORK}
    assert len(found) == 8
    assert max(costs) <= 1.1 * min(costs)  # a cut is a token, and a chunk more, away from its place
    assert all(sum(step.values()) <= BUDGET for step in found)


def test_before_the_first_step_and_with_little_work_the_token_count_decides() -> None:
    assert [sum(step.values()) for step in steps(LookaheadParts(BUDGET, "balanced"), WORK)] == [256, 256, 256, 256]
    little = [Chunk(1, 0, 100), Chunk(2, 0, 155)]
    assert steps(parts_with_costs(), little) == [{1: 100, 2: 155}]


def test_a_plan_of_which_a_step_got_less_is_void() -> None:
    parts = parts_with_costs()
    parts.begin(WORK)
    planned = parts.share(1, 300)
    assert 0 < planned < 300
    parts.end({1: planned - 1})
    parts.begin([Chunk(2, 0, 40)])
    assert parts.share(2, 40) == 40


def test_a_decode_never_waits_for_its_part() -> None:
    parts = parts_with_costs()
    parts.begin(WORK)
    assert parts.share(77, 1) == 1
    assert parts.share(77, 2) == 0
