"""An engine that is taken away in the middle of an iteration: its requests arrive again, all memory is free, and what it
computed stays counted."""

from __future__ import annotations

import pytest
from fleetkit import QLM, fleet
from lawkit import bounded, differences

from fineserve_sim.cluster import Fate, Scenario

AT_ONCE = QLM | {"running": "requeue", "swap_s": 0.5, "tick_s": 0.25}


def interrupted(prompt_tokens: int) -> Scenario:
    """A long answer of one model, stopped again and again for the late request of another."""
    rows = [(0.0, prompt_tokens, 3000, 0), (0.1, 64, 8, 1)]
    return fleet(rows, AT_ONCE, models=2, hosted=1, kv_tokens=8192, slo_s=0.2, drain_s=60.0)


@pytest.mark.parametrize("prompt_tokens", range(64, 80))
def test_the_block_of_the_token_in_flight_is_given_back(prompt_tokens: int) -> None:
    """Somewhere in a block's worth of prompts the token in flight is the first of a block."""
    result = bounded(interrupted(prompt_tokens)).result
    assert result.fate.tolist() == [Fate.FINISHED] * 2
    assert result.preemptions[0] > 1


def test_the_prefill_in_flight_is_given_back() -> None:
    rows = [(0.0, 4000, 8, 0), (0.004, 64, 8, 1)]
    result = bounded(fleet(rows, AT_ONCE, models=2, hosted=1, kv_tokens=8192, slo_s=0.001, drain_s=60.0)).result
    assert result.fate.tolist() == [Fate.FINISHED] * 2


def test_iterations_of_the_span_in_flight_are_counted() -> None:
    scenario = interrupted(60)
    merged, plain = bounded(scenario), bounded(scenario, exact_steps=True)
    assert merged.result.iterations == plain.result.iterations
    assert next(differences(merged, plain), None) is None
