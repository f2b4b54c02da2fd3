"""Bands of the model's error: what ships follows from the committed rows, and laws of learning and of leaving out."""

from __future__ import annotations

import numpy as np
import pytest
from fineserve_evidence.validate.bands import (
    IMPOSSIBLE,
    LEAST_SETS,
    LEVEL,
    Observation,
    coverage,
    learn,
    left_out,
    observations,
)
from fineserve_evidence.validate.cases import Case, Label, OpenLoop, Serving, StaticBatch
from fineserve_evidence.validate.predict import Predicted, remembered
from hypothesis import given
from hypothesis import strategies as st

from docs.generate.scorecard import observed
from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.catalog.model_errors import ANY, Predictable, model_errors
from fineserve_sim.latency import StepModel

TPOT = Predictable("tpot", "measured", "vllm", "alone", "below", "dense")


def rows(ratios: dict[str, list[float]], of: Predictable = TPOT) -> list[Observation]:
    return [Observation(Label(name, "vllm", "m", "p", 1), of, ratio) for name, own in ratios.items() for ratio in own]


def test_the_bands_that_ship_are_those_of_the_committed_rows() -> None:
    assert list(model_errors().classes) == learn(observed())


@pytest.mark.slow
def test_bands_hold_the_rows_of_sets_left_out() -> None:
    """80 to 95 % of the rows inside for each moment and kind of step times; of dense models on scaled tables within 30 %."""
    found = {(one.tables, one.layers, one.moment): one for one in coverage(left_out(observed()))}
    assert all(0.8 <= one.inside <= 0.95 for one in found.values() if one.layers == ANY)
    assert found["scaled", "dense", ANY].half_width <= 0.3


@given(st.integers(LEAST_SETS, 6), st.floats(0.5, 2.0))
def test_a_class_whose_rows_are_all_off_alike_has_a_band_of_no_width(sets: int, ratio: float) -> None:
    found = {each.of: each for each in learn(rows({f"s{number}": [ratio] * (number + 1) for number in range(sets)}))}
    assert (found[TPOT].low, found[TPOT].high) == pytest.approx((ratio, ratio), abs=1e-4)
    assert found[TPOT].median == pytest.approx(abs(1 / ratio - 1), abs=1e-4)
    assert found[TPOT].sets == sets


def test_sets_weigh_the_same_whatever_their_rows() -> None:
    """A set of a thousand rows moves a band no more than one of ten."""
    few = {f"s{number}": [0.8, 1.0, 1.2] for number in range(4)}
    own = {each.of: each for each in learn(rows(few | {"large": [1.0] * 10}))}[TPOT]
    many = {each.of: each for each in learn(rows(few | {"large": [1.0] * 1000}))}[TPOT]
    assert (own.low, own.high) == pytest.approx((many.low, many.high), abs=0.02)


def test_what_is_not_learnt_from() -> None:
    """Classes of two sets, sets that something was fitted on, and sets that cannot be."""
    assert learn(rows({"a": [1.0], "b": [1.0]})) == []
    assert learn(rows({f"fineserve_authors{number}": [1.0] for number in range(5)})) == []
    impossible = [Observation(Label(str(n), "vllm", IMPOSSIBLE, "p", 1), TPOT, 0.3) for n in range(5)]
    assert learn(impossible) == []
    fair = rows({f"s{number}": [1.0] for number in range(3)})
    assert sum(each.row.ratio == 0.3 for each in left_out([*fair, *impossible])) == 5  # but counted


def test_sets_drawn_alike_are_held_at_the_level() -> None:
    """Of sets from one distribution, each left out, about as many rows are inside as the band is to hold."""
    rng = np.random.default_rng(1)
    found = left_out(rows({f"s{number}": np.exp(rng.normal(0, 0.1, 40)).tolist() for number in range(20)}))
    inside = {one.inside for one in coverage(found)}
    assert list(inside) == pytest.approx([LEVEL], abs=0.03)
    own = coverage(found)[0]
    assert own.half_width == pytest.approx(1.645 * 0.1, rel=0.1)


def test_observations_of_cases() -> None:
    """Ratios are measured over predicted; a row that was never served is infinitely far below; runs of single requests are one
    row; requests wait where the predicted TTFT is over twice the prompt's own."""
    serving = Serving(
        model("llama-3.1-8b"), precision("fp16"), 1, gpu("h100-sxm"), deployment("vllm-cudagraph"), 2048, 256
    )
    label = Label("s", "vllm", "llama-3.1-8b", "W16A16", 1)
    step = remembered(StepModel)
    batch = Case(label, serving, StaticBatch(1, 512, 8), np.array([0.05, 0.05]), np.array([0.01, np.nan]))
    quick, late = 0.025, 10.0
    found = list(observations([Predicted(batch, np.array([quick, late]), np.array([np.nan, 1.0]))], step, "measured"))
    assert [(row.of.moment, row.of.load, row.ratio) for row in found] == [
        ("ttft", "below", pytest.approx(2.0)),
        ("ttft", "above", pytest.approx(0.005)),
        ("tpot", "below", 0.0),
    ]
    lengths = np.array([512, 512])
    open_loop = OpenLoop(np.array([0.0, 1.0]), np.zeros(2, dtype=np.int64), lengths, lengths, models=1)
    single = Case(label, serving, open_loop, np.array([0.02, 0.06]), np.array([0.01, 0.03]))
    found = list(observations([Predicted(single, np.array([0.02, 0.02]), np.array([0.02, 0.02]))], step, "scaled"))
    assert [(row.of.tables, row.ratio) for row in found] == [
        ("scaled", pytest.approx(2.0)),
        ("scaled", pytest.approx(1.0)),
    ]
