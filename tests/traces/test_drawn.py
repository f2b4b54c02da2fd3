"""What is drawn some at a time is what is drawn at once."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from fineserve_traces import (
    ConstantLengths,
    Draw,
    Drawn,
    LengthPairs,
    LengthSource,
    Trace,
    drawn,
    generate,
    length_source,
    merge,
    onoff,
    piecewise,
    poisson,
    totals,
    whole,
)
from fineserve_traces.arrivals import gamma_gaps, poisson_gaps, renewals, segment_by_segment, weibull_gaps
from fineserve_traces.onoff import OnOff
from fineserve_traces.servegen import servegen_clients

COLUMNS = ("arrival_s", "model", "prompt_tokens", "output_tokens")
LENGTHS: dict[str, LengthSource] = {
    "sketch": length_source("sharegpt_v3_first_turn"),
    "law": length_source("burstgpt"),
    "constant": ConstantLengths(512, 64),
    "pairs": LengthPairs(np.arange(1, 1000), np.arange(1000, 1, -1), "pairs"),
}


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def same(one: Trace, other: Trace) -> None:
    for name in COLUMNS:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes(), name


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths_come_in_turn(lengths: LengthSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "ROWS", 70)
    expected = lengths.sample(rng_of(1), 500)
    next_lengths = lengths.in_turn(rng_of(1), 500)
    for side, found in zip(expected, zip(*map(next_lengths, (0, 1, 299, 200)), strict=True), strict=True):
        assert side.tolist() == np.concatenate(found).tolist()


GAPS: dict[str, Callable[..., Any]] = {
    "poisson": poisson_gaps,
    "gamma": partial(gamma_gaps, cv=3.0),
    "weibull": partial(weibull_gaps, cv=0.3),
}


@pytest.mark.parametrize("gaps", GAPS.values(), ids=GAPS)
def test_arrivals_do_not_depend_on_how_many_are_there(gaps: Callable[..., Any]) -> None:
    at_once = next(renewals(gaps(rng_of(2), 3.0), 900))
    in_turn = renewals(gaps(rng_of(2), 3.0), 7)
    assert np.concatenate([next(in_turn) for _ in range(900 // 7 + 1)])[:900].tobytes() == at_once.tobytes()


@pytest.mark.parametrize("process", [OnOff(5.0, 0.2), OnOff(5.0), *servegen_clients(2)], ids=repr)
def test_processes_come_piece_by_piece(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An on/off process as it is without pieces: all requests of a time are drawn together."""
    at_once = process.arrivals(rng_of(3), 3600.0, 0.5)
    monkeypatch.setattr(onoff, "PIECE", 50)
    pieces = [*process.pieces(rng_of(3), 3600.0, 0.5)]
    assert len(pieces) > 1 or process == OnOff(5.0)
    assert np.concatenate(pieces).tobytes() == at_once.tobytes()


SEGMENTS = [(10.0, 5.0), (20.0, 0.0), (30.0, 9.0)]


def draws(lengths: LengthSource, counts: tuple[int, int]) -> tuple[Draw, Draw]:
    """A model that goes on for ever, and one in segments; ``counts``: lengths that are drawn at most."""
    return (
        Draw("for ever", partial(_poisson, 4), partial(_lengths, lengths, 5, counts[0])),
        Draw("in segments", partial(_in_segments, 6), partial(_lengths, lengths, 7, counts[1])),
    )


def _poisson(seed: int) -> Iterator[Any]:
    return renewals(poisson_gaps(rng_of(seed), 2.0), 3)


def _in_segments(seed: int) -> Iterator[Any]:
    return segment_by_segment(rng_of(seed), SEGMENTS)


def _lengths(lengths: LengthSource, seed: int, count: int) -> Any:
    return lengths.in_turn(rng_of(seed), count)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("rows", [1, 40, 10_000])
def test_windows_hold_what_whole_draws_hold(lengths: LengthSource, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "ROWS", rows)
    segments = piecewise(rng_of(6), SEGMENTS)
    steady, other = (
        generate(poisson(rng_of(4), 2.0, 300), _First(lengths, 300), rng_of(5), "for ever"),
        generate(segments, lengths, rng_of(7), "in segments"),
    )
    expected = merge([steady, other]).head(300)
    made = Drawn(draws(lengths, (300, len(segments))), 300, 8.0, lengths.source, 2.0)
    found = whole(made)
    same(found, expected.with_arrivals(expected.arrival_s / 2.0))
    assert found.models == expected.models == made.models
    chunks = [*made.chunks()]
    assert len(chunks) == 1 if rows == 10_000 else len(chunks) > 10 / rows
    assert totals(made).requests.sum() == 300, "it begins anew each time"
    same(whole(pickle.loads(pickle.dumps(made))), found)


class _First:
    """Lengths as the first of ``count`` draws."""

    def __init__(self, lengths: LengthSource, count: int) -> None:
        self._lengths, self._count, self.source = lengths, count, lengths.source

    def sample(self, rng: np.random.Generator, n: int) -> Any:
        return tuple(side[:n] for side in self._lengths.sample(rng, self._count))

    def in_turn(self, rng: np.random.Generator, n: int) -> Any:
        return self._lengths.in_turn(rng, self._count)


def test_ties_go_in_the_order_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a window ends at the very moment."""
    monkeypatch.setattr(drawn, "ROWS", 1)
    lengths = partial(_lengths, ConstantLengths(8, 8), 0, 9)
    made = Drawn(
        tuple(Draw(name, partial(_every_second, each), lengths) for each, name in enumerate("AB")), 18, 1.0, ""
    )
    found = whole(made)
    assert found.model.tolist() == [0, 1] * 9 and found.arrival_s.tolist() == np.repeat(np.arange(9.0), 2).tolist()


def _every_second(rows: int) -> Iterator[Any]:
    return iter(np.split(np.arange(9.0), [1 + rows, 5]))


def test_many_requests_take_no_more_memory_than_few() -> None:
    """Eight times as many."""

    def peak(requests: int) -> int:
        lengths = LENGTHS["pairs"]
        many = Draw("m", partial(_fast, 1), partial(_lengths, lengths, 1, requests))
        tracemalloc.start()
        assert sum(map(len, Drawn((many,), requests, 1e4, "").chunks())) == requests
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    few, many = peak(100_000), peak(800_000)
    assert many < 1.1 * few < 28 * 800_000 / 2


def _fast(seed: int) -> Iterator[Any]:
    return renewals(poisson_gaps(rng_of(seed), 1e4), 1000)
