"""The trace schema: what it accepts, what it refuses and how it says so, and the operations on traces."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from fineserve_traces import Trace, TraceError, merge, read_trace
from hypothesis import given
from hypothesis import strategies as st


def trace_of(arrival_s, name="t", model="m", hashes=None):
    n = len(arrival_s)
    return Trace(
        np.array(arrival_s, dtype=float),
        np.zeros(n, dtype=int),
        np.full(n, 20),
        np.full(n, 3),
        (model,),
        name,
        hashes,
        10 if hashes else None,
    )


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("arrival_s", [0, 1, np.nan, 3], "small, row 3, column arrival_s: nan is not a time"),
        ("arrival_s", [0, 1, 2, np.inf], "small, row 4, column arrival_s: inf is not a time"),
        ("arrival_s", [-1, 1, 2, 3], "small, row 1, column arrival_s: -1 is negative"),
        ("arrival_s", [0, 5, 4.5, 6], "small, row 3, column arrival_s: 4.5 is earlier than the row before it"),
        ("prompt_tokens", [5, 0, 1, 1], "small, row 2, column prompt_tokens: 0 is too few tokens"),
        ("prompt_tokens", [5, 6, np.nan, 1], "small, row 3, column prompt_tokens: nan is not a number of tokens"),
        ("output_tokens", [5, 6, -7, 1], "small, row 3, column output_tokens: -7 is too few tokens"),
        ("output_tokens", [5, 6, 7, 1.5], "small, row 4, column output_tokens: 1.5 is not a whole number of tokens"),
        ("output_tokens", [5, 6, 7], "small, column output_tokens: 3 rows, but arrival_s has 4"),
        ("output_tokens", ["5", "6", "7", "8"], "small, column output_tokens: give one row of numbers"),
        ("model", [0, 1, 2, 0], "small, row 3, column model: 2 is no index into the 2 models"),
        ("model", [0, 0.5, 1, 0], "small, column model: give integer indices into models, not float64"),
        ("models", ("a", "a"), "small: a model is named twice"),
        ("prefix_hashes", ((1,), (2, 3, 4, 5), (2,), ()), "small, row 2, column prefix_hashes: 4 blocks of 10 tokens"),
        ("prefix_hashes", ((1,),), "small, column prefix_hashes: 1 rows, not 4"),
        (
            "prefix_tokens",
            [5, 20, 16, 0],
            "small, row 3, column prefix_tokens: 16 tokens, but only 15 lie in the blocks",
        ),
        ("prefix_tokens", [5, 20], "small, column prefix_tokens: 2 rows, but arrival_s has 4"),
        ("prefix_tokens", [5, -1, 2, 0], "small, row 2, column prefix_tokens: -1 is too few tokens"),
        ("prefix_block_tokens", None, "small: prefix_hashes need prefix_block_tokens"),
    ],
)
def test_a_wrong_column_is_named(small, column, values, message):
    with pytest.raises(TraceError) as error:
        replace(small, **{column: np.array(values) if isinstance(values, list) else values})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_an_empty_trace_is_refused():
    with pytest.raises(TraceError, match="t: the trace is empty"):
        trace_of([])


def test_a_ten_million_token_prompt_is_a_valid_trace(small):
    assert replace(small, prompt_tokens=np.full(4, 10_000_000)).prompt_tokens.max() == 10_000_000


def test_columns_are_read_only_copies(small):
    arrivals = np.array([0.0, 1.0, 2.0, 3.0])
    trace = small.with_arrivals(arrivals)
    arrivals[0] = 99
    assert trace.arrival_s[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_tokens[0] = 9


def test_head_window_and_models(small):
    assert small.head(2).prefix_hashes == ((1,), (2, 3))
    assert len(small.head(100)) == 4
    late = small.window(1.0, 61.0)
    assert late.arrival_s.tolist() == [0.0, 0.0]
    assert late.output_tokens.tolist() == [2, 3]
    with pytest.raises(TraceError, match=r"small: no request arrives in \[2, 60\) s"):
        small.window(2, 60)
    renamed = small.with_models(["x", "y", "z"], [2, 2, 0, 1])
    assert [renamed.models[index] for index in renamed.model] == ["z", "z", "x", "y"]


def test_ids_cover_prompts_unless_the_trace_says_more(small):
    """The first prompt ends within its block, and ids of the third leave out its last two tokens."""
    assert small.prefix_tokens.tolist() == [5, 20, 12, 0]
    assert replace(small, prefix_hashes=((1,), (2,), (2,), ()), prefix_tokens=None).prefix_tokens.tolist() == [
        5,
        10,
        10,
        0,
    ]
    answers = replace(small, prefix_hashes=((1,), (2, 3, 5), (2, 4), ()), prefix_tokens=np.array([6, 22, 12, 0]))
    assert answers.head(2).prefix_tokens.tolist() == [6, 22]
    assert answers.window(1.0, 61.0).prefix_tokens.tolist() == [22, 12]
    assert replace(answers, prefix_hashes=None).prefix_tokens is None
    assert merge([answers, small]).prefix_tokens.tolist() == [6, 5, 22, 12, 20, 12, 0, 0]


def test_csv_round_trip(small, tmp_path):
    odd = small.with_arrivals(np.array([0.1, 0.1 + 0.2, 1e6 / 3, 1e7]))
    odd.to_csv(tmp_path / "t.csv")
    back = read_trace(tmp_path / "t.csv")
    assert back.models == odd.models
    for column in ("arrival_s", "model", "prompt_tokens", "output_tokens"):
        assert getattr(back, column).tolist() == getattr(odd, column).tolist()


def test_merge_keeps_models_by_name_and_hashes_apart(small):
    other = trace_of([0.5, 1.0], "other", "b", ((2, 3), (2,)))
    both = merge([small, other])
    assert both.arrival_s.tolist() == [0.0, 0.5, 1.0, 1.0, 1.0, 61.0]
    assert [both.models[index] for index in both.model] == ["a", "b", "b", "a", "b", "a"]
    assert both.source == "small + other"
    hashes = both.prefix_hashes
    assert hashes[2][0] == hashes[3][0]  # the two of ``small`` that share a block
    assert hashes[1][0] == hashes[4][0]  # the two of ``other``
    assert not {block for row in (0, 2, 3) for block in hashes[row]} & {
        block for row in (1, 4) for block in hashes[row]
    }


def test_merge_without_common_hashes_has_none(small):
    assert merge([small, trace_of([0.0])]).prefix_hashes is None
    with pytest.raises(TraceError, match="at least one"):
        merge([])


@given(st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).map(sorted), min_size=1, max_size=4))
def test_merge_conserves_requests(arrivals):
    merged = merge([trace_of(times, model=f"m{index}") for index, times in enumerate(arrivals)])
    assert merged.arrival_s.tolist() == sorted(time for times in arrivals for time in times)
    assert np.bincount(merged.model, minlength=len(arrivals)).tolist() == [len(times) for times in arrivals]


def test_importing_the_package_is_light():
    heavy = "pandas", "scipy", "pyarrow", "fineserve_sim"
    code = f"import sys, fineserve_traces; print([name for name in {heavy} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
