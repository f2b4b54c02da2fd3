"""Faults in the middle of something: a copy to host memory, a migration, a wait for memory. Nothing leaks, nothing is counted
twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lawkit import bounded
from simkit import H100, Row, served, trace_of, with_kv_blocks

from fineserve_sim.cluster import EngineSettings, Fate, Fault, Gpu, Scenario
from fineserve_sim.systems import SystemSpec, load_systems

LATE_S = 40.0


def instances(base: str, rows: Sequence[Row], blocks: int, count: int, **axes: Any) -> Scenario:
    """``count`` instances of a 1B model with ``blocks`` KV blocks each, and one more request when all is over."""
    spec = SystemSpec.model_validate(load_systems()[base].model_dump() | axes)
    model = served()
    settings = with_kv_blocks([model], blocks, EngineSettings(token_budget=256))
    gpus = tuple(Gpu(gpu, gpu, H100, 1e9) for gpu in range(count))
    trace = trace_of([*rows, (LATE_S, 16, 2)])
    return Scenario(spec, (model,), gpus, trace, settings, check=True, sample_s=0.01)


def held_bytes(scenario: Scenario) -> Any:
    """By instance, the most KV bytes in use when all but the last request have ended long ago."""
    timeline = bounded(scenario).result.timeline
    calm = (timeline.time_s > LATE_S - 10) & (timeline.time_s < LATE_S)
    return timeline.kv_used_bytes[calm].max(axis=0)


@pytest.mark.parametrize("fault_s", [0.25, 0.5, 0.75, 0.8, 1.25])
@pytest.mark.parametrize("check", [True, False], ids=["check", "no check"])
def test_a_copy_to_host_memory_may_outlive_its_instance(fault_s: float, check: bool) -> None:
    """Swapping takes long on this link: some of these faults come while KV is on its way out."""
    memory = {"policy": "swap", "host_bytes_per_s": 2e8}
    scenario = instances("infercept", [(0.0, 300, 400)] * 3, blocks=80, count=1, memory=memory)
    scenario = replace(scenario, faults=(Fault(fault_s, 0, 0.05),), check=check)
    result = bounded(scenario).result
    assert (result.fate == Fate.FINISHED).all()
    assert (result.timeline.kv_used_bytes >= 0).all()
    assert (held_bytes(scenario) == 0).all()


def test_a_migration_whose_source_fails_holds_nothing_at_its_destination() -> None:
    """One instance has all the long requests and hands them over one by one; it fails at one moment or another between the
    first command and the end of that move."""
    rows = [(number * 1e-3, 100, 800 if number % 2 == 0 else 2) for number in range(40)]
    turns = {"policy": "round_robin"}
    scenario = instances("llumnix", rows, blocks=400, count=2, dispatch=turns)
    first = next(line for line in bounded(scenario).log if line.get("command") == "Migrate")
    for after_s in np.arange(0.006, 0.0135, 0.0005).tolist():
        fault = Fault(first["now_s"] + after_s, first["source"], 0.05)
        failing = replace(scenario, faults=(fault,), sample_s=0.1)
        assert (held_bytes(failing) == 0).all(), f"the source fails {after_s} s after the command"


def test_a_group_migrates_again_after_a_move_that_a_fault_ended() -> None:
    """Whoever leaked is busy for ever: the same imbalance after the fault is evened out as before it."""
    wave = [(number * 1e-3, 100, 800 if number % 2 == 0 else 2) for number in range(40)]
    rows = [*wave, *((20.0 + arrival_s, prompt, output) for arrival_s, prompt, output in wave)]
    scenario = instances("llumnix", rows, blocks=400, count=2, dispatch={"policy": "round_robin"})
    first = next(line for line in bounded(scenario).log if line.get("command") == "Migrate")
    for after_s in np.arange(0.009, 0.0125, 0.0005).tolist():
        fault = Fault(first["now_s"] + after_s, first["source"], 0.05)
        log = bounded(replace(scenario, faults=(fault,), sample_s=0.0)).log
        assert any(line.get("command") == "Migrate" and line["now_s"] > 20 for line in log), after_s


def test_a_fault_does_not_count_a_request_that_only_waited() -> None:
    """Requests 0 and 3 share instance 0, which holds one of them at full length: 3 loses its KV, once, and waits. Then the
    instance fails, and each goes on alone on another."""
    rows: list[Row] = [(0.0, 160, 400), (0.001, 16, 2), (0.002, 16, 2), (0.003, 160, 400)]
    scenario = instances("vllm-dp", rows, blocks=40, count=3, dispatch={"policy": "round_robin"})
    before = bounded(scenario).result
    timeline = before.timeline
    waits = np.flatnonzero((timeline.waiting[:, 0] == 1) & (timeline.running[:, 0] == 1))
    assert before.preemptions.tolist() == [0, 0, 0, 1, 0] and len(waits) > 2
    lost_s = float(timeline.time_s[waits[1]])
    result = bounded(replace(scenario, faults=(Fault(lost_s, 0),))).result
    assert (result.fate == Fate.FINISHED).all()
    assert result.preemptions.tolist() == [1, 0, 0, 1, 0]
