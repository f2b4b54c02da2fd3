"""Merged spans change nothing but the number of events: plain, step-by-step runs of random clusters give the same bits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fineserve_traces import Trace
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simkit import (
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

from fineserve_sim.cluster import EngineSettings, Fate, Scenario, ScenarioError, ServedModel
from fineserve_sim.cluster.engine.kv import EngineKV, PrefixBlocks
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.host import Cluster
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
    ("adaptive", {"policy": "kv_slab", "slab_multiple": 3}),
]
PAGED = {"policy": "kvcached", "page_bytes": 2**16}
CHUNKED = {"policy": "vtensor", "chunk_bytes": 2**15}
VIRTUAL = [
    ("fcfs", PAGED | {"mode": "sync"}),
    ("adaptive", PAGED | {"mode": "buffered"}),
    ("moore_hodgson", PAGED | {"mode": "buffered"}),
    ("adaptive", PAGED | {"mode": "contiguous"}),
    ("fcfs", CHUNKED),
    ("adaptive", CHUNKED | {"extend": "late", "trim_s": 0.02}),
    ("moore_hodgson", CHUNKED),
    ("fcfs", {"policy": "private", "split": "equal", "prefix_cache": True}),
    ("adaptive", {"policy": "private", "prefix_cache": True, "attention": "paged_attention_v0.4.2"}),
    ("fcfs", {"policy": "contiguous", "max_tokens": 200}),
]
"""KV memory by virtual memory, prefix caching, legacy kernels."""
FORMATS = [
    ("llama-3.2-1b", "fp16"),
    ("llama-3.2-1b", "fp8"),
    ("llama-3.1-8b", "qoq"),
    ("llama-3.1-8b", "awq"),
    ("llama-3.1-8b", "fp16"),
]

seen: Counter[str] = Counter()


@st.composite
def clusters(draw: st.DrawFn, variants: Sequence[tuple[Any, Any]] = VARIANTS) -> Scenario:
    """One to four models on one to three GPUs, with KV memory for a small number of requests on the fullest GPU, under
    one of ``variants``."""
    number = draw(st.integers(1, 3))
    models = tuple(draw(st.lists(served_models(number), min_size=1, max_size=4)))
    models = tuple(replace(m, id="abcd"[i]) for i, m in enumerate(models))
    chosen, fixed = draw(systems(models, number, variants))
    engine = EngineSettings(
        token_budget=draw(st.sampled_from([24, 64, 256])),
        max_sequences=draw(st.sampled_from([2, 5, 20] if chosen.name == "inline" else [5, 20])),
        block_tokens=draw(st.sampled_from([8, 16])),
    )
    pool = draw(st.sampled_from([120, 200, 250, 333, 450, 600])) * max(geometry(m, engine).token_bytes for m in models)
    engine = with_usable_bytes(fixed_bytes(fixed, engine) + pool, engine)
    trace = with_prefixes(trace_of(draw(loads(len(models))), [m.id for m in models]))
    return Scenario(chosen, models, gpus(number), trace, engine, sample_s=0.05)


def served_models(number: int) -> st.SearchStrategy[ServedModel]:
    return st.builds(
        lambda fmt, tp, slo_s, rate: served("?", *fmt, tp=tp, slo_s=slo_s, rate_per_s=rate),
        st.sampled_from(FORMATS),
        st.sampled_from([1, 1, 2]) if number > 1 else st.just(1),
        st.sampled_from([0.02, 0.1, 0.5, 20.0]),
        st.sampled_from([1.0, 30.0]),
    )


def with_prefixes(trace: Trace) -> Trace:
    """Every third request begins alike, up to 40 tokens, answers included; the rest of each is its own."""
    tokens = (trace.prompt_tokens + trace.output_tokens).tolist()
    ids = [
        [row % 3 * 100 + block if block < 5 else row * 1000 + block for block in range(-(-n // 8))]
        for row, n in enumerate(tokens)
    ]
    covered = np.array(tokens)
    return replace(trace, prefix_hashes=tuple(map(tuple, ids)), prefix_block_tokens=8, prefix_tokens=covered)


@st.composite
def systems(
    draw: st.DrawFn, models: tuple[ServedModel, ...], number: int, variants: Sequence[tuple[Any, Any]]
) -> tuple[SystemSpec, list[ServedModel]]:
    """A system, and the models on the GPU that it is expected to fill most."""
    if variants is VARIANTS and draw(st.integers(0, 2)) == 0:
        name = draw(st.sampled_from(SYSTEMS))
        return load_systems()[name], [max(models, key=_weight)] if name == "dedicated" else list(models)
    scheduler, memory = draw(st.sampled_from(variants))
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
    told = {json.dumps(line) for line in plain.log}
    assert all(json.dumps(line) in told for line in merged.log)  # fewer questions, with the same facts
    assert a.events <= b.events


def both_ways(scenario: Scenario) -> tuple[Logged, Logged]:
    return logged(scenario), logged(scenario, exact_steps=True)


@settings(max_examples=100, phases=[Phase.generate])  # shrinking whole clusters would take minutes
@given(clusters())
def check_a_cluster(scenario: Scenario) -> None:
    check_both_ways(scenario)


@settings(max_examples=100, phases=[Phase.generate])
@given(clusters(VIRTUAL))
def check_virtual_memory(scenario: Scenario) -> None:
    check_both_ways(scenario)


def check_both_ways(scenario: Scenario) -> None:
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
    seen.update(Fate(fate).name for fate in result.fate.tolist())
    instances = result.placement.instances
    seen["replicas"] += len(instances) > len({instance.model for instance in instances})
    seen["shared GPUs"] += len(instances) > len({instance.gpus for instance in instances})
    seen["merged away"] += plain.result.events - result.events


@pytest.mark.slow
@pytest.mark.pure_python  # a compiled class does not take a method of another
def test_merged_spans_equal_plain_steps_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the examples, which are the same on every run, are under pressure in every way."""
    stalled = Cluster.stalled

    def counted(self: Cluster, engine: Engine, now: float) -> None:
        seen["stalls"] += 1
        stalled(self, engine, now)

    monkeypatch.setattr(Cluster, "stalled", counted)
    seen.clear()
    check_a_cluster()
    assert seen["runs"] > 80 and seen["misfits"] < 20
    assert seen["preemptions"] > 300 and seen["stalls"] > 5
    assert seen["DROPPED"] > 100 and seen["REJECTED"] > 50 and seen["FINISHED"] > 1000
    assert seen["UNFINISHED"] == 0
    assert seen["replicas"] > 20 and seen["shared GPUs"] > 40
    assert seen["merged away"] > 15_000


