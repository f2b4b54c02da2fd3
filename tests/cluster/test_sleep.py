"""Engines that sleep: activations take what their tier takes, and GPUs keep their books."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fleetkit import PRISM, fleet
from lawkit import bounded, differences
from pydantic import ValidationError
from simkit import H100, Row

from fineserve_sim.catalog import loaders, weight_bytes
from fineserve_sim.cluster import EngineSettings, Fate, Fault, Gpu, RunResult, Scenario
from fineserve_sim.cluster.compose.policies import build_activation_cost, build_residency
from fineserve_sim.cluster.fleet.loader import SWITCH_S
from fineserve_sim.policy.interfaces import GpuSlot
from fineserve_sim.systems.spec import (
    DedicatedPlacementSpec,
    DriftingResidencySpec,
    PrismResidencySpec,
    TimetableResidencySpec,
)

IN_TURN: list[Row] = [(10.0 * turn, 64, 4, turn % 2) for turn in range(6)]
"""A request of one model, then one of the other. A GPU holds only one of them."""
ALONE = {"policy": "pinned", "groups": {"m0": [[0]]}}
START_S = 4.0


def alternating(rows: Sequence[Row] = IN_TURN, residency: dict[str, Any] | None = None, **sleep: Any) -> Scenario:
    """One GPU with room for one of two models; the one without requests gives way to the other."""
    policy = {"policy": "prism", "idle_s": 1.0, "move": False, "engine_start_s": START_S}
    policy |= {"sleep": sleep} if residency is None else residency
    return fleet(rows, policy, models=2, hosted=1, kv_tokens=100_000, placement=ALONE, drain_s=60.0)


def loaded_s(scenario: Scenario) -> list[float]:
    """The TTFT of each request beyond that of the first, which finds its engine there."""
    ttft_s = bounded(scenario).result.first_token_s - scenario.trace.arrival_s
    return (ttft_s[1:] - ttft_s[0]).tolist()


def transfer_s(scenario: Scenario, loader: str) -> float:
    return SWITCH_S + one_bytes(scenario) / loaders()[loader].bytes_per_s.value


def one_bytes(scenario: Scenario) -> int:
    return weight_bytes(scenario.models[0].model, scenario.models[0].precision, 1)


@pytest.mark.parametrize("family", ["serverlessllm", "safetensors"])
def test_a_model_comes_from_where_its_weights_are(family: str) -> None:
    """m1 has never been there; then both sleep and wake in turn, at level 1 and without host memory at level 2. Without
    processes each starts anew."""
    for host_gib, medium in [(100, "host"), (0, "disk")]:
        scenario = alternating(loader=family, host_gib=host_gib)
        gone_s = START_S + transfer_s(scenario, f"{family}-disk")
        woken_s = transfer_s(scenario, f"{family}-{medium}")
        assert loaded_s(scenario) == pytest.approx([gone_s, *[woken_s] * 4], abs=1e-6)
    scenario = alternating(loader=family, host_gib=100, processes=0)
    assert loaded_s(scenario) == pytest.approx([START_S + transfer_s(scenario, f"{family}-disk")] * 5, abs=1e-6)


def test_host_memory_for_one_model_is_that_of_the_last_asleep() -> None:
    """When m0 is to wake, m1 has just fallen asleep, and its weights took the place of m0's."""
    one_gib = one_bytes(alternating(host_gib=0)) / 2**30
    result = bounded(alternating(host_gib=1.5 * one_gib)).result
    assert result.counters == {"wakes_from_host": 0, "wakes_from_disk": 4, "starts": 1}


def test_more_host_memory_is_never_worse() -> None:
    rows: list[Row] = [*IN_TURN, (60.0, 64, 4, 0), (70.0, 64, 4, 1)]
    loads = [loaded_s(alternating(rows, host_gib=gib)) for gib in (0, 1, 2.5, 5, 8, 100)]
    for less, more in pairwise(loads):
        assert all(np.array(more) <= np.array(less) + 1e-9)
    assert sum(loads[-1]) < sum(loads[0])


def test_activations_are_counted_by_tier_where_engines_sleep() -> None:
    assert bounded(alternating(host_gib=100)).result.counters == {
        "wakes_from_host": 4,
        "wakes_from_disk": 0,
        "starts": 1,
    }
    assert bounded(alternating(residency={})).result.counters == {}


def assert_alike(one: Scenario, other: Scenario) -> None:
    """Bit for bit, but for the counters."""
    first, second = bounded(one), bounded(other)
    told = [line for line in differences(first, second) if not line.startswith("counters")]
    assert not told and (first.result.fate == Fate.FINISHED).all()


def test_without_processes_every_activation_is_a_start_from_disk() -> None:
    assert_alike(
        alternating(host_gib=100, processes=0, loader="safetensors"),
        alternating(residency={"loader": "safetensors-disk", "engine_pool": False}),
    )


TIMES: list[dict[str, Any]] = [
    {"from_s": 0, "groups": {"m0": [[0]], "m1": [[0]]}},
    {"from_s": 3, "groups": {"m0": [[0]]}},
    {"from_s": 8, "groups": {"m0": [[0]], "m1": [[0]]}},
    {"from_s": 12, "groups": {"m1": [[0]]}},
    {"from_s": 20, "groups": {"m0": [[0]], "m1": [[0]]}},
]


