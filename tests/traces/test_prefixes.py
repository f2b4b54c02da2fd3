"""Conversations and shared prefixes: whole prompts, and ids that are equal exactly where tokens are."""

from __future__ import annotations

import numpy as np
import pytest
from fineserve_traces import Trace, TraceError, conversations, prefix_hit_ratio
from hypothesis import given
from hypothesis import strategies as st


def opening(prompts: list[int], outputs: list[int]) -> Trace:
    return Trace(
        arrival_s=np.arange(len(prompts), dtype=float),
        model=np.zeros(len(prompts), dtype=np.int32),
        prompt_tokens=np.array(prompts),
        output_tokens=np.array(outputs),
        models=("m",),
        source="test",
    )


def test_two_sessions_of_three_turns() -> None:
    trace = conversations(opening([4, 6], [4, 2]), turns=3, gap_s=0.4, hash_tokens=4)
    assert trace.arrival_s.tolist() == [0.0, 0.4, 0.8, 1.0, 1.4, 1.8]
    assert trace.prompt_tokens.tolist() == [4, 12, 20, 6, 14, 22]
    assert trace.output_tokens.tolist() == [4, 4, 4, 2, 2, 2]
    assert trace.prefix_hashes is not None and trace.prefix_block_tokens == 4
    first, second, third, other, *_ = trace.prefix_hashes
    assert trace.prefix_tokens is not None
    assert trace.prefix_tokens.tolist() == (trace.prompt_tokens + trace.output_tokens).tolist()
    assert len(first) == 2 and second[:2] == first and third[:4] == second  # the answer is part of the next prompt
    assert not set(third) & set(other)
    assert prefix_hit_ratio(trace) == (8 + 16 + 8 + 16) / 78


def test_a_turn_finds_all_that_was_said_before_it() -> None:
    """Turns of 3 + 2 tokens: the second and third prompt, 8 and 13 tokens, begin with 5 and 10 that are known."""
    trace = conversations(opening([3], [2]), turns=3, gap_s=1.0, hash_tokens=4)
    assert trace.prompt_tokens.tolist() == [3, 8, 13]
    assert prefix_hit_ratio(trace) == (5 + 10) / 24


def test_a_prefix_shared_by_all() -> None:
    trace = conversations(opening([8, 8], [1, 1]), shared_tokens=12, hash_tokens=4)
    assert trace.prompt_tokens.tolist() == [20, 20]
    a, b = trace.prefix_hashes or ()
    assert a[:3] == b[:3] and not set(a[3:]) & set(b[3:]) and len(a) == len(b) == 6


def test_without_anything_it_is_the_same_trace() -> None:
    plain = opening([5, 7], [3, 4])
    trace = conversations(plain)
    for column in ("arrival_s", "prompt_tokens", "output_tokens", "model"):
        assert np.array_equal(getattr(trace, column), getattr(plain, column))


@pytest.mark.parametrize("wrong", [{"turns": 0}, {"gap_s": -1.0}, {"shared_tokens": 5, "hash_tokens": 4}])
def test_refusals(wrong: dict[str, float]) -> None:
    with pytest.raises(TraceError, match="conversations of"):
        conversations(opening([1], [1]), **wrong)  # type: ignore[arg-type]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=4),
    turns=st.integers(1, 4),
    shared=st.integers(0, 3),
    gap_s=st.sampled_from([0.0, 0.5, 9.0]),
)
def test_ids_are_equal_where_tokens_are(lengths: list[tuple[int, int]], turns: int, shared: int, gap_s: float) -> None:
    """Two requests share ids up to the shared prefix, or within a session up to all that was said in the earlier turn."""
    trace = conversations(
        opening(*map(list, zip(*lengths, strict=True))),
        turns=turns,
        gap_s=gap_s,
        shared_tokens=4 * shared,
        hash_tokens=4,
    )
    assert trace.prefix_hashes is not None
    assert np.all(np.diff(trace.arrival_s) >= 0)
    for ids, prompt, output in zip(trace.prefix_hashes, trace.prompt_tokens, trace.output_tokens, strict=True):
        assert len(ids) == -(-(prompt + output) // 4) and len(set(ids)) == len(ids)
    for one in trace.prefix_hashes:
        for other in trace.prefix_hashes:
            common = sum(1 for _ in zip(one, other, strict=False) if _[0] == _[1])
            assert common in (min(len(one), len(other)), min(shared, len(one), len(other)))
