"""A fleet in which nobody comes or goes is a static cluster: its engines know how much they hold, and how fast they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleetkit import PRISM, QLM, STAYS, fleet
from lawkit import bounded, differences
from simkit import H100, Row, gpus

from fineserve_sim.catalog import gpu
from fineserve_sim.cluster import EngineSettings, Fate, Fault, Gpu, Scenario, ScenarioError, simulate


def assert_static(rows: list[Row], **options: Any) -> None:
    """The same requests through a fleet that stays as it is and through the static cluster end alike, bit for bit."""
    at_rest, static = (bounded(fleet(rows, residency, **options)) for residency in (STAYS, None))
    assert next(differences(at_rest, static, commands=False, timelines=False), None) is None


def test_an_output_beyond_the_memory_is_cut_and_blocks_nobody() -> None:
    rows: list[Row] = [(0.0, 64, 100_000), (0.5, 64, 8), (20.0, 64, 8)]
    run = bounded(fleet(rows, STAYS, drain_s=50.0))
    assert run.result.fate.tolist() == [Fate.CUT, Fate.FINISHED, Fate.FINISHED]
    assert run.result.preemptions.sum() == 0
    assert_static(rows, drain_s=50.0)


def test_a_request_whose_gpu_fails_ends_where_its_next_engine_ends_it() -> None:
    """Two engines share 4,096 tokens of KV; alone on the other GPU one has the memory of its neighbour's weights, too."""
    rows: list[Row] = [(0.0, 64, 5000, 0), (1.0, 64, 8, 1)]
    options: Mapping[str, Any] = {
        "models": 2,
        "cards": (Gpu(0, 0, H100), Gpu(1, 0, H100)),
        "placement": {"policy": "pinned", "groups": {"m0": [[0]], "m1": [[0]]}},
        "drain_s": 200.0,
    }
    stays = bounded(fleet(rows, STAYS, **options)).result
    assert (stays.fate[0], stays.generated_tokens[0]) == (Fate.CUT, 4096 - 64)
    moved = bounded(fleet(rows, STAYS, faults=(Fault(2.0, 0, None, "gpu"),), **options)).result
    assert (moved.fate[0], moved.generated_tokens[0]) == (Fate.FINISHED, 5000)


def test_a_prompt_that_its_engine_cannot_hold_is_rejected() -> None:
    """Two models on a GPU have 4,096 tokens of KV between them; a GPU with one model would have more."""
    rows: list[Row] = [(0.0, 6000, 2, 0), (1.0, 64, 2, 1)]
    run = bounded(fleet(rows, STAYS, models=2, drain_s=20.0))
    assert run.result.fate.tolist() == [Fate.REJECTED, Fate.FINISHED]
    assert_static(rows, models=2, drain_s=20.0)


@pytest.mark.parametrize("mode", ["sync", "buffered", "contiguous"])
@pytest.mark.parametrize("where", ["in the queue", "in its prefill"])
def test_a_prompt_too_long_since_another_model_came_blocks_nobody(mode: str, where: str) -> None:
    """It is turned away when the engine's memory shrinks; who waits behind it is served."""
    first = (0.0, 64, 2000, 0) if where == "in the queue" else (0.0, 64, 8, 0)
    rows: list[Row] = [first, (0.1, 80_000, 8, 0), (0.3, 64, 8, 1), (0.4, 64, 8, 0), (9.0, 64, 8, 0)]
    run = bounded(
        fleet(
            rows,
            STAYS,
            models=2,
            hosted=2,
            kv_tokens=40_000,
            memory={"policy": "kvcached", "mode": mode},
            placement={"policy": "pinned", "groups": {"m0": [[0]]}},
            settings=EngineSettings(token_budget=256, max_sequences=1 if where == "in the queue" else 16),
            drain_s=60.0,
        )
    )
    assert run.result.fate.tolist() == [Fate.FINISHED, Fate.REJECTED, *[Fate.FINISHED] * 3]
    assert run.result.preemptions.sum() == (where == "in its prefill")


@pytest.mark.parametrize("order", ["fast first", "slow first"])
def test_every_engine_runs_at_the_speed_of_its_own_gpu(order: str) -> None:
    specs = [H100, gpu("a100-80gb")]
    fast, slow = (0, 1) if order == "fast first" else (1, 0)
    cards = (Gpu(fast, 0, specs[0]), Gpu(slow, 0, specs[1]))
    cards = tuple(sorted(cards, key=lambda card: card.id))
    placement = {"policy": "pinned", "groups": {"m0": [[fast]], "m1": [[slow]]}}
    options: Mapping[str, Any] = {"models": 2, "hosted": 1, "cards": cards, "placement": placement}
    rows: list[Row] = [(0.0, 64, 50, 0), (0.0, 64, 50, 1)]
    on_fast, on_slow = bounded(fleet(rows, STAYS, **options)).result.finish_s
    assert on_fast < on_slow
    assert_static(rows, **options)


@pytest.mark.parametrize("mode", ["sync", "buffered", "contiguous"])
def test_engines_that_are_there_from_the_start_have_their_pages(mode: str) -> None:
    assert_static([(0.0, 64, 8)], memory={"policy": "kvcached", "mode": mode})


