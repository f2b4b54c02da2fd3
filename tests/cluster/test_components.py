"""A run in components has the bits of the whole one, wherever each component is simulated."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from randomkit import scenario_of
from simkit import assert_same, gpus, pinned, served, system, trace_of

from fineserve_sim.cluster import Fate, Scenario, ScenarioError
from fineserve_sim.cluster.components import Apart, Component, Piece, taken_apart, why_whole
from fineserve_sim.cluster.sharing.domain import connected
from fineserve_sim.cluster.simulation import simulate, simulate_component, simulate_whole
from fineserve_sim.systems import load_systems

SEEDS = 100


def backwards(components: Iterable[Component]) -> list[Piece]:
    """The last component first, each in a process of its own, as far as one can see."""
    return [sent(simulate_component(sent(component))) for component in reversed([*components])][::-1]


def sent(what: Any) -> Any:
    return pickle.loads(pickle.dumps(what))


def apart_of(scenario: Scenario) -> Apart:
    apart = taken_apart(scenario)
    assert apart is not None
    return apart


def test_components_give_the_bits_of_the_whole() -> None:
    """Over random clusters whose models may have replicas on GPUs of one another; every other one ends in the middle."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        scenario = scenario_of("static", seed)
        scenario = scenario if seed % 2 else replace(scenario, drain_s=0.0)
        try:
            apart = taken_apart(scenario) if why_whole(scenario) is None else None
        except ScenarioError:
            continue
        if apart is None:
            continue
        whole, parts = simulate_whole(scenario), apart.components
        assert_same(simulate(scenario), whole)
        assert_same(apart.merged(backwards(parts)), whole)
        spread_over = {scenario.trace.models[m] for part in parts for m in set(scenario.trace.model[part.requests])}
        seen["clusters"] += 1
        seen["shared GPUs"] += any(len(part.engines) > 1 for part in parts)
        seen["split models"] += sum(
            len({part.requests.tobytes() for part in parts if name in _models_of(scenario, part)}) > 1
            for name in spread_over
        )
        seen.update(Fate(fate).name for fate in whole.fate.tolist())
        seen["preemptions"] += int(whole.preemptions.sum())
    assert seen["clusters"] >= 8 and seen["shared GPUs"] >= 5 and seen["split models"] >= 5, seen
    assert min(seen[name] for name in ("REJECTED", "DROPPED", "UNFINISHED", "preemptions")) > 0, seen


def _models_of(scenario: Scenario, part: Component) -> set[str]:
    return {scenario.trace.models[number] for number in set(scenario.trace.model[part.requests].tolist())}


def test_other_processes_give_the_same() -> None:
    models = tuple(served(id) for id in "abc")
    trace = trace_of([(0.1 * row, 100 + row, 30, row % 3) for row in range(60)], "abc")
    spec = system(pinned({"a": [[0]], "b": [[1], [2]], "c": [[1]]}))
    scenario = Scenario(spec, models, gpus(3), trace, sample_s=0.05)
    apart = apart_of(scenario)
    with ProcessPoolExecutor(1) as pool:
        assert_same(apart.merged(pool.map(simulate_component, apart.components)), simulate_whole(scenario))


def test_engines_that_share_gpus_through_others_are_one_component() -> None:
    at = [(0,), (1, 2), (3,), (2, 3), (4,), (0,)]
    assert connected(dict(enumerate(at))) == [(0, 5), (1, 2, 3), (4,)]


def test_an_idle_engine_and_a_model_without_a_place_change_nothing() -> None:
    models = tuple(served(id) for id in "abcd")
    trace = trace_of([(0.1 * row, 100, 30, (0, 1, 3)[row % 3]) for row in range(30)], "abcd")
    scenario = Scenario(system(pinned({"a": [[1]], "b": [[2]], "c": [[0]]})), models, gpus(3), trace, sample_s=0.05)
    assert [part.engines for part in apart_of(scenario).components] == [(0, 2), (1,)]
    whole = simulate_whole(scenario)
    assert_same(simulate(scenario), whole)
    assert (whole.fate[2::3] == Fate.REJECTED).all()


@pytest.mark.parametrize("name", ["prism", "qlm", "vllm-dp", "kvcached"])
def test_whose_policies_look_at_everything_runs_whole(name: str) -> None:
    scenario = replace(scenario_of("static", 0), system=load_systems()[name])
    assert why_whole(scenario) is not None


def test_a_decision_log_is_one() -> None:
    lines: list[dict[str, object]] = []
    scenario = scenario_of("static", 1)
    result = simulate(replace(scenario, log=lines.append))
    times = np.array([line["now_s"] for line in lines if "event" in line], dtype=float)
    assert len(times) and (np.diff(times) >= 0).all()
    assert_same(simulate(scenario), result)
