"""Random clusters of many kinds obey the laws of ``lawkit``; ``many_runs.py`` runs as many of them as one likes."""

from __future__ import annotations

from collections import Counter
from typing import get_args, get_type_hints

import pytest
from lawkit import as_text
from logkit import DECODE, commands_of, event_of, events_of, exchanges_of, replay
from randomkit import judged, scenario_of

from fineserve_sim.cluster import simulate
from fineserve_sim.policy.events import EngineFailed, Event, GpusRepaired

CASES = {
    "static": (12, {"preemptions": 20, "rejected": 30, "dropped": 3}),
    "prism": (5, {"activations": 5, "evictions": 5, "preemptions": 1}),
    "qlm": (9, {"activations": 30, "evictions": 30}),
    "drifting": (4, {"activations": 2}),
    "timetable": (4, {"activations": 10, "evictions": 10}),
    "sleeping": (6, {"faults": 5, "activations": 20, "evictions": 15, "finished": 100}),
    "failing": (8, {"faults": 10, "activations": 20, "finished": 150}),
    "replicas": (5, {"preemptions": 15}),
    "instances": (6, {"preemptions": 20, "faults": 2}),
    "llumnix": (6, {"preemptions": 30, "faults": 5, "migrations": 10}),
    "roles": (6, {"preemptions": 30, "faults": 5, "migrations": 100}),
    "beside": (12, {"preemptions": 5, "migrations": 10, "rejected": 5, "finished": 200}),
    "pipelines": (5, {"preemptions": 50, "faults": 5}),
    "kunserve": (7, {"preemptions": 10, "faults": 3, "drops": 3, "restores": 3}),
    "offloading": (8, {"preemptions": 10, "activations": 5, "finished": 150}),
    "drafting": (8, {"preemptions": 3, "activations": 10, "finished": 150}),
    "ranks": (6, {"preemptions": 5, "finished": 150}),
    "tiled": (9, {"preemptions": 50, "activations": 2, "finished": 200}),
}
"""By kind: how many seeds, and how often what must happen in them, for a law that nothing tries is none."""

FOUND = [("llumnix", 136), ("kunserve", 125), ("prism", 260), ("offloading", 369)]
"""Clusters in which ``many_runs.py`` saw a law broken, each for a reason of its own."""


@pytest.mark.parametrize("kind", CASES)
def test_the_laws_hold_in_the_first_cluster(kind: str) -> None:
    verdict = judged(kind, 0)
    assert not verdict.broken, as_text(verdict.broken)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_the_laws_hold_in_many(kind: str) -> None:
    seeds, least = CASES[kind]
    counts: Counter[str] = Counter()
    for seed in range(seeds):
        verdict = judged(kind, seed)
        assert not verdict.broken, f"{kind} {seed}: {as_text(verdict.broken)}"
        counts += verdict.counts
    assert all(counts[name] >= number for name, number in least.items()), counts


@pytest.mark.parametrize(("kind", "seed"), FOUND)
def test_what_many_runs_found_holds(kind: str, seed: int) -> None:
    assert not judged(kind, seed).broken


def test_a_seed_is_one_cluster() -> None:
    first, second = scenario_of("prism", 1), scenario_of("prism", 1)
    assert (first.system, first.models, first.gpus, first.engine) == (
        second.system,
        second.models,
        second.gpus,
        second.engine,
    )
    assert first.trace.arrival_s.tolist() == second.trace.arrival_s.tolist()
    assert scenario_of("prism", 2).trace.arrival_s.tolist() != first.trace.arrival_s.tolist()
    assert simulate(first).fate.tolist() == simulate(second).fate.tolist()


# --- decision logs -----------------------------------------------------------------------------------------------------

LOG = [
    {"now_s": 1.0, "event": "EngineReady", "engine": 3},
    {"now_s": 1.0, "command": "Dispatch", "request_id": 7, "engine": 3},
    {"now_s": 1.0, "command": "Evict", "engine": 2, "drain": True},
    {"now_s": 1.5, "span": "EngineComputed", "engine": 3},
    {"now_s": 2.0, "event": "EngineDrained", "engine": 2},
]


def test_a_log_falls_into_events_with_their_commands() -> None:
    ready, drained = exchanges_of(LOG)
    assert [line["command"] for line in ready.commands] == ["Dispatch", "Evict"] and not drained.commands
    assert events_of(LOG) == [LOG[0], LOG[4]] and commands_of(LOG) == [LOG[1], LOG[2]]
    with pytest.raises(ValueError, match="no event comes before"):
        exchanges_of(LOG[1:])


def test_events_come_back_from_their_lines() -> None:
    state = {"running": 1, "decoding": 1, "prefill_tokens": 0, "free_slots": 3, "free_kv_tokens": 64, "slowdown": 1.0}
    stepped = event_of({"now_s": 0.0, "event": "EngineStepped", "engine": 2, "engines": {"2": state}})
    assert stepped.engines[2].free_kv_tokens == 64
    tick = event_of({"now_s": 0.0, "event": "Tick", "running": {"2": 3}, "free_bytes": {"0": 5}, "loads": {}})
    assert tick.running == {2: 3} and tick.free_bytes == {0: 5}
    fields = {"id": 4, "model": "m", "arrival_s": 0.5, "prompt_tokens": 10}
    assert event_of({"now_s": 0.5, "event": "RequestArrived", "request": fields}).request.prompt_tokens == 10
    assert event_of({"now_s": 0.5, "event": "GpusRepaired", "gpus": [2, 3]}) == GpusRepaired((2, 3))
    assert event_of({"now_s": 0.5, "event": "EngineFailed", "engine": 1, "lost": [2]}) == EngineFailed(1, (2,))


@pytest.mark.parametrize("kind", get_args(Event))
def test_every_field_that_json_has_no_form_for_is_decoded(kind: type) -> None:
    """Other than numbers and words: an event with a new one would come back from a file as something else."""
    assert {name for name, hint in get_type_hints(kind).items() if hint not in (int, float, str)} <= DECODE.keys()


def test_a_replay_names_the_first_other_answer() -> None:
    from fineserve_sim.policy.commands import Dispatch, Evict
    from fineserve_sim.policy.events import EngineReady

    def handle(now: float, event: object) -> list[object]:
        return [Dispatch(7, 3), Evict(2, True)] if isinstance(event, EngineReady) else []

    assert replay(LOG, handle) is None
    assert "event 0, EngineReady at 1.0 s" in (replay(LOG, lambda now, event: []) or "")
    assert "event 1, EngineDrained" in (replay(LOG, lambda now, event: handle(now, EngineReady(3))) or "")