@pytest.mark.slow
@pytest.mark.pure_python
def test_memory_that_takes_time_and_shares_prefixes_merges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    exposed_s = EngineKV.exposed_s

    def watched_exposed_s(self: EngineKV) -> float:
        seconds = exposed_s(self)
        seen["delays"] += seconds > 0
        return seconds

    def watched(reuse: Callable[[Any, SequenceState], int]) -> Callable[[EngineKV, SequenceState], int]:
        def watched_reuse(self: EngineKV, sequence: SequenceState) -> int:
            tokens = reuse(self, sequence)
            seen["reused"] += tokens > 0
            return tokens

        return watched_reuse

    monkeypatch.setattr(EngineKV, "exposed_s", watched_exposed_s)
    for kind in (EngineKV, PrefixBlocks):
        monkeypatch.setattr(kind, "reuse", watched(kind.reuse))
    seen.clear()
    check_virtual_memory()
    assert seen["runs"] > 80 and seen["UNFINISHED"] == 0
    assert seen["preemptions"] > 100 and seen["FINISHED"] > 1000
    assert seen["delays"] > 1000 and seen["reused"] > 200
    assert seen["shared GPUs"] > 40 and seen["merged away"] > 5000


def test_a_dispatch_is_news_for_the_other_engines_of_the_scope() -> None:
    """Prism's scheduler starts a late request in the call after the one that left nobody on time. At time 0 both engines
    start, and so ask: the second one must ask although the first did so at the same moment."""
    small, large = served("a", fmt="fp8", slo_s=0.5), served("b", "llama-3.1-8b", "awq", slo_s=0.02)
    engine = EngineSettings(token_budget=64, max_sequences=20, block_tokens=8)
    pool = 450 * geometry(large, engine).token_bytes
    engine = with_usable_bytes(fixed_bytes([small, large], engine) + pool, engine)
    rows = [(0.0, 150, 1, 1), (0.0, 40, 1, 1), (0.0, 40, 1, 1), (0.0, 15, 1, 1), (0.0, 40, 1, 0)]
    spec = system(pinned({"a": [[0]], "b": [[0]]}), "moore_hodgson", "kv_slab")
    merged, plain = both_ways(Scenario(spec, (small, large), gpus(1), trace_of(rows, "ab"), engine, sample_s=0))
    assert [(line["now_s"], line["engine"]) for line in plain.commands] == [(0.0, 1)] * 3 + [(0.0, 0), (0.0, 1)]
    assert_same(merged, plain)


