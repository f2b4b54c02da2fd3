"""KunServe's drop, exchange, restore, failure and scale-out on a small cluster, with the bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from groupkit import GroupRun, burst, cluster, lawful, simulate_groups, system, ttft_s
from logkit import exchanges_of, replay
from simkit import Row, trace_of

from fineserve_sim.catalog import weight_bytes
from fineserve_sim.cluster import EngineSettings, Fate, Scenario
from fineserve_sim.cluster.compose.memory import geometry
from fineserve_sim.cluster.scenario import Fault
from fineserve_sim.cluster.simulation import prepare
from fineserve_sim.systems.spec import PrivatePoolsSpec, SpareInstancesSpec

DROPS = ("kunserve-drop", "kunserve-exchange", "kunserve")


def spike(
    name: str = "kunserve", requests: int = 120, late: tuple[Row, ...] = ((6.0, 20, 2),), **options: Any
) -> Scenario:
    """Many requests at once on four instances that hold 100 blocks each, and one when all is over."""
    return cluster(name, [*burst(requests, 180, 150), *late], **{"blocks": 100, **options})


def copy_bytes(scenario: Scenario) -> int:
    model = scenario.models[0]
    return weight_bytes(model.model, model.precision, 1)


@pytest.mark.parametrize("name", DROPS)
def test_a_spike_drops_layers_and_calm_restores_them(name: str) -> None:
    scenario = spike(name)
    run = lawful(scenario)
    assert run.report.drops and run.report.restores
    assert run.capacity_bytes[0] == run.capacity_bytes[-1]
    layers = scenario.models[0].model.layers
    copies = np.unique((run.capacity_bytes - run.capacity_bytes[0]) / (copy_bytes(scenario) // layers * layers))
    assert set(copies.tolist()) <= {0.0, 1.0, 2.0, 3.0} and len(copies) > 1
    assert run.groups[-1] == 4


def test_dropping_cuts_the_tail_that_waits_for_memory() -> None:
    scenario = spike()
    waits = {
        name: np.quantile(ttft_s(scenario, lawful(spike(name))), 0.99) for name in ("vllm-dp", "infercept", "kunserve")
    }
    assert waits["kunserve"] < waits["vllm-dp"] / 2
    assert waits["kunserve"] < waits["infercept"] / 2


def test_without_restore_pipelines_stay() -> None:
    run = lawful(spike("kunserve-norestore"))
    assert run.report.drops and not run.report.restores
    assert run.groups[-1] < 4


def _one_exchange(name: str, network_bytes_per_s: float) -> tuple[Scenario, GroupRun]:
    """Two instances, each with the same few requests in flight when both queues fill."""
    rows: list[Row] = [*[(0.0, 320, 300)] * 8, *[(0.1, 320, 40)] * 10]
    scenario = cluster(name, rows, instances=2, blocks=100, network_bytes_per_s=network_bytes_per_s)
    return scenario, lawful(scenario)


@pytest.mark.parametrize("name", ["kunserve-drop", "kunserve-exchange"])
def test_an_exchange_moves_half_of_each_sides_kv_both_ways_at_once(name: str) -> None:
    rate = 1e9
    scenario, run = _one_exchange(name, rate)
    assert [target for _, target in run.report.drops] == [(0, 1)]
    block = geometry(scenario.models[0], scenario.engine)
    moved_tokens = run.report.exchange_bytes / (block.token_bytes / 2)
    assert moved_tokens == pytest.approx(
        8 * 320, rel=0.25
    )  # four requests of 320 tokens and what they generated, each side
    (seconds,) = run.report.exchange_s
    one_way_s = run.report.exchange_bytes / 2 / rate
    if name == "kunserve-drop":
        assert seconds == pytest.approx(one_way_s, rel=0.1)
    else:  # activations of those that run meanwhile go first
        assert one_way_s * (1 - 1e-9) <= seconds < 2 * one_way_s


def test_affected_requests_stall_and_new_ones_run_meanwhile() -> None:
    """On a slow network the exchange lasts; coordinated, later prompts go on behind it, in bulk they wait for the link."""
    first = {}
    for name in ("kunserve-drop", "kunserve-exchange"):
        _, run = _one_exchange(name, 1e8)
        (drop_s, _), (seconds,) = run.report.drops[0], run.report.exchange_s
        assert (run.result.finish_s[:8] > drop_s + seconds / 2).all()
        first[name] = np.min(run.result.first_token_s[8:][run.result.first_token_s[8:] > drop_s])
    assert first["kunserve-exchange"] < first["kunserve-drop"]


def test_a_second_spike_merges_pairs_into_fours() -> None:
    """Weights of the small model are worth many blocks, so it takes many requests to fill what a pair gives."""
    many = EngineSettings(token_budget=2048, max_sequences=4096)
    rows = burst(1500, 100, 250, gap_s=5e-4)
    run = lawful(
        cluster("kunserve", rows, instances=4, blocks=60, network_bytes_per_s=1e12, settings=many, check=False)
    )
    sizes = [len(target) for _, target in run.report.drops]
    assert 4 in sizes and 2 in sizes and sizes.index(2) < sizes.index(4)


def test_restore_pulls_each_missing_layer_once() -> None:
    scenario = spike()
    run = lawful(scenario)
    layers = scenario.models[0].model.layers
    restored = sum(len(target) - 1 for _, target in run.report.restores)
    assert run.report.weight_bytes == pytest.approx(restored * (copy_bytes(scenario) // layers) * layers)


def test_requests_of_a_failed_pipeline_are_recomputed_and_the_instance_comes_back() -> None:
    scenario = spike(requests=120, late=((8.0, 20, 2),))
    drop_s, target = lawful(scenario).report.drops[0]
    fault = Fault(drop_s + 0.05, target[0], repair_s=2.0)
    run = lawful(scenario, [fault])
    assert (run.result.fate == Fate.FINISHED).all()
    assert run.result.preemptions.sum() > 0
    during = run.result.timeline.time_s
    lost = (during > fault.time_s) & (during < fault.time_s + 1.9)
    assert (run.result.timeline.kv_used_bytes[lost, target[0]] == 0).all()
    assert run.groups[-1] == 4


def test_a_pipeline_of_three_and_one_alone_merge_although_layers_have_to_move() -> None:
    """Quarters do not lie inside thirds: a stage pulls the layer that it never held before it runs."""
    rows = [*burst(900, 100, 250, gap_s=5e-4), *[(1.2 + i * 5e-4, 100, 250) for i in range(1500)]]
    many = EngineSettings(token_budget=2048, max_sequences=4096)
    scenario = cluster("kunserve", rows, instances=4, blocks=40, network_bytes_per_s=1e12, settings=many, check=False)
    run = lawful(scenario, [Fault(0.001, 3, repair_s=0.6)])
    merged = [len(target) for _, target in run.report.drops]
    assert 3 in merged and 4 in merged[merged.index(3) :]
    restored = sum(len(target) - 1 for _, target in run.report.restores)
    layers = scenario.models[0].model.layers
    moved_layers = run.report.weight_bytes / (copy_bytes(scenario) // layers)
    assert moved_layers > (restored + 1) * layers  # beside those of restores and of the repair


def test_an_instance_that_fails_while_it_loads_serves_once_when_it_is_back() -> None:
    scenario = cluster("kunserve", burst(60, 100, 100, gap_s=0.02))
    run = lawful(scenario, [Fault(0.1, 0, 0.001), Fault(0.11, 0, 0.001), Fault(0.12, 0, 0.05)])
    assert (run.result.fate == Fate.FINISHED).all()
    assert run.groups[-1] == 4


def test_kept_prefixes_do_not_keep_a_pipeline_together() -> None:
    """What is kept for others fills memory and stays; it is given up when the layers come back."""
    caching = system("kunserve").model_copy(update={"memory": PrivatePoolsSpec(prefix_cache=True)})
    rows: list[Row] = [*burst(120, 180, 150), (6.0, 20, 2)]
    ids = [tuple(100 * row + block for block in range(prompt // 16)) for row, (_, prompt, _) in enumerate(rows)]
    trace = replace(trace_of(rows), prefix_hashes=tuple(ids), prefix_block_tokens=16)
    run = lawful(cluster(caching, trace))
    assert run.report.drops and run.report.restores
    assert run.groups[-1] == 4


def test_a_prefix_that_requests_share_is_one_copy_after_a_merge() -> None:
    """Before it each instance had one; requests that came with a copy each would take hundreds of blocks more."""
    caching = system("kunserve").model_copy(update={"memory": PrivatePoolsSpec(prefix_cache=True)})
    rows = burst(60, 640, 624)
    ids = [(*range(39), 100 + row) for row in range(len(rows))]
    trace = replace(trace_of(rows), prefix_hashes=tuple(ids), prefix_block_tokens=16)
    scenario = cluster(caching, trace, instances=2)
    run = lawful(scenario)
    (merged_s, _), *_ = run.report.drops
    sampled_s, used_bytes = run.result.timeline.time_s, run.result.timeline.kv_used_bytes.sum(axis=1)
    before, after = np.searchsorted(sampled_s, merged_s) + np.array([-1, 0])
    block_bytes = geometry(scenario.models[0], scenario.engine).block_bytes
    assert used_bytes[after] - used_bytes[before] < 20 * block_bytes
    # Both instances have the prefix: what goes to the other one of a request is half the layers of its other tokens, 16 of the
    # prompt and some 30 of the answer.
    assert 0 < run.report.exchange_bytes < 60 * 48 * geometry(scenario.models[0], scenario.engine).token_bytes / 2


def test_a_restore_that_is_cut_off_leaves_its_layers_missing() -> None:
    """Half of the weights are on their way when the instance that sends them fails: the other one loads them from its host."""
    log: list[dict[str, Any]] = []
    scenario = replace(spike(network_bytes_per_s=1e9), log=log.append)
    simulate_groups(scenario)
    restore = next(line for line in log if line.get("command") == "RestoreLayers")
    (lost,), _ = restore["gpus"]
    log.clear()
    simulate_groups(replace(scenario, faults=(Fault(restore["now_s"] + 0.1, lost),)))
    activated = next(line for line in log if line.get("command") == "Activate")
    ready = next(line for line in log if line.get("event") == "EngineReady")
    least_s = copy_bytes(scenario) / 2.1 / scenario.gpus[0].spec.pcie_bytes_per_s
    assert ready["now_s"] - activated["now_s"] > least_s


def test_when_all_instances_fail_requests_wait_for_the_repair() -> None:
    scenario = cluster("vllm-dp", [(0.0, 100, 50), (1.0, 100, 50)], instances=1)
    run = lawful(scenario, [Fault(0.02, 0, repair_s=3.0)])
    assert (run.result.fate == Fate.FINISHED).all()
    assert run.result.finish_s.min() > 3.02


def test_a_request_that_no_surviving_instance_can_hold_is_given_up() -> None:
    scenario = cluster("vllm-pp", [(0.0, 3000, 50), (0.0, 100, 50)], instances=2, blocks=100)
    run = lawful(scenario, [Fault(0.001, 1)])
    assert run.result.fate.tolist() == [Fate.DROPPED, Fate.FINISHED]


def with_a_spare(rows: list[Row]) -> Scenario:
    """Three instances serve; a fourth starts when demand went on growing after a drop."""
    scaling = SpareInstancesSpec(instances=1, start_s=0.3, growing_samples=3)
    return cluster(system("kunserve", scaling=scaling), rows, instances=4, blocks=60)


def test_growth_after_a_drop_starts_a_spare_instance() -> None:
    run = lawful(with_a_spare(burst(600, 180, 600, gap_s=2e-3)))
    first = run.report.drops[0][0]
    timeline = run.result.timeline
    holds_kv = timeline.kv_used_bytes[:, 3] > 0
    assert holds_kv.any() and timeline.time_s[holds_kv].min() > first + 0.3
    unused = with_a_spare([(0.0, 100, 10)] * 4)
    assert (lawful(unused).result.engine < 3).all()


def test_a_replay_starts_the_same_spare_instance() -> None:
    """A log without the answer to the tick at which it starts is not that of the same controller."""
    log: list[dict[str, Any]] = []
    scenario = with_a_spare(burst(600, 180, 600, gap_s=2e-3))
    simulate_groups(replace(scenario, log=log.append))
    ticks = [exchange for exchange in exchanges_of(log) if exchange.event["event"] == "Tick"]
    started = [line for tick in ticks for line in tick.commands if line["command"] == "Activate"]
    assert [line["gpus"] for line in started] == [(3,)]
    assert replay(log, prepare(scenario).parts.cluster.controller.handle) is None
    log.remove(started[0])
    assert "the log has None" in (replay(log, prepare(scenario).parts.cluster.controller.handle) or "")
