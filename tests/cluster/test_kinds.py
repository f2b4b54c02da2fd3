"""Clusters of two kinds of GPU: facts by kind, memory and pace of each, and what moves between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from groupkit import cluster, simulate_groups, system
from simkit import H100, fixed_bytes, logged, pinned, served, trace_of
from simkit import system as inline

from fineserve_sim.catalog import GpuSpec, gpu, mig_parts
from fineserve_sim.cluster import EngineSettings, Fate, Gpu, Scenario, simulate
from fineserve_sim.cluster.compose.facts import demand_of, demands_of
from fineserve_sim.cluster.compose.memory import slots_on, usable_bytes
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.cluster.simulation import prepare
from fineserve_sim.systems import load_systems
from fineserve_sim.systems.spec import RoundRobinDispatchSpec

A100, L40S = gpu("a100-80gb"), gpu("l40s")
LARGE = H100.model_copy(update={"memory_gib": H100.memory_gib * 1.02})
"""Nearly three times the KV memory of an H100 that ``cluster`` leaves 100 blocks."""


def cards(*specs: GpuSpec, node_gpus: int = 1) -> tuple[Gpu, ...]:
    return tuple(Gpu(number, number // node_gpus, spec) for number, spec in enumerate(specs))


def with_kinds(scenario: Scenario, *specs: GpuSpec) -> Scenario:
    return replace(
        scenario, gpus=tuple(replace(card, spec=spec) for card, spec in zip(scenario.gpus, specs, strict=True))
    )


def test_placement_sees_kinds_as_numbers_and_groups_within_them() -> None:
    """Two H100s with an L40S between them in one node, and an A100 in two slices: what may form a TP group has one node."""
    slices = mig_parts(A100, ["3g.40gb", "2g.20gb"])
    gpus = cards(H100, L40S, H100, *slices, node_gpus=8)
    slots = slots_on(gpus, EngineSettings())
    assert [slot.kind for slot in slots] == [0, 1, 0, 2, 3]
    assert [slot.node for slot in slots] == [0, 1, 0, 2, 3]
    assert [slot.memory_bytes for slot in slots] == [usable_bytes(gpu, EngineSettings()) for gpu in gpus]
    assert "h100" not in repr(slots)


def test_slices_of_one_profile_form_no_group() -> None:
    slots = slots_on(cards(*mig_parts(A100, ["3g", "3g"]), node_gpus=8), EngineSettings())
    assert [(slot.node, slot.kind) for slot in slots] == [(0, 0), (1, 0)]


def test_one_kind_is_seen_as_before() -> None:
    slots = slots_on(cards(H100, H100, H100, node_gpus=2), EngineSettings())
    assert [(slot.node, slot.kind) for slot in slots] == [(0, 0), (0, 0), (1, 0)]


@pytest.mark.parametrize("name", ["fineserve", "muxserve"])
def test_facts_are_those_of_each_kind(name: str) -> None:
    one = served(prompt=512, output=64)
    scenario = Scenario(load_systems()[name], (one,), cards(H100, L40S), trace_of([(0.0, 8, 2)]), EngineSettings())
    demand, slope = demands_of(scenario)["m"], name == "fineserve"
    for kind, spec in enumerate((H100, L40S)):
        assert demand.on(kind) == demand_of(one, spec, scenario.engine, slope=slope)
    assert demand.on(0).most_per_s > 1.5 * demand.on(1).most_per_s
    assert demands_of(replace(scenario, gpus=cards(H100, H100)))["m"].by_kind == ()


def test_a_share_of_memory_is_by_the_footprint_on_its_kind() -> None:
    """Static* splits each GPU by F_M; two models pinned to both kinds have the shares that they have on that kind alone."""
    models = tuple(
        served(id, fmt=fmt, rate_per_s=6.0, prompt=300, output=200) for id, fmt in (("a", "fp16"), ("b", "fp8"))
    )
    groups = {"a": [[0], [1]], "b": [[0], [1]]}
    spec = inline(pinned(groups))

    def capacities(*specs: GpuSpec) -> list[int]:
        scenario = Scenario(spec, models, cards(*specs), trace_of([(0.0, 8, 2)], ["a", "b"]), EngineSettings())
        engines = prepare(scenario).parts.cluster.engines
        return [engine.kv.capacity_tokens() for engine in engines.values()]

    mixed, fast, slow = capacities(H100, L40S), capacities(H100, H100), capacities(L40S, L40S)
    assert mixed == [fast[0], slow[1], fast[2], slow[3]] and fast[0] != slow[1]


class TestInstances:
    """One model on instances of two kinds."""

    def test_each_has_the_memory_of_its_own_gpus(self) -> None:
        scenario = with_kinds(cluster("vllm-dp", [(0.0, 16, 2)], instances=2), H100, LARGE)
        parts = prepare(scenario).parts
        fixed = fixed_bytes(scenario.models, scenario.engine)
        assert parts.kv_capacity_bytes == tuple(usable_bytes(card, scenario.engine) - fixed for card in scenario.gpus)
        small, large = parts.cluster.engines.values()
        assert small.max_tokens == 1600 and large.max_tokens > 2 * small.max_tokens

    @pytest.mark.parametrize("order", [(H100, LARGE), (LARGE, H100)], ids=["small first", "large first"])
    def test_a_prompt_goes_where_it_fits(self, order: Sequence[GpuSpec]) -> None:
        """2,000 tokens fit the large instance alone, whichever dispatch would have chosen."""
        rows = [(0.1 * number, 2000, 20) for number in range(3)]
        result = simulate(with_kinds(cluster("vllm-dp", rows, instances=2), *order))
        assert (result.fate == Fate.FINISHED).all()
        assert set(result.engine.tolist()) == {order.index(LARGE)}

    def test_one_that_fits_none_is_refused(self) -> None:
        result = simulate(with_kinds(cluster("vllm-dp", [(0.0, 50_000, 20)], instances=2), H100, LARGE))
        assert result.fate.tolist() == [Fate.REJECTED]

    @pytest.mark.parametrize(
        ("kinds", "moves"),
        [((H100, H100), True), ((H100, LARGE), True), ((LARGE, H100), False)],
        ids=["alike", "to the large", "from the large"],
    )
    def test_requests_migrate_only_where_they_may_become_as_long(self, kinds: Sequence[GpuSpec], moves: bool) -> None:
        """In turns, instance 0 gets all the long requests. Llumnix moves them to an instance that holds as much or more."""
        rows = [(0.002 * number, 60, 1000 if number % 2 == 0 else 2) for number in range(12)]
        spec = system(
            "llumnix",
            dispatch=RoundRobinDispatchSpec(policy="round_robin"),
            migration={"out_blocks": 30.0, "in_blocks": 30.0},
        )
        log: list[dict[str, object]] = []
        scenario = with_kinds(cluster(spec, rows, instances=2, blocks=200), *kinds)
        if kinds[0] is LARGE:  # as short of memory as the small one is beside its requests
            scenario = replace(scenario, trace=trace_of([(at, 4 * prompt, output) for at, prompt, output in rows]))
        run = simulate_groups(replace(scenario, log=log.append))
        found = {(line["source"], line["destination"]) for line in log if line.get("command") == "Migrate"}
        assert found == ({(0, 1)} if moves else set())
        assert (run.result.fate == Fate.FINISHED).all()

    def test_layers_come_back_by_the_memory_of_all_instances(self) -> None:
        """The threshold is half of what both hold without drop, 100 blocks and more."""
        scenario = with_kinds(cluster("kunserve", [(0.0, 16, 2)], instances=2), H100, LARGE)
        controller = prepare(scenario).parts.cluster.controller
        block_bytes = controller._drop.block_bytes
        base = {number: held // block_bytes for number, held in controller._drop.base_bytes.items()}
        assert base[0] == 100 and base[1] > 200

    def test_a_pair_takes_what_it_holds_once_its_layers_are_dropped(self) -> None:
        """More sequences than both hold: they drop layers and merge. Then comes a prompt that the small one could not hold."""
        rows = [*[(0.02 * number, 500, 1000) for number in range(12)], (1.0, 4000, 2)]
        log: list[dict[str, object]] = []
        scenario = with_kinds(cluster("kunserve", rows, instances=2), H100, LARGE)
        run = simulate_groups(replace(scenario, log=log.append))
        assert any(line.get("command") == "DropLayers" for line in log)
        assert (run.result.fate == Fate.FINISHED).all()


def test_a_fleet_moves_between_kinds() -> None:
    """Prism brings each model to the GPU with room for it: the larger one fits the large kind alone."""
    small, large = served("small"), served("large", "llama-3.1-8b")
    both = fixed_bytes([small], EngineSettings()) * 1.5 / (0.9 * 2**30)
    little = L40S.model_copy(update={"memory_gib": both})
    spec = load_systems()["prism"]
    scenario = Scenario(
        spec, (small, large), cards(little, H100), trace_of([(0.0, 50, 5, 0), (0.0, 50, 5, 1)], ["small", "large"]),
        EngineSettings(), drain_s=600.0,
    )  # fmt: skip
    placement, _ = place(scenario, demands_of(scenario))
    assert {instance.model: instance.gpus for instance in placement.instances}["large"] == (1,)
    run = logged(scenario)
    assert (run.result.fate == Fate.FINISHED).all()


def test_the_bound_adds_the_rates_of_all_kinds() -> None:
    """As many requests in time on two kinds as on two of the slower, and no more than on two of the faster."""
    rows = [(0.01 * number, 1500, 2) for number in range(120)]
    spec = load_systems()["clairvoyant"]
    one = served("m", "llama-3.1-8b", slo_s=0.6)

    def in_time(*specs: GpuSpec) -> int:
        scenario = Scenario(spec, (one,), cards(*specs), trace_of(rows), EngineSettings())
        return int(np.count_nonzero(simulate(scenario).fate == Fate.FINISHED))

    assert in_time(A100) < in_time(A100, A100) < in_time(H100, A100) < in_time(H100, H100)
    assert in_time(A100, H100) == in_time(H100, A100)