def test_a_span_in_flight_ends_when_a_neighbour_learns_of_an_earlier_moment_to_ask() -> None:
    """Engine 0 falls idle while engine 1 decodes: from then on the last request of engine 0 may have to be dropped, earlier
    than anything that the span of engine 1 was planned to wait for."""
    a, b = served("a", tp=2, slo_s=0.02), served("b", tp=2, slo_s=0.5)
    engine = EngineSettings(token_budget=24, max_sequences=5, block_tokens=8, latency="roofline")
    pool = 333 * geometry(a, engine).token_bytes
    engine = with_usable_bytes(fixed_bytes([a, b], engine) + pool, engine)
    rows = [(0.02, 40, 60, 1), (0.03, 90, 20, 1), (0.09, 15, 1, 1), (0.09, 150, 16, 0), (0.11, 150, 1, 0)]
    spec = system(
        pinned({"a": [[0, 1]], "b": [[0, 1]]}),
        {"policy": "moore_hodgson", "late": "drop", "late_start": "after_all", "reserve": "page"},
        {"policy": "private", "split": "equal"},
        "fluid",
    )
    merged, plain = both_ways(Scenario(spec, (a, b), gpus(2), trace_of(rows, "ab"), engine, sample_s=0))
    assert "Drop" in {line["command"] for line in plain.commands}
    assert_same(merged, plain)


def test_a_run_ends_with_its_last_event_and_not_with_one_that_was_given_up() -> None:
    """b decodes at half pace until a has finished; what the clock still holds is the end that b was planned to have then."""
    a, b = served("a", "llama-3.1-8b"), served("b", "llama-3.1-8b")
    spec = system(pinned({"a": [[0]], "b": [[0]]}), memory={"policy": "private", "split": "equal"})
    trace = trace_of([(0.0, 64, 50, 0), (0.0, 64, 53, 1)], "ab")
    merged, plain = both_ways(Scenario(spec, (a, b), gpus(1), trace, sample_s=0))
    assert plain.result.end_s == plain.result.finish_s.max()
    assert merged.result.end_s == merged.result.finish_s.max()


# --- events, not seconds -----------------------------------------------------------------------------------------------

BENCH = Path(__file__).parents[3] / "shared" / "bench" / "workload_10k.csv"
M = served(name="llama-3.1-8b", rate_per_s=8.2, slo_s=1.0, prompt=615, output=245)


def events(arrival_s: Any, prompts: Any, outputs: Any, *, plain: bool = True) -> tuple[int, int]:
    """Events of the merged and (0 unless ``plain``) the plain run of a single engine."""
    n = len(arrival_s)
    trace = Trace(arrival_s, np.zeros(n, dtype=np.int32), prompts, outputs, ("m",), source="test")
    scenario = replace(solo([(0.0, 1, 1)], EngineSettings(token_budget=512, max_sequences=128), m=M), trace=trace)
    scenario = replace(scenario, sample_s=0)
    merged = logged(scenario).result
    assert (merged.fate == Fate.FINISHED).all()
    return merged.events, logged(scenario, exact_steps=True).result.events if plain else 0


@pytest.fixture(params=["bench", "generated"])
def load(request: pytest.FixtureRequest) -> tuple[Any, Any, Any]:
    """The first 1,000 requests of the benchmark's workload, or as many of the same kind: arrival_s, prompts, outputs."""
    if request.param == "bench":
        if not BENCH.exists():
            pytest.skip("shared/bench lies beside the checkout and is absent here")
        frame = pd.read_csv(BENCH).head(1000)
        return frame.arrival_s.to_numpy(), frame.prompt_tokens.to_numpy(), frame.output_tokens.to_numpy()
    rng = np.random.default_rng(3)
    lengths = [np.clip(rng.lognormal(mean, 1.0, 1000), 1, 4000).astype(np.int64) for mean in (6.0, 5.0)]
    return np.cumsum(rng.exponential(1 / 8.2, 1000)), *lengths


def test_merging_saves_events(load: tuple[Any, Any, Any]) -> None:
    merged, plain = events(*load)
    assert merged <= plain / 2
    assert merged <= 6 * 1000


@pytest.mark.slow
def test_events_grow_with_requests_and_not_with_tokens(load: tuple[Any, Any, Any]) -> None:
    """Outputs and gaps eight times as long: the same number of decisions, eight times the iterations."""
    arrival_s, prompts, outputs = load
    merged, plain = events(8 * arrival_s, prompts, 8 * outputs)
    assert merged <= plain / 15
    assert merged <= 6 * 1000
