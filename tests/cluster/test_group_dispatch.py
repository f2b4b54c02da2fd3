"""Dispatch knows what a group holds and nothing of output lengths: a request goes where it fits, if it fits anywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from lawkit import bounded
from simkit import H100, Row, served, trace_of, with_kv_blocks

from fineserve_sim.cluster import EngineSettings, Fate, Fault, Gpu, Scenario
from fineserve_sim.systems import SystemSpec, load_systems

ALONE_TOKENS = 1600


def pairs(rows: list[Row], count: int, dispatch: str) -> Scenario:
    """Pipelines of two instances, of which instance 0 is lost at 0.01 s: instance 1 goes on alone and holds ``ALONE_TOKENS``
    tokens, a hundredth of what a pipeline does."""
    axes: dict[str, Any] = {"dispatch": {"policy": dispatch}}
    spec = SystemSpec.model_validate(load_systems()["vllm-pp"].model_dump() | axes)
    spec = spec.model_copy(update={"execution": spec.execution and spec.execution.model_copy(update={"stages": 2})})
    model = served()
    settings = with_kv_blocks([model], ALONE_TOKENS // 16, EngineSettings(token_budget=256))
    gpus = tuple(Gpu(gpu, gpu, H100) for gpu in range(count))
    return Scenario(spec, (model,), gpus, trace_of(rows), settings, check=True, faults=(Fault(0.01, 0),))


@pytest.mark.parametrize("dispatch", ["round_robin", "least_loaded", "least_queued", "freeness"])
def test_what_one_group_cannot_hold_goes_to_one_that_can(dispatch: str) -> None:
    rows: list[Row] = [(2.0 + number * 0.001, 2 * ALONE_TOKENS, 8) for number in range(4)]
    result = bounded(pairs(rows, 4, dispatch)).result
    assert result.fate.tolist() == [Fate.FINISHED] * 4
    assert set(result.engine.tolist()) == {2}


def test_what_no_group_is_left_to_hold_is_dropped() -> None:
    result = bounded(pairs([(2.0, 2 * ALONE_TOKENS, 8)], 2, "round_robin")).result
    assert result.fate.tolist() == [Fate.DROPPED]


@pytest.mark.parametrize("dispatch", ["round_robin", "least_loaded", "least_queued", "freeness"])
@pytest.mark.parametrize("count", [2, 4])
def test_nobody_knows_how_long_an_answer_will_be(dispatch: str, count: int) -> None:
    """Two requests whose outputs alone differ are treated alike when they come."""

    def answers(output: int) -> list[dict[str, Any]]:
        scenario = pairs([(2.0, 600, output), (2.0, 600, output)], count, dispatch)
        log = bounded(replace(scenario, sample_s=0.0)).log
        return [line for line in log if "command" in line and line["now_s"] == 2.0]

    assert answers(8) == answers(2 * ALONE_TOKENS)


def test_an_answer_that_outgrows_what_is_left_begins_and_blocks_nobody() -> None:
    """It is cut there, as at vLLM's max_model_len, or given up; but it had its chance, and others are served."""
    result = bounded(pairs([(2.0, 600, 2 * ALONE_TOKENS), (30.0, 64, 8)], 2, "round_robin")).result
    assert result.fate[0] in (Fate.CUT, Fate.DROPPED) and np.isfinite(result.first_token_s[0])
    assert result.fate[1] == Fate.FINISHED
