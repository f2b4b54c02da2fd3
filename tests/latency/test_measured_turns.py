"""What a turn of another engine costs, and what a stage of a pipeline has to itself, out of tables that have such steps."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.latency.measured_steps import OWN, MeasuredStepModel, fit_steps
from fineserve_sim.latency.sharing import in_turn

TURN_S, ROW_S, KV_S = 100e-6, 40e-6, 30e-9
HOST_S = 3e-3


def table(*, with_turns: bool) -> dict[str, Any]:
    """Steps of an engine that is linear in everything, each alone and in turn."""
    kinds = product((1, 2, 4, 8, 12), (50, 150, 400), (0, 28, 92), (False, True) if with_turns else (False,))
    rows = [(d, c, new, turned) for d, c, new, turned in kinds]
    decodes, context, new, turned = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    sampled, keys = decodes + (new > 0), decodes * (context + 1)
    alone_s = 1.5e-3 + 20e-6 * (decodes + new) + 30e-6 * sampled + 50e-9 * keys
    seconds = alone_s + turned * (TURN_S + ROW_S * sampled + KV_S * keys)
    columns = {"decodes": decodes, "context": context, "prefill_tokens": new, "cached_tokens": 0 * new}
    return columns | {"latency_s": seconds} | ({"in_turn": turned > 0} if with_turns else {})


def test_a_turns_cost_is_found_beside_the_steps_own() -> None:
    fit = fit_steps(table(with_turns=True))
    assert np.abs(fit.error).max() < 0.01
    for decodes, context in ((1, 50), (6, 900), (12, 4000)):
        wanted_s = TURN_S + ROW_S * decodes + KV_S * context
        assert fit.turn.added_s(context, decodes) == pytest.approx(wanted_s, rel=0.05)


def test_tables_of_one_engine_have_no_turns() -> None:
    fit = fit_steps(table(with_turns=False))
    assert fit.turn == (0.0, 0.0, 0.0)
    assert not any("turn" in line.quantity for line in _model(fit).provenance())


def test_a_step_takes_time_whatever_noise_may_say() -> None:
    """Few steps alone, many disturbed ones in turn: the turn seems to explain whole steps."""
    columns = table(with_turns=True)
    for seed in range(15):
        rng = np.random.default_rng(seed)
        drawn, disturbed, factor = rng.random(90), rng.random(90) < 0.7, 1 + rng.exponential(10.0, 90)
        seen = drawn < np.where(columns["in_turn"], 0.6, 0.1)
        noisy = columns | {"latency_s": columns["latency_s"] * np.where(columns["in_turn"] & disturbed, factor, 1.0)}
        noisy = {name: values[seen] for name, values in noisy.items()}
        step = _model(fit_steps(noisy))
        assert step.step_s(1, 1, 0, 0, 0, 1) >= OWN * noisy["latency_s"].min(), seed


def test_two_engines_in_turn_wait_for_both_turns() -> None:
    step = _model(fit_steps(table(with_turns=True)))
    need = step.demand(4, 600, 0, 0, 0, 4)
    assert need.step_s == step.step_s(4, 600, 0, 0, 0, 4)
    assert need.turn_s == pytest.approx(TURN_S + 4 * ROW_S + 600 * KV_S, rel=0.05)
    assert in_turn([need, need]) == [pytest.approx(2 * (1 + need.turn_s / need.step_s))] * 2
    assert in_turn([need]) == [1.0]


def _model(fit: Any) -> MeasuredStepModel:
    return MeasuredStepModel(model("llama-3.1-8b"), precision("W16A16"), gpu("h100-sxm"), fit, "made up")


def pipelined() -> dict[str, Any]:
    """The table without turns, and every kind of step again by a pipeline of two stages."""
    whole = table(with_turns=False)
    stages = np.repeat([1.0, 2.0], len(whole["latency_s"]))
    columns = {name: np.tile(values, 2) for name, values in whole.items()}
    return columns | {"latency_s": columns["latency_s"] + (stages - 1) * HOST_S, "stages": stages}


def test_steps_of_pipelines_tell_what_each_stage_has_to_itself() -> None:
    alone, fit = fit_steps(table(with_turns=False)), fit_steps(pipelined())
    assert fit.host_s == pytest.approx(HOST_S, rel=0.02) and alone.host_s == 0
    batch = (4, 600, 0, 0, 0, 4)
    assert _model(fit).step_s(*batch) == pytest.approx(_model(alone).step_s(*batch), rel=0.01)
    slower = _model(fit)
    slower.slow_down(2.0)
    assert slower.stage_host_s == 2 * fit.host_s