def test_boundless_sleep_without_bytes_of_processes_is_the_host_loader() -> None:
    """Both models are there at first, and no process takes memory: sleeping costs nothing, and all come from host memory."""
    rows: list[Row] = [(0.5 * turn, 64, 20, turn % 2) for turn in range(60)]
    settings = EngineSettings(token_budget=256, max_sequences=16, context_bytes=0, deployment="vllm-eager")
    timetable = {"policy": "timetable", "entries": TIMES}
    pair = [
        fleet(rows, timetable | options, models=2, settings=settings, drain_s=60.0)
        for options in ({"sleep": {"host_gib": 1000}}, {"loader": "serverlessllm-host"})
    ]
    assert_alike(*pair)
    assert bounded(pair[0]).result.counters["wakes_from_host"] == 2


def test_a_process_keeps_its_bytes_from_kv_memory() -> None:
    """The same timetable with processes of 512 MiB and graphs: while m1 sleeps, m0 has that much less memory for KV."""
    rows: list[Row] = [(0.0, 64, 4, 0), (5.0, 64, 4, 0), (25.0, 64, 4, 1)]
    timetable = {"policy": "timetable", "entries": TIMES}
    resized = []
    for options in ({"sleep": {"host_gib": 1000}}, {"loader": "serverlessllm-host"}):
        run = bounded(fleet(rows, timetable | options, models=2, kv_tokens=40_000, drain_s=60.0))
        sizes = [
            line["kv_tokens"] for line in run.log if line.get("event") == "EnginesResized" and 3 <= line["now_s"] < 8
        ]
        resized.append(next(tokens for size in sizes for tokens in size.values()))
    assert resized[0] < resized[1]


def test_a_lost_gpu_ends_its_sleepers() -> None:
    """m0 sleeps there when the GPU fails; both start anew when it is back."""
    rows = [row for row in IN_TURN if row[0] < 25]
    scenario = alternating(rows, host_gib=100)
    lost = fleet(
        rows,
        scenario.system.residency.model_dump(),  # type: ignore[union-attr]
        models=2,
        hosted=1,
        kv_tokens=100_000,
        placement=ALONE,
        drain_s=60.0,
        faults=(Fault(16.0, 0, 1.0, "gpu"),),
    )
    assert bounded(scenario).result.counters == {"wakes_from_host": 1, "wakes_from_disk": 0, "starts": 1}
    result: RunResult = bounded(lost).result
    assert result.counters == {"wakes_from_host": 0, "wakes_from_disk": 0, "starts": 2}
    assert (result.fate == Fate.FINISHED).all()


def test_an_engine_on_other_gpus_starts_anew() -> None:
    """m0 leaves GPU 0 for GPU 1, and comes back to the process that it left."""
    entries = [{"from_s": 5.0 * turn, "groups": {"m0": [[turn % 2]]}} for turn in range(3)]
    timetable = {"policy": "timetable", "entries": entries, "engine_start_s": 1.0, "sleep": {"host_gib": 100}}
    cards = (Gpu(0, 0, H100), Gpu(1, 0, H100))
    run = bounded(fleet([(20.0, 64, 4)], timetable, cards=cards, kv_tokens=100_000, drain_s=60.0))
    assert run.result.counters == {"wakes_from_host": 1, "wakes_from_disk": 0, "starts": 1}


@pytest.mark.parametrize("memory", [{"policy": "private", "split": "equal"}, {"policy": "kvcached", "mode": "sync"}])
def test_models_take_turns_on_a_gpu_asleep_and_awake(memory: dict[str, Any]) -> None:
    turns = [0, 1, 2, 1, 2, 3, 2, 1, 0, 1, 0, 3, 0, 3, 1]
    rows: list[Row] = [(3.0 * turn, 64, 30, model) for turn, model in enumerate(turns)]
    policy = PRISM | {"idle_s": 1.0, "engine_start_s": 1.0, "sleep": {"host_gib": 5, "processes": 3}}
    scenario = fleet(rows, policy, models=4, hosted=1, kv_tokens=200_000, memory=memory, drain_s=60.0)
    result = bounded(scenario).result
    assert (result.fate == Fate.FINISHED).all()
    assert result.counters["wakes_from_host"] and result.counters["starts"], result.counters


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loader": "safetensors-host"}, "leave loader out"),
        ({"engine_pool": False}, "leave engine_pool and parallel_loading out"),
        ({"parallel_loading": False}, "leave engine_pool and parallel_loading out"),
        ({"sleep": {"host_gib": -1}}, "greater than or equal to 0"),
        ({"sleep": {}}, "Field required"),
    ],
)
def test_what_sleep_says_itself_is_said_nowhere_else(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        PrismResidencySpec.model_validate({"sleep": {"host_gib": 1}} | options)


def test_drifting_reckons_with_weights_from_host_memory() -> None:
    spec = DriftingResidencySpec.model_validate({"sleep": {"host_gib": 1, "loader": "safetensors"}})
    host = loaders()["safetensors-host"].bytes_per_s.value
    policy = build_residency(spec, DedicatedPlacementSpec(), {}, [GpuSlot(0, 0, 1)])
    assert policy.load_bytes_per_s == host  # type: ignore[attr-defined]
    timetable = {"entries": [{"from_s": 0, "groups": {}}], "sleep": {"host_gib": 1, "loader": "safetensors"}}
    assert build_activation_cost(TimetableResidencySpec.model_validate(timetable)).gpu_bytes_per_s == host
