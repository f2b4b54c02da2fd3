"""A stand-in for the cluster: each model is one server. A prompt token takes 0.1 ms, in order; an output token 1 ms.

It lies in a module of its own so that worker processes can import it.
"""

from __future__ import annotations

import math
import os
import signal

import numpy as np

from fineserve_sim.cluster import Fate, RunResult, Scenario, ScenarioError, Timeline
from fineserve_sim.policy.interfaces import Instance, Placement

calls = 0
"""Simulations in this process."""

stop_after = math.inf
"""Ctrl-C arrives when so many simulations were made."""


def simulate(scenario: Scenario) -> RunResult:
    global calls  # noqa: PLW0603 - the tests count simulations
    if calls >= stop_after:
        raise KeyboardInterrupt
    calls += 1
    trace = scenario.trace
    free_s = dict.fromkeys(trace.models, 0.0)
    limit_s = {model.id: model.ttft_slo_s for model in scenario.models}
    drops = scenario.system.scheduler.policy == "adaptive"
    count = len(trace)
    first_s, finish_s, fate = np.full(count, np.nan), np.full(count, np.nan), np.zeros(count, dtype=np.int8)
    for index in range(count):
        name = trace.models[trace.model[index]]
        start_s = max(free_s[name], trace.arrival_s[index])
        done_s = start_s + trace.prompt_tokens[index] * 1e-4
        if drops and done_s - trace.arrival_s[index] > limit_s[name]:
            fate[index] = Fate.DROPPED
            continue
        free_s[name] = first_s[index] = done_s
        finish_s[index] = done_s + (trace.output_tokens[index] - 1) * 1e-3
        fate[index] = Fate.FINISHED
        if scenario.log is not None:
            scenario.log({"now_s": float(done_s), "command": "Dispatch", "request_id": index})
    return RunResult(
        first_token_s=first_s,
        finish_s=finish_s,
        fate=fate,
        preemptions=np.zeros(count, dtype=np.int64),
        engine=trace.model.copy(),
        cause=np.zeros(count, dtype=np.int8),
        generated_tokens=np.where(fate == Fate.FINISHED, trace.output_tokens, 0),
        placement=Placement(tuple(Instance(name, 0, (0,), 1.0, 0) for name in trace.models)),
        kv_capacity_bytes=(1000,) * len(scenario.gpus),
        timeline=_timeline(scenario),
        end_s=float(np.nanmax(finish_s)),
        iterations=count,
        events=count,
        loop_cpu_s=0.0,
    )


def _timeline(scenario: Scenario) -> Timeline:
    """Every engine holds 100 bytes and one waiting request, always."""
    engines, gpus = len(scenario.models), len(scenario.gpus)
    step_s = scenario.sample_s or math.inf
    time_s = np.arange(0.0, float(scenario.trace.arrival_s[-1]), step_s) if step_s < math.inf else np.empty(0)
    ones = np.ones((len(time_s), engines), dtype=np.int64)
    return Timeline(
        time_s=time_s,
        engine_models=tuple(model.id for model in scenario.models),
        waiting=ones,
        running=ones,
        kv_used_bytes=100 * ones,
        gpu_stranded_bytes=np.zeros((len(time_s), gpus), dtype=np.int64),
        gpu_free_bytes=np.zeros((len(time_s), gpus), dtype=np.int64),
    )


def die(scenario: Scenario) -> RunResult:
    """As a process that lacks memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def refuse_prism(scenario: Scenario) -> RunResult:
    """As ``simulate``, but one system cannot run."""
    if scenario.system.name == "prism*":
        raise ScenarioError("model B fits on no GPU")
    return simulate(scenario)


def full_disk(scenario: Scenario) -> RunResult:
    """The disk fills up while the third simulation runs."""
    if calls == 2:
        raise OSError(28, "No space left on device", "cells/x")
    return simulate(scenario)
