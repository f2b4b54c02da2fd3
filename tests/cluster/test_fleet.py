"""Models that come and go in the simulated cluster: the laws of every run, and merged equal to plain, bit for bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simkit import H100, Logged, Row, gpus, logged, served, trace_of

from fineserve_sim.cluster import EngineSettings, Fate, Scenario, ScenarioError, simulate
from fineserve_sim.cluster.compose.memory import geometry, peak_activation_bytes, resident_bytes
from fineserve_sim.systems import SystemSpec, load_systems

PRISM = {"policy": "prism", "idle_s": 3.0, "replace_s": 2.0, "min_stay_s": 2.0}
RESIDENCIES: list[dict[str, object]] = [
    PRISM,
    PRISM | {"move": False},
    PRISM | {"evict": False},
    PRISM | {"engine_pool": False, "engine_start_s": 4.0},
    {"policy": "qlm", "swap_s": 2.0},
    {"policy": "qlm", "swap_s": 2.0, "running": "requeue"},
]
SCHEDULERS: list[dict[str, object]] = [{"policy": "fcfs"}, {"policy": "adaptive"}, {"policy": "moore_hodgson"}]


def fleet(residency: dict[str, object], scheduler: dict[str, object], mode: str = "buffered") -> SystemSpec:
    qlm = residency["policy"] == "qlm"
    return SystemSpec.model_validate(
        {
            "name": "fleet",
            "title": "Fleet",
            "summary": "For a test",
            "placement": {"policy": "dedicated" if qlm else "kvpr"},
            "scheduler": scheduler,
            "memory": {"policy": "private"} if qlm else {"policy": "kvcached", "mode": mode},
            "residency": residency,
        }
    )


def scenario(
    spec: SystemSpec, rows: list[Row], models: int, cards: int, kv_tokens: int, slo_s: float = 2.0
) -> Scenario:
    """``models`` of 1B on GPUs that hold one of them with ``kv_tokens`` of KV, or two with less."""
    names = [f"m{i}" for i in range(models)]
    here = tuple(served(name, slo_s=slo_s, rate_per_s=0.5) for name in names)
    base = EngineSettings(token_budget=256, max_sequences=16)
    one = resident_bytes(here[0], base) + peak_activation_bytes(here[0], base)
    usable = 2 * one + kv_tokens * geometry(here[0], base).token_bytes
    limits = replace(base, memory_utilization=usable / H100.memory_bytes)
    return Scenario(spec, here, gpus(cards), trace_of(rows, names), limits, sample_s=0.5, drain_s=200.0, check=True)


def assert_fleet_lawful(run: Logged, sc: Scenario) -> None:
    result = run.result
    fates = Counter(Fate(fate) for fate in result.fate.tolist())
    decided = Counter(line["command"] for line in run.commands)
    assert fates[Fate.REJECTED] == decided["Reject"] and fates[Fate.DROPPED] == decided["Drop"]
    finished = result.fate == Fate.FINISHED
    assert np.array_equal(np.isfinite(result.finish_s), finished)
    assert (sc.trace.arrival_s[finished] < result.first_token_s[finished]).all()
    assert (result.first_token_s[finished] <= result.finish_s[finished]).all()
    homes: dict[int, str] = {e: instance.model for e, instance in enumerate(result.placement.instances)}
    ready = set(homes)
    gone: set[int] = set()
    for line in run.log:
        if line.get("command") == "Activate":
            assert line["engine"] not in homes
            homes[line["engine"]] = line["model"]
        elif line.get("event") == "EngineReady":
            ready.add(line["engine"])
        elif line.get("command") == "Evict" and not line["drain"]:
            gone.add(line["engine"])
        elif line.get("command") == "Dispatch":
            assert line["engine"] in ready - gone
            model = sc.trace.models[sc.trace.model[line["request_id"]]]
            assert homes[line["engine"]] == model


ROWS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 600), st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=40
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    residency=st.sampled_from(RESIDENCIES),
    scheduler=st.sampled_from(SCHEDULERS),
    mode=st.sampled_from(["sync", "buffered", "contiguous"]),
    cards=st.integers(1, 2),
    kv_tokens=st.sampled_from([2500, 6000, 20000]),
    slo_s=st.sampled_from([0.2, 2.0, 30.0]),
)
def test_fleets_obey_the_laws_and_merging_changes_nothing(
    rows: list[tuple[int, int, int, int]],
    residency: dict[str, object],
    scheduler: dict[str, object],
    mode: str,
    cards: int,
    kv_tokens: int,
    slo_s: float,
) -> None:
    arrivals: list[Row] = sorted((time / 4, prompt, output, model) for time, prompt, output, model in rows)
    sc = scenario(fleet(residency, scheduler, mode), arrivals, 4, cards, kv_tokens, slo_s)
    merged, plain = logged(sc), logged(sc, exact_steps=True)
    assert_fleet_lawful(merged, sc)
    assert merged.commands == plain.commands
    for name in ("first_token_s", "finish_s", "fate", "preemptions", "engine"):
        np.testing.assert_array_equal(getattr(merged.result, name), getattr(plain.result, name), err_msg=name)
    np.testing.assert_array_equal(merged.result.timeline.kv_used_bytes, plain.result.timeline.kv_used_bytes)
    assert merged.result.iterations == plain.result.iterations


def test_an_evicted_model_comes_back_on_its_first_request() -> None:
    """Two GPUs' worth of models on one: who idles longest goes, and its next request waits for the load."""
    rows: list[Row] = [(0.0, 64, 8, 0), (0.5, 64, 8, 1), (5.0, 64, 8, 2), (10.0, 64, 8, 0)]
    sc = scenario(fleet(PRISM, {"policy": "fcfs"}), rows, 3, 1, 2500)
    run = logged(sc)
    assert (run.result.fate == Fate.FINISHED).all()
    activated = [line["model"] for line in run.commands if line["command"] == "Activate"]
    assert activated == ["m2", "m0"]
    waited_s = run.result.first_token_s - sc.trace.arrival_s
    assert waited_s[0] < 0.05 < waited_s[2] and waited_s[3] > 0.05


