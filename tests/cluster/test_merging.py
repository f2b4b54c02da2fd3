"""Merged spans change nothing but the number of events: plain, step-by-step runs of random clusters give the same bits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fineserve_traces import Trace
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simkit import (
    H100,
    Logged,
    assert_lawful,
    fixed_bytes,
    geometry,
    gpus,
    logged,
    pinned,
    served,
    solo,
    system,
    trace_of,
    with_usable_bytes,
)

from fineserve_sim.cluster import EngineSettings, Fate, Gpu, Scenario, ScenarioError, ServedModel, simulate
from fineserve_sim.systems import SystemSpec, load_systems

SYSTEMS = ["fineserve", "prism*", "static*", "dedicated"]
VARIANTS = [
    ("fcfs", "kv_slab"),
    ("adaptive", "private"),
    ("adaptive", "kv_slab"),
    ("moore_hodgson", "kv_slab"),
    ("moore_hodgson", "private"),
    ({"policy": "moore_hodgson", "late": "drop", "clock": "now"}, "kv_slab"),
    ({"policy": "moore_hodgson", "late": "drop", "reserve": "page"}, {"policy": "private", "split": "equal"}),
    ({"policy": "adaptive", "when_prefilling": "union"}, "kv_slab"),
    ("fcfs", {"policy": "private", "split": "equal"}),
    ("adaptive", {"policy": "kv_slab", "slab_multiple": 3, "reserved_slabs": 1}),
]
FORMATS = [("llama-3.2-1b", "fp16"), ("llama-3.2-1b", "fp8"), ("llama-3.1-8b", "qoq"), ("llama-3.1-8b", "awq")]

seen: Counter[str] = Counter()


@st.composite
def clusters(draw: st.DrawFn) -> Scenario:
    """One to four models on one to three GPUs, with KV memory for a small number of requests on the fullest GPU."""
    number = draw(st.integers(1, 3))
    models = tuple(draw(st.lists(served_models(number), min_size=1, max_size=4)))
    models = tuple(replace(m, id="abcd"[i]) for i, m in enumerate(models))
    chosen, fixed = draw(systems(models, number))
    engine = EngineSettings(
        token_budget=draw(st.sampled_from([24, 64, 256])),
        max_sequences=draw(st.sampled_from([2, 5, 20] if chosen.name == "inline" else [5, 20])),
        block_tokens=draw(st.sampled_from([8, 16])),
    )
    pool = draw(st.sampled_from([120, 200, 250, 333, 450, 600])) * max(geometry(m, engine).token_bytes for m in models)
    engine = with_usable_bytes(fixed_bytes(fixed, engine) + pool, engine)
    trace = trace_of(draw(loads(len(models))), [m.id for m in models])
    return Scenario(chosen, models, gpus(number), trace, engine, sample_s=0.05)


def served_models(number: int) -> st.SearchStrategy[ServedModel]:
    return st.builds(
        lambda fmt, tp, slo_s, rate: served("?", *fmt, tp=tp, slo_s=slo_s, rate_per_s=rate),
        st.sampled_from(FORMATS),
        st.sampled_from([1, 1, 2]) if number > 1 else st.just(1),
        st.sampled_from([0.02, 0.1, 0.5, 20.0]),
        st.sampled_from([1.0, 30.0]),
    )


@st.composite
def systems(draw: st.DrawFn, models: tuple[ServedModel, ...], number: int) -> tuple[SystemSpec, list[ServedModel]]:
    """A system, and the models on the GPU that it is expected to fill most."""
    if draw(st.integers(0, 2)) == 0:
        name = draw(st.sampled_from(SYSTEMS))
        return load_systems()[name], [max(models, key=_weight)] if name == "dedicated" else list(models)
    scheduler, memory = draw(st.sampled_from(VARIANTS))
    groups: dict[str, list[tuple[int, ...]]] = {}
    hosted: dict[int, list[ServedModel]] = {gpu: [] for gpu in range(number)}
    for m in models:
        candidates = [tuple(range(first, first + m.tp)) for first in range(0, number - m.tp + 1, m.tp)]
        groups[m.id] = draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=2))
        for gpu in (gpu for group in groups[m.id] for gpu in group):
            hosted[gpu].append(m)
    return system(pinned(groups), scheduler, memory), max(hosted.values(), key=lambda ms: sum(map(_weight, ms)))


def _weight(m: ServedModel) -> int:
    return fixed_bytes([m], EngineSettings())


@st.composite
def loads(draw: st.DrawFn, models: int) -> list[tuple[float, int, int, int]]:
    """Up to 40 requests on a coarse grid of times, in bursts, with many equal prompts."""
    request = st.tuples(
        st.integers(0, 40).map(lambda n: n * 0.01),
        st.sampled_from([1, 15, 16, 17, 40, 40, 90, 150]),
        st.sampled_from([1, 2, 16, 30, 60, 61, 90, 120]),
        st.integers(0, models - 1),
    )
    rows = draw(st.lists(request, min_size=15, max_size=40))
    if draw(st.booleans()):
        rows = [(0.0 if a < 0.2 else a, p, o, m) for a, p, o, m in rows]
    return sorted(rows, key=lambda row: row[0])


def assert_same(merged: Logged, plain: Logged) -> None:
    a, b = merged.result, plain.result
    for field in ("first_token_s", "finish_s", "fate", "preemptions", "engine"):
        assert np.array_equal(getattr(a, field), getattr(b, field), equal_nan=field.endswith("_s")), field
    for field in ("time_s", "waiting", "running", "kv_used_bytes", "gpu_stranded_bytes", "gpu_free_bytes"):
        assert np.array_equal(getattr(a.timeline, field), getattr(b.timeline, field)), field
    assert (a.end_s, a.iterations, a.placement) == (b.end_s, b.iterations, b.placement)
    assert merged.commands == plain.commands
    assert a.events <= b.events


def both_ways(scenario: Scenario) -> tuple[Logged, Logged]:
    return logged(scenario), logged(scenario, exact_steps=True)


@settings(max_examples=120)
@given(clusters())
def test_merged_spans_equal_plain_steps_bit_for_bit(scenario: Scenario) -> None:
    try:
        merged, plain = both_ways(scenario)
    except ScenarioError:
        seen["misfits"] += 1
        return
    assert_same(merged, plain)
    assert_lawful(scenario, merged)
    result = merged.result
    seen["runs"] += 1
    seen["preemptions"] += int(result.preemptions.sum())
    seen["drops"] += int((result.fate == Fate.DROPPED).sum())
    seen["rejections"] += int((result.fate == Fate.REJECTED).sum())
    seen["finished"] += int((result.fate == Fate.FINISHED).sum())
    seen["unfinished"] += int((result.fate == Fate.UNFINISHED).sum())
    instances = [instance.model for instance in result.placement.instances]
    seen["replicated"] += len(instances) > len(set(instances))
    seen["shared gpus"] += len(instances) > len({instance.gpus for instance in result.placement.instances})
    seen["merged away"] += plain.result.events - result.events


def test_the_random_clusters_above_are_under_pressure() -> None:
    seen.clear()
    test_merged_spans_equal_plain_steps_bit_for_bit()
    assert seen["runs"] >= 80 > seen["misfits"]
    assert seen["preemptions"] > 100
    assert seen["drops"] > 100 and seen["rejections"] > 50 and seen["finished"] > 800
    assert seen["unfinished"] == 0
    assert seen["replicated"] > 10 and seen["shared gpus"] > 30
    assert seen["merged away"] > 2000