@pytest.mark.parametrize("residency", [None, PRISM, QLM])
def test_a_model_for_which_nobody_expects_requests_is_served(residency: dict[str, Any] | None) -> None:
    run = bounded(fleet([(0.0, 64, 8)], residency, rate_per_s=0.0))
    assert run.result.fate.tolist() == [Fate.FINISHED]


# --- private pools -----------------------------------------------------------------------------------------------------

TOGETHER = {"policy": "pinned", "groups": {"m0": [[0]], "m1": [[0]]}}
PAIRS: list[Row] = [(0.0, 640, 30, 0), (0.0, 640, 30, 1), (3.0, 640, 30, 0), (3.0, 640, 30, 1)]


def private(residency: dict[str, Any] | None, **options: Any) -> Scenario:
    return fleet(
        PAIRS,
        residency,
        models=2,
        placement=TOGETHER,
        memory={"policy": "private"} | options,
        kv_tokens=4096,
        drain_s=20.0,
    )


@pytest.mark.parametrize("residency", [STAYS, PRISM])
def test_engines_on_one_gpu_share_what_their_weights_leave(residency: dict[str, Any]) -> None:
    """No GPU gives more KV memory than the static cluster has there, and every engine gets some."""
    run, static = bounded(private(residency)).result, bounded(private(None)).result
    assert (run.fate == Fate.FINISHED).all()
    held = run.timeline.kv_used_bytes.sum(axis=1) + run.timeline.gpu_free_bytes.sum(axis=1)
    assert (held <= sum(static.kv_capacity_bytes)).all()


def test_engines_that_load_at_once_share_what_their_weights_leave() -> None:
    """Two models come to a GPU in the place of two others: who is ready first leaves the other its part."""
    rows: list[Row] = [(0.0, 64, 8, 0), (0.0, 64, 8, 1), (10.0, 640, 30, 2), (10.0, 640, 30, 3), (12.0, 640, 30, 3)]
    run = bounded(
        fleet(rows, PRISM, models=4, hosted=2, placement=TOGETHER, memory={"policy": "private"}, drain_s=20.0)
    )
    assert run.result.fate.tolist() == [Fate.FINISHED] * 5
    longest = {id: tokens for line in run.log for id, tokens in line.get("kv_tokens", {}).items()}
    assert longest["2"] == longest["3"] > 0


@pytest.mark.parametrize(("split", "ratio"), [("equal", 1.0), ("demand", 3.0), ("footprint", 1.0)])
def test_split_divides_among_engines_that_load_at_once(split: str, ratio: float) -> None:
    """By demand a model with three times the requests gets three times the tokens, as where it is from the start. Footprints
    have KV for all requests of a rate; those of these models do not fit beside each other, and leave equal parts."""
    rows: list[Row] = [(0.0, 64, 8, 0), (0.0, 64, 8, 1), (10.0, 64, 8, 2), (10.0, 64, 8, 3)]
    memory = {"policy": "private", "split": split, "least_tokens": 16}
    scenario = fleet(rows, PRISM, models=4, hosted=2, kv_tokens=1000, placement=TOGETHER, memory=memory, drain_s=20.0)
    models = tuple(replace(m, rate_per_s=300.0 if m.id == "m2" else 100.0) for m in scenario.models)
    run = bounded(replace(scenario, models=models))
    assert run.result.fate.tolist() == [Fate.FINISHED] * 4
    held = {id: tokens for line in run.log for id, tokens in line.get("kv_tokens", {}).items()}
    assert held["2"] / held["3"] == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize(
    "option",
    [{"split": "equal"}, {"split": "demand"}, {"prefix_cache": True}, {"attention": "paged_attention_v0.4.2"}],
    ids=str,
)
def test_options_of_private_memory_count_in_a_fleet_or_are_refused_by_name(option: dict[str, Any]) -> None:
    static = bounded(_alike(private(None, **option))).result
    try:
        run = bounded(_alike(private(STAYS, **option))).result
    except ValueError as problem:
        assert next(iter(option)) in str(problem)
        return
    np.testing.assert_array_equal(run.fate, static.fate)
    np.testing.assert_array_equal(run.finish_s, static.finish_s)


def _alike(scenario: Scenario) -> Scenario:
    """All prompts are the same text."""
    keys = tuple(range(640 // 16))
    trace = replace(scenario.trace, prefix_hashes=(keys,) * len(PAIRS), prefix_block_tokens=16)
    return replace(scenario, trace=trace)


def test_gpus_that_qlm_cannot_divide_are_one_line() -> None:
    """Its workers have one TP degree each; a ValueError would be taken for a bug."""
    scenario = fleet([(0.0, 16, 2)], QLM, models=2)
    over_two = replace(scenario.models[1], tp=2)
    alike = replace(scenario, models=(scenario.models[0], over_two), gpus=gpus(2))
    with pytest.raises(ScenarioError, match="system fleet: QLM needs a worker of 2 GPUs"):
        simulate(alike)