def test_without_eviction_who_has_no_room_waits_for_ever() -> None:
    sc = scenario(fleet(PRISM | {"evict": False}, {"policy": "fcfs"}), [(0.0, 64, 8, 0), (5.0, 64, 8, 2)], 3, 1, 2500)
    assert simulate(sc).fate.tolist() == [Fate.FINISHED, Fate.UNFINISHED]


def test_a_swap_of_qlm_takes_its_time() -> None:
    sc = scenario(
        fleet({"policy": "qlm", "swap_s": 7.0}, {"policy": "fcfs"}), [(0.0, 64, 8, 0), (2.0, 64, 8, 1)], 2, 1, 2500
    )
    waited_s = simulate(sc).first_token_s - sc.trace.arrival_s
    assert waited_s[0] < 0.05 and 7.0 < waited_s[1] < 9.5


def test_who_left_is_not_asked_any_more() -> None:
    """Eight models on two GPUs of three. A move ends: the engine it replaces goes at once, and as models wait for room the
    controller looks at everything, before the queue that they shared is formed anew."""
    rows: list[Row] = [(0.75, 190, 154, 2), (0.75, 270, 65, 1), (0.75, 469, 133, 7), (1.0, 214, 28, 6)]
    rows += [(2.25, 163, 52, 7), (2.5, 352, 32, 3), (2.5, 504, 69, 5)]
    quick = PRISM | {"idle_s": 1.0, "replace_s": 1.0, "min_stay_s": 0.5}
    sc = scenario(fleet(quick, {"policy": "moore_hodgson"}), rows, 8, 2, 4000)
    rates = (2.0, 0.5, 0.1, 0.5, 0.1, 2.0, 0.1, 0.5)
    models = tuple(replace(model, rate_per_s=rate) for model, rate in zip(sc.models, rates, strict=True))
    one = resident_bytes(models[0], sc.engine) + peak_activation_bytes(models[0], sc.engine)
    engine = replace(sc.engine, memory_utilization=sc.engine.memory_utilization + one / H100.memory_bytes)
    sc = replace(sc, models=models, engine=engine)
    run = logged(sc)
    assert_fleet_lawful(run, sc)
    assert run.commands == logged(sc, exact_steps=True).commands
    assert (run.result.fate == Fate.FINISHED).all()


def test_residency_needs_memory_that_can_follow() -> None:
    spec = fleet(PRISM, {"policy": "fcfs"}).model_copy(update={"memory": load_systems()["fineserve"].memory})
    with pytest.raises(ScenarioError, match="needs memory kvcached or private, not kv_slab"):
        simulate(scenario(spec, [(0.0, 64, 8, 0)], 1, 1, 2500))
