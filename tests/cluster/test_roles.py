"""Prefill and decode on different engines: each role is as if it were alone, and between them lies the link."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from groupkit import burst, cluster, lawful, system
from simkit import H100, Row, served, trace_of, with_kv_blocks

from fineserve_sim.catalog import kv_token_bytes
from fineserve_sim.cluster import EngineSettings, Fault, Gpu, Left, Scenario, ScenarioError, simulate
from fineserve_sim.cluster.scenario import Fate
from fineserve_sim.cluster.simulation import prepare
from fineserve_sim.latency import StepModel
from fineserve_sim.systems import SystemSpec
from fineserve_sim.systems.spec import LlumnixMigrationSpec, PrivatePoolsSpec

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "fleets" / "loading_and_transfer" / "measured.csv"
NO_SETUP = {"setup_s": 0.0}
ROWS: list[Row] = [(0.004 * number, 100 + 70 * (number % 7), 2 + 9 * (number % 5)) for number in range(60)]


def apart(name: str = "distserve", rows: list[Row] = ROWS, **options: object) -> Scenario:
    """One engine a role, memory for all, a link that takes no time."""
    chosen = {"instances": 2, "blocks": 5000, "network_bytes_per_s": 1e30} | options
    return cluster(system(name, roles=NO_SETUP), rows, **chosen)  # type: ignore[arg-type]


def decode_only(step: StepModel, begins_s: np.ndarray, rows: list[Row]) -> np.ndarray:
    """When the last tokens come, of sequences that come to a decode engine with their first token and KV: step by step."""
    coming = sorted(range(len(rows)), key=lambda request: begins_s[request])
    coming = [request for request in coming if rows[request][2] > 1]
    end_s, running, now = begins_s.copy(), dict[int, int](), 0.0
    while coming or running:
        now = now if running else max(now, begins_s[coming[0]])
        while coming and begins_s[coming[0]] <= now:
            running[coming.pop(0)] = 1
        context = sum(rows[request][1] + done - 1 for request, done in running.items())
        now += step.step_s(len(running), context, 0, 0, 0, len(running))
        for request in list(running):
            running[request] += 1
            if running[request] == rows[request][2]:
                end_s[request] = now
                del running[request]
    return end_s


def test_each_role_is_as_if_it_were_alone() -> None:
    """TTFT is that of an engine that only prefills, TPOT that of one that only decodes."""
    one = apart()
    both = simulate(one)
    only_prompts = [(row[0], row[1], 1) for row in ROWS]
    prefilled = simulate(cluster("vllm-dp", only_prompts, instances=1, blocks=5000))
    assert both.first_token_s == pytest.approx(prefilled.first_token_s, rel=1e-9)
    step = next(iter(prepare(one).parts.cluster.engines.values())).step
    ends_s = decode_only(step, prefilled.first_token_s, ROWS)
    later = np.array([row[2] - 1 for row in ROWS])
    tpot_s = (both.finish_s - both.first_token_s)[later > 0] / later[later > 0]
    assert tpot_s == pytest.approx(((ends_s - prefilled.first_token_s)[later > 0]) / later[later > 0], rel=1e-9)


@pytest.mark.parametrize(("tp", "setup_s"), [(1, 0.0), (2, 0.004)])
def test_kv_takes_its_link_and_the_setup(tp: int, setup_s: float) -> None:
    m, rate = served(tp=tp), 2e9
    settings = with_kv_blocks([m], 200, EngineSettings())
    nodes = tuple(Gpu(number, number // tp, H100, rate) for number in range(2 * tp))
    spec = system("distserve", roles={"setup_s": setup_s})
    result = simulate(Scenario(spec, (m,), nodes, trace_of([(0.0, 500, 20)]), settings))
    here, there = result.visits.of(0)
    assert (here.stages, here.tokens, here.left) == ((0,), 1, Left.MIGRATED)
    assert (there.stages, there.tokens, there.left) == ((1,), 19, Left.FINISHED)
    takes_s = 500 * kv_token_bytes(m.model, m.precision, tp) / rate + setup_s
    assert here.to_s == there.from_s == pytest.approx(result.first_token_s[0] + takes_s, rel=1e-9)


def test_with_vllms_connector_whoever_decodes_yields_the_first_token() -> None:
    """The last token of the prompt is computed again there: the first one comes a transfer and a step later."""
    rows: list[Row] = [(0.0, 500, 20)]
    first, late = simulate(apart(rows=rows)), simulate(apart("vllm-pd", rows))
    step = next(iter(prepare(apart(rows=rows)).parts.cluster.engines.values())).step
    again_s = step.step_s(0, 0, 1, 500, 499, 1)
    assert late.first_token_s[0] == pytest.approx(first.first_token_s[0] + again_s, rel=1e-9)
    here, there = late.visits.of(0)
    assert (here.tokens, there.tokens) == (0, 20)


@pytest.mark.parametrize("name", ["distserve", "vllm-pd"])
def test_kv_waits_where_it_is_until_there_is_room(name: str) -> None:
    """The engine that decodes holds two requests; prefills go on meanwhile, and nothing is recomputed but by its own
    preemptions."""
    one = cluster(name, burst(12, 200, 100), instances=2, blocks=40)
    run = lawful(one)
    assert run.migrations >= 12
    first_s = np.sort(run.result.first_token_s)
    assert (np.diff(first_s) >= 0).all() and (run.result.fate == Fate.FINISHED).all()
    blocks_s = [visit.to_s for request in range(12) for visit in run.result.visits.of(request)[:1]]
    assert max(blocks_s) > run.result.finish_s.min(), "the last one waited until another had ended"


def test_requests_decode_where_most_memory_is_free() -> None:
    rows: list[Row] = [(0.0, 900, 300), (0.1, 16, 300), (0.2, 16, 300)]
    result = simulate(cluster(system("distserve", roles={"decode": 2} | NO_SETUP), rows, instances=3, blocks=400))
    assert [result.visits.of(request)[1].engine for request in range(3)] == [1, 2, 2]


def test_prompts_go_where_the_fewest_wait() -> None:
    rows: list[Row] = [(0.0, 900, 2), (0.0, 16, 2), (0.0, 16, 2), (0.0, 16, 2)]
    result = simulate(cluster(system("distserve", roles={"prefill": 2}), rows, instances=3, blocks=400))
    assert [result.visits.of(request)[0].engine for request in range(4)] == [0, 1, 1, 1]


@pytest.mark.parametrize("name", ["distserve", "vllm-pd"])
@pytest.mark.parametrize("lost", [0, 3])
def test_whoever_is_lost_the_others_go_on(name: str, lost: int) -> None:
    one = cluster(name, burst(40, 200, 60, 2e-3), instances=4, blocks=60, network_bytes_per_s=1e9)
    run = lawful(one, [Fault(0.05, lost, 0.2)])
    assert (run.result.fate == Fate.FINISHED).all()
    assert any(visit.left is Left.FAILED for request in range(40) for visit in run.result.visits.of(request))


def test_prefills_wait_while_nobody_decodes() -> None:
    """The only engine that decodes is lost and comes back: first tokens come, the others only then."""
    one = cluster("distserve", burst(4, 100, 30, 2e-3), instances=2, blocks=60)
    result = lawful(one, [Fault(0.0001, 1, 1.0)]).result
    assert (result.first_token_s < 0.1).all() and (result.finish_s > 1.0).all()


def test_each_role_needs_an_instance() -> None:
    with pytest.raises(ScenarioError, match="distserve: prefill and decode need an instance each; there is 1"):
        simulate(cluster("distserve", ROWS, instances=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": PrivatePoolsSpec(prefix_cache=True)},
        {"migration": LlumnixMigrationSpec()},
        {"execution": system("vllm-pp").execution},
        {"memory": system("infercept").memory},
    ],
)
def test_what_does_not_go_with_roles_is_refused_by_name(changes: dict[str, object]) -> None:
    spec: SystemSpec = system("distserve").model_copy(update=changes)
    with pytest.raises(ScenarioError, match="system distserve: roles are for instances alone"):
        simulate(cluster(spec, ROWS))


def test_within_a_node_kv_takes_nvlink() -> None:
    rows: list[Row] = [(0.0, 5000, 20)]
    near, far = (cluster(system("distserve", roles=NO_SETUP), rows, blocks=400, per_node=n) for n in (4, 1))
    moved_s = [simulate(one).visits.of(0)[0].to_s - simulate(one).first_token_s[0] for one in (near, far)]
    assert moved_s[1] / moved_s[0] == pytest.approx(H100.peer_bytes_per_s / 25e9, rel=1e-6)


def test_the_setup_and_a_rate_give_measured_transfers() -> None:
    """Mooncake between 2 x 8 H800 over RoCE: 0.4 ms and 18.5 GB/s a GPU, fitted on every other row, fit the rest."""
    if not MEASURED.exists():
        pytest.skip("needs shared/data/fleets")
    with MEASURED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "pd_kv_transfer"]
    token_bytes = 36 * 2 * 8 * 128 * 2  # Qwen3-8B in BF16
    tokens = np.array([int(row["case"].split()[0]) for row in rows])
    measured_s = np.array([float(row["value"]) / 1e3 for row in rows])
    predicted_s = 0.0004 + tokens * token_bytes / (8 * 18.5e9)
    assert np.abs(predicted_s / measured_s - 1)[1::2].max() < 0.1


def test_a_prompt_of_one_token_waits_for_a_slot_where_it_decodes() -> None:
    """It comes without KV: with vLLM's connector, its only token is computed again there."""
    one = cluster("vllm-pd", burst(3, 1, 30, 1e-4), instances=2, settings=EngineSettings(max_sequences=1))
    assert (simulate(one).fate == Fate.FINISHED).all()
