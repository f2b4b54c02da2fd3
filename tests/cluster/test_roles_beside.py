"""Roles beside other models: engines of several models share GPUs, and each model's requests go from role to role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from groupkit import cluster
from groupkit import system as shipped
from simkit import H100, Row, pinned, served, trace_of, with_kv_blocks

from fineserve_sim.catalog import kv_token_bytes
from fineserve_sim.cluster import EngineSettings, Fate, Fault, Gpu, Left, RunResult, Scenario, ScenarioError, simulate
from fineserve_sim.policy import events
from fineserve_sim.policy.commands import Dispatch, Migrate, Reject
from fineserve_sim.policy.groups.dispatch import GroupEngine, Phase, dispatcher
from fineserve_sim.policy.groups.several import RoleModel, RolesController
from fineserve_sim.policy.interfaces import EngineLoad, Request
from fineserve_sim.systems import SystemSpec

ROWS: Sequence[Row] = [
    (0.003 * number, 100 + 70 * (number % 7), 2 + 9 * (number % 5), number % 2) for number in range(80)
]
SETTINGS = EngineSettings(token_budget=256)


def apart(groups: Mapping[str, Sequence[Sequence[int]]], name: str = "distserve", **roles: Any) -> SystemSpec:
    """``name`` with these engines, without a setup unless told."""
    spec = shipped(name, roles={"setup_s": 0.0} | roles)
    return SystemSpec.model_validate(spec.model_dump() | {"placement": pinned(groups)})


def scenario(spec: SystemSpec, gpus: int, rows: Sequence[Row] = ROWS, blocks: int = 4000, **options: Any) -> Scenario:
    models = (served("a"), served("b"))
    settings = with_kv_blocks(models, blocks, SETTINGS)
    there = tuple(Gpu(number, 0, H100) for number in range(gpus))
    return Scenario(spec, models, there, trace_of(rows, ["a", "b"]), settings, check=True, **options)


def of_model(result: RunResult, model: int, rows: Sequence[Row] = ROWS) -> tuple[Any, Any]:
    mine = np.array([row[3] == model for row in rows])  # type: ignore[misc]
    return result.first_token_s[mine], result.finish_s[mine]


@pytest.mark.parametrize("name", ["distserve", "vllm-pd"])
def test_on_gpus_of_its_own_a_model_is_as_if_it_were_alone(name: str) -> None:
    """Bit for bit what the cluster of one model does."""
    both = simulate(scenario(apart({"a": [[0], [1], [2]], "b": [[3], [4]]}, name), 5))
    for model, instances in ((0, 3), (1, 2)):
        mine = [row[:3] for row in ROWS if row[3] == model]  # type: ignore[misc]
        alone = cluster(shipped(name, roles={"setup_s": 0.0}), mine, instances=instances, per_node=8, blocks=4000)
        found = simulate(alone)
        first_s, finish_s = of_model(both, model)
        assert np.array_equal(found.first_token_s, first_s) and np.array_equal(found.finish_s, finish_s)


def test_crossed_roles_share_two_gpus() -> None:
    """Each model prefills where the other one decodes; visits tell both engines."""
    result = simulate(scenario(apart({"a": [[0], [1]], "b": [[1], [0]]}), 2))
    assert (result.fate == Fate.FINISHED).all()
    for request, row in enumerate(ROWS):
        here, there = result.visits.of(request)
        assert (here.engine, there.engine) == ((0, 1), (2, 3))[row[3]]  # type: ignore[misc]
        assert (here.left, there.left) == (Left.MIGRATED, Left.FINISHED)


def test_a_neighbour_takes_time() -> None:
    spec = apart({"a": [[0], [1]], "b": [[1]]})
    crowded = simulate(scenario(spec, 2))
    alone = simulate(scenario(spec, 2, [(row[0], row[1], row[2] if row[3] == 0 else 1, row[3]) for row in ROWS]))  # type: ignore[misc]
    first_s, finish_s = of_model(crowded, 0)
    first_alone_s, finish_alone_s = of_model(alone, 0)
    assert (finish_s - finish_alone_s).mean() > 1e-3
    assert np.median(first_s - first_alone_s) == pytest.approx(0.0, abs=1e-4)  # b is not where a prefills


def test_a_model_with_one_engine_keeps_both_roles() -> None:
    result = simulate(scenario(apart({"a": [[0], [1]], "b": [[0]]}), 2))
    assert (result.fate == Fate.FINISHED).all()
    assert {len(result.visits.of(request)) for request in range(0, 80, 2)} == {2}
    assert {len(result.visits.of(request)) for request in range(1, 80, 2)} == {1}


@pytest.mark.parametrize("setup_s", [0.0, 0.002])
def test_on_one_gpu_kv_is_copied_within_its_memory(setup_s: float) -> None:
    m, settings = served("a"), with_kv_blocks([served("a")] * 2, 2000, SETTINGS)
    spec = apart({"a": [[0], [0]], "b": [[1]]}, setup_s=setup_s)
    models = (m, served("b"))
    there = tuple(Gpu(number, 0, H100) for number in range(2))
    result = simulate(Scenario(spec, models, there, trace_of([(0.0, 900, 20, 0)], ["a", "b"]), settings))
    here, there_ = result.visits.of(0)
    takes_s = 900 * kv_token_bytes(m.model, m.precision, 1) / (H100.memory_bytes_per_s / 2) + setup_s
    assert there_.from_s - here.to_s == 0.0
    assert here.to_s - result.first_token_s[0] == pytest.approx(takes_s, rel=1e-9)


def test_a_model_that_is_not_placed_is_rejected() -> None:
    result = simulate(scenario(apart({"a": [[0], [1]]}), 2))
    assert (result.fate[1::2] == Fate.REJECTED).all() and (result.fate[::2] == Fate.FINISHED).all()


def test_prompts_that_no_role_holds_are_rejected() -> None:
    """The decode engine of ``a`` shares its GPU with four others and is the tightest."""
    rows: Sequence[Row] = [(0.0, 3000, 2, 0), (0.1, 300, 2, 0)]
    spec = apart({"a": [[0], [1]], "b": [[1], [1], [1]]})
    settings = with_kv_blocks([served("a")] * 4, 200, SETTINGS)
    there = tuple(Gpu(number, 0, H100) for number in range(2))
    one = Scenario(spec, (served("a"), served("b")), there, trace_of(rows, ["a", "b"]), settings)
    assert simulate(one).fate.tolist() == [Fate.REJECTED, Fate.FINISHED]


def test_what_cannot_be_is_one_line() -> None:
    spec = apart({"a": [[0], [1]], "b": [[0]]})
    with pytest.raises(ScenarioError, match="distserve: faults are for clusters of one model"):
        simulate(scenario(spec, 2, faults=(Fault(0.1, 0),)))
    with pytest.raises(ScenarioError, match="take placement pinned"):
        simulate(scenario(shipped("distserve"), 2))
    with pytest.raises(ScenarioError, match="vllm-dp serves one model; the cluster has 2"):
        simulate(scenario(shipped("vllm-dp"), 2))


def controller() -> RolesController:
    def engine(id: int, holds: int = 1000) -> GroupEngine:
        return GroupEngine(id, (id,), Phase.SERVING, EngineLoad(0, 100), holds)

    a = RoleModel("a", 900, 16, [engine(0), engine(1)], [engine(2, 500), engine(3)])
    return RolesController(
        [a, RoleModel("b", 900, 16, [engine(4)]), RoleModel("c", 0, 16, [])], lambda: dispatcher("least_queued")
    )


def arrives(id: int, model: str, tokens: int) -> events.RequestArrived:
    return events.RequestArrived(Request(id, model, 0.0, tokens))


def test_prompts_go_among_the_engines_that_prefill_and_on_to_those_that_decode() -> None:
    c = controller()
    assert [c.handle(0.0, arrives(id, "a", 100)) for id in (0, 1)] == [[Dispatch(0, 0)], [Dispatch(1, 1)]]
    assert c.handle(0.0, arrives(2, "b", 100)) == [Dispatch(2, 4)]
    assert c.handle(1.0, events.PrefillEnded(0, 0, 100)) == [Migrate(0, 0, 2)]
    assert c.handle(1.0, events.PrefillEnded(1, 1, 100)) == [Migrate(1, 1, 3)]  # the first one is promised to 2
    c.handle(2.0, events.Loads({2: EngineLoad(0, 100), 3: EngineLoad(50, 100)}))
    assert c.handle(2.0, arrives(3, "a", 600)) == [Dispatch(3, 0)]
    assert c.handle(3.0, events.PrefillEnded(3, 0, 600)) == [Migrate(3, 0, 3)], "2 holds 500 tokens"
    assert c.handle(4.0, events.MigrationEnded(3)) == []


def test_what_cannot_be_is_an_error() -> None:
    c = controller()
    refused = [c.handle(0.0, arrives(0, "a", 900))[0], c.handle(0.0, arrives(1, "c", 1))[0]]
    assert refused == [
        Reject(0, "prompt of 900 tokens; the longest that fits has 899"),
        Reject(1, "no instance of c is placed", unplaced=True),
    ]
    for event, what in (
        (events.PrefillEnded(5, 4, 10), "hands nothing over"),
        (events.PrefillEnded(5, 2, 10), "hands nothing over"),
        (events.MigrationEnded(5), "was not to migrate"),
        (events.EngineReady(0), "engines with roles stay"),
        (arrives(5, "z", 1), "is not there"),
    ):
        with pytest.raises(ValueError, match=what):
            c.handle(0.0, event)
    c.handle(0.0, events.PrefillEnded(6, 0, 10))
    with pytest.raises(ValueError, match="prefilled already"):
        c.handle(0.0, events.PrefillEnded(6, 0, 10))
