"""An engine that is taken away in the middle of an iteration: its requests arrive again, all memory is free, and what it
computed stays counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleetkit import QLM, STAYS, fleet
from lawkit import bounded, differences
from simkit import H100

from fineserve_sim.cluster import Fate, Fault, Gpu, Scenario

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


def test_a_request_that_lost_its_gpu_starts_at_once_on_an_idle_engine() -> None:
    """A scheduler holds it back; nothing else happens at that engine that would have the scheduler asked."""
    both_gpus = {"policy": "pinned", "groups": {"m0": [[0], [1]]}}
    cards = (Gpu(0, 0, H100), Gpu(1, 0, H100))
    scheduler = {"policy": "moore_hodgson"}
    scenario = fleet([(0.0, 64, 4000)], STAYS, cards=cards, placement=both_gpus, scheduler=scheduler, drain_s=60.0)
    failing = replace(scenario, faults=(Fault(1.0, 0, None, "gpu"),))
    alone, moved = bounded(scenario).result, bounded(failing).result
    assert moved.fate.tolist() == [Fate.FINISHED] and moved.engine.tolist() == [1]
    assert moved.finish_s[0] - alone.finish_s[0] < 0.1  # it computes its KV again
