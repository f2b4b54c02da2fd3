"""Where a request was, from when to when, and why it left: one record for every kind of move."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from groupkit import burst, cluster, system
from lawkit import bounded, counting_swaps
from randomkit import scenario_of

from fineserve_sim.cluster import Fault, Left, RunResult, Scenario, Visit


def visits_of(scenario: Scenario) -> tuple[RunResult, dict[int, list[Visit]]]:
    result = bounded(scenario).result
    return result, {request: result.visits.of(request) for request in range(len(result.fate))}


def test_a_request_that_migrates_was_at_two_engines() -> None:
    """Round robin gives instance 0 all the long requests: Llumnix hands some over, with their KV and no pause but the copy."""
    rows = [(number * 1e-3, 100, 800 if number % 2 == 0 else 2) for number in range(40)]
    spec = system("llumnix", dispatch={"policy": "round_robin"})
    result, visits = visits_of(cluster(spec, rows, instances=2, blocks=400))
    moved = [stays for stays in visits.values() if len(stays) > 1]
    assert len(moved) == result.counters["migrations"] > 0
    for here, there in (stays[:2] for stays in moved):
        assert (here.left, here.stages, there.stages) == (Left.MIGRATED, (0,), (1,))
        assert here.to_s == there.from_s and here.tokens > 0
    assert all(sum(stay.tokens for stay in stays) == rows[request][2] for request, stays in visits.items())


def test_engines_that_merge_and_split_regroup_their_requests() -> None:
    scenario = cluster("kunserve", [*burst(60, 200, 150), *((20.0 + at, 100, 5) for at, _, _ in burst(4, 1, 1))])
    result, visits = visits_of(scenario)
    assert result.counters["drops"] and result.counters["restores"]
    moved = [stays for stays in visits.values() if len(stays) > 1]
    assert {stay.left for stays in moved for stay in stays[:-1]} == {Left.REGROUPED}
    assert any(len(stay.stages) > 1 and stay.tokens for stays in moved for stay in stays[1:])
    assert any(before.to_s == after.from_s and before.tokens for before, after, *_ in moved)  # went on with its KV


def test_requests_of_an_engine_that_fails_go_elsewhere() -> None:
    """Its instance fails at 0.5 s, and another serves what it had; what had been generated is not generated again."""
    scenario = cluster("vllm-dp", burst(2, 160, 400), instances=2)
    result, visits = visits_of(replace(scenario, faults=(Fault(0.5, 0),)))
    (lost, again), (stayed,) = visits[0], visits[1]
    assert (lost.stages, lost.to_s, lost.left) == ((0,), 0.5, Left.FAILED)
    assert (again.stages, again.from_s, again.left) == ((1,), 0.5, Left.FINISHED)
    assert lost.tokens > 0 and lost.tokens + again.tokens == 400
    assert (stayed.to_s, stayed.tokens, stayed.left) == (result.finish_s[1], 400, Left.FINISHED)


@pytest.mark.pure_python
def test_a_request_that_is_swapped_stays_at_its_engine() -> None:
    """Its KV goes to host memory and comes back, and the engine knows it all the time."""
    scenario = cluster("infercept", burst(3, 300, 400), instances=1, blocks=80)
    with counting_swaps() as seen:
        _, visits = visits_of(scenario)
    assert seen["swaps"]
    assert [[stay.left for stay in stays] for stays in visits.values()] == [[Left.FINISHED]] * 3


@pytest.mark.parametrize("kind", ["requeue", "failing"])
def test_where_models_come_and_go_a_visit_is_of_one_stay_of_an_engine(kind: str) -> None:
    """QLM takes a model from its GPU in the middle of its requests, and faults take GPUs: the next visit is to another engine,
    later, and begins with what was generated before."""
    left = {"requeue": Left.EVICTED, "failing": Left.FAILED}[kind]
    found = 0
    for seed in range(12):
        _, visits = visits_of(scenario_of(kind, seed))
        for stays in visits.values():
            for before, after in pairwise(stays):
                assert before.engine != after.engine or before.left is Left.RESIZED
                assert before.to_s <= after.from_s
                found += before.left is left
    assert found


def test_one_who_waits_or_is_open_when_the_run_ends() -> None:
    """A request that is at an engine then has a visit that the run ended; one that never was at any has none."""
    scenario = replace(cluster("vllm-dp", [(0.0, 16, 5000), (0.2, 16, 2)], instances=2, blocks=400), drain_s=0.5)
    result, visits = visits_of(scenario)
    (stay,) = visits[0]
    assert (stay.left, stay.to_s, stay.tokens) == (Left.OPEN, result.end_s, 0)
    assert [each.left for each in visits[1]] == [Left.FINISHED]
