"""Single-model clusters: an engine alone as oracle, pipelines against the recurrence, laws under random systems and faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from groupkit import GROUP_SYSTEMS, burst, cluster, lawful, simulate_groups, system
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from simkit import Row, pinned, served, solo, step_model

from fineserve_sim.cluster import EngineSettings, Fate, Scenario, ScenarioError, simulate
from fineserve_sim.cluster.compose.profiling import chunk_cost
from fineserve_sim.cluster.scenario import Fault, MeasuredSteps, wrong_fault
from fineserve_sim.experiment.reproduce.papers.kunserve.formulas import finish_times_s
from fineserve_sim.systems import SystemSpec
from fineserve_sim.systems.spec import MooreHodgsonSpec, RoundRobinDispatchSpec, SpareInstancesSpec, SwapPoolsSpec

rows_of_requests = st.lists(
    st.tuples(st.floats(0, 0.5), st.integers(1, 900), st.integers(1, 120)), min_size=1, max_size=40
).map(lambda rows: sorted(rows, key=lambda row: row[0]))


@given(rows_of_requests, st.sampled_from(GROUP_SYSTEMS), st.integers(70, 400), st.data())
@settings(max_examples=120)
def test_laws_hold_for_every_system_under_random_load_and_faults(
    rows: list[Row], name: str, blocks: int, data: st.DataObject
) -> None:
    """With faults that may come again, even while the instance loads its weights."""
    anyhow = st.builds(Fault, st.floats(0.01, 1), st.integers(0, 3), st.sampled_from([0.001, 0.05, 1.0]))
    faults = data.draw(st.lists(anyhow, max_size=4).filter(lambda faults: not wrong_fault(faults, system(name), 4, 4)))
    lawful(cluster(name, rows, blocks=blocks, per_node=data.draw(st.sampled_from([1, 2, 4]))), faults)


@st.composite
def systems_of_any_options(draw: st.DrawFn) -> SystemSpec:
    """Dispatch, memory, pipelines, drop, migration and spares put together at random, as far as they go together."""
    dispatch = draw(st.sampled_from(["round_robin", "least_loaded", "least_queued", "freeness"]))
    stages = draw(st.sampled_from([1, 1, 2, 4]))
    execution = {
        "stages": stages,
        "microbatches": draw(st.sampled_from(["token_count", "lookahead"])),
        "lookahead": draw(st.sampled_from(["balanced", "literal", "direct"])),
        "queues": draw(st.sampled_from(["shared", "own"])),
        "min_tokens": draw(st.sampled_from([None, 64, 512])),
    }
    axes: dict[str, object] = {"dispatch": {"policy": dispatch}, "execution": execution}
    kind = draw(st.sampled_from(["drop", "drop", "swap", "migration", "none"] if stages == 1 else ["drop", "none"]))
    if kind == "drop":
        axes["drop"] = {
            "exchange": draw(st.sampled_from(["coordinated", "bulk"])),
            "restore": draw(st.booleans()),
            "trigger": draw(st.sampled_from([0.6, 0.95, 1.0])),
            "required": draw(st.sampled_from(["net", "gross"])),
            "max_group": draw(st.sampled_from([None, 2, 3])),
        }
        if stages == 1 and draw(st.booleans()):
            axes["scaling"] = {"instances": 1, "start_s": 0.05, "growing_samples": 2}
    elif kind == "swap":
        axes["memory"] = {"policy": "swap"}
    elif kind == "migration":
        axes["migration"] = {"policy": "llumnix", "out_blocks": 3.0, "in_blocks": draw(st.sampled_from([3.0, 30.0]))}
    return SystemSpec.model_validate(system("vllm-dp").model_dump() | axes)


@given(rows_of_requests, systems_of_any_options(), st.integers(70, 250), st.data())
@settings(max_examples=80)
def test_laws_hold_for_systems_of_any_options(
    rows: list[Row], spec: SystemSpec, blocks: int, data: st.DataObject
) -> None:
    serving = 4 - (0 if spec.scaling is None else spec.scaling.instances)
    anyhow = st.builds(Fault, st.floats(0.01, 1), st.integers(0, serving - 1), st.sampled_from([0.02, 0.3]))
    faults = data.draw(st.lists(anyhow, max_size=2).filter(lambda faults: not wrong_fault(faults, spec, serving, 4)))
    network = data.draw(st.sampled_from([1e8, 25e9]))
    lawful(cluster(spec, rows, blocks=blocks, network_bytes_per_s=network), faults)


@given(rows_of_requests, st.integers(70, 300))
def test_one_instance_is_the_engine_alone(rows: list[Row], blocks: int) -> None:
    """vLLM (DP) of one instance and the engine of ``cluster/engine/loop.py`` are the same system by two codes."""
    scenario = cluster("vllm-dp", rows, instances=1, blocks=blocks)
    spec = system("vllm-dp").model_copy(update={"dispatch": None})
    alone = simulate(replace(scenario, system=spec))
    group = lawful(scenario).result
    assert group.first_token_s.tobytes() == alone.first_token_s.tobytes()
    assert group.finish_s.tobytes() == alone.finish_s.tobytes()
    assert np.array_equal(group.fate, alone.fate)
    assert np.array_equal(group.preemptions, alone.preemptions)


@pytest.mark.parametrize("name", GROUP_SYSTEMS)
def test_the_same_run_twice_gives_the_same_bytes(name: str) -> None:
    scenario = cluster(name, burst(80, 300, 60), blocks=150)
    first, second = simulate_groups(scenario), simulate_groups(scenario)
    assert first.result.finish_s.tobytes() == second.result.finish_s.tobytes()
    assert first.result.timeline.kv_used_bytes.tobytes() == second.result.timeline.kv_used_bytes.tobytes()
    assert simulate(scenario).finish_s.tobytes() == first.result.finish_s.tobytes()


def _stage_times(scenario: Scenario, chunks: list[int], stages: int) -> list[list[float]]:
    step, prefix, rows = step_model(scenario.models[0], scenario.engine), 0, []
    for number, chunk in enumerate(chunks):
        pairs = chunk * prefix + chunk * (chunk + 1) // 2
        last = number == len(chunks) - 1
        whole_s = step.step_s(0, 0, chunk, pairs, prefix, int(last))
        host_s = step.stage_host_s
        rows.append([host_s + (whole_s - host_s) / stages] * stages)
        prefix += chunk
    return rows


def _makespan_s(rows: list[list[float]], transfer_s: float, in_flight: int) -> float:
    """The recurrence, with a microbatch starting only when fewer than ``in_flight`` are under way."""
    finish: list[list[float]] = []
    for k, row in enumerate(rows):
        ready_s = finish[k - in_flight][-1] if k >= in_flight else 0.0
        times: list[float] = []
        for stage, seconds in enumerate(row):
            free_s = finish[-1][stage] if finish else 0.0
            times.append(max(free_s, ready_s) + seconds)
            ready_s = times[-1] + transfer_s
        finish.append(times)
    return finish[-1][-1]


@pytest.mark.parametrize(("queues", "stages"), [("shared", 2), ("shared", 4), ("own", 2)])
def test_a_lone_prompt_takes_the_time_of_the_recurrence(queues: str, stages: int) -> None:
    """Chunks of one prompt follow each other through a shared queue; with queues of their own the next waits for the last to
    leave the pipeline."""
    spec = system("vllm-pp", execution={"stages": stages, "queues": queues})
    scenario = cluster(spec, [(0.0, 1024, 1)], blocks=200, network_bytes_per_s=1e12)
    rows = _stage_times(scenario, [256] * 4, stages)
    transfer_s = 256 * scenario.models[0].model.hidden_size * 2 / 1e12
    in_flight = 1 if queues == "own" else stages
    expected = _makespan_s(rows, transfer_s, in_flight)
    assert expected >= finish_times_s(rows, transfer_s)[-1][-1]
    result = lawful(scenario).result
    assert result.first_token_s[0] == pytest.approx(expected, rel=1e-6)


def test_a_stage_has_its_hosts_time_to_itself_in_measured_steps_too(tmp_path: Path) -> None:
    """Whole steps take 2 ms and 10 us a token; steps of a pipeline of two 5 ms more."""
    kinds = [(decodes, tokens, stages) for decodes in (0, 1, 8) for tokens in (8, 64, 256, 512) for stages in (1, 2)]
    decodes, tokens, stages = (np.array(column) for column in zip(*kinds, strict=True))
    about = {"model": "llama-3.2-1b", "dtype": "bfloat16", "mode": "eager", "context": 0, "cached_tokens": 0}
    columns = {name: [value] * len(kinds) for name, value in about.items()}
    seconds = 2e-3 + 1e-5 * (decodes + tokens) + 5e-3 * (stages - 1)
    columns |= {"decodes": decodes, "prefill_tokens": tokens, "stages": stages, "latency_s": seconds}
    pq.write_table(pa.table(columns), tmp_path / "step.parquet")
    measured = EngineSettings(deployment="vllm-eager", step_times=MeasuredSteps(str(tmp_path / "step.parquet"), "0"))
    run = lawful(cluster("vllm-pp", [(0.0, 256, 1)], instances=2, settings=measured, network_bytes_per_s=1e15))
    assert run.result.first_token_s[0] == pytest.approx(2e-3 + 256e-5 + 5e-3, rel=0.01)


def test_a_pipeline_of_two_holds_two_copies_less_one_of_weights() -> None:
    pair = lawful(cluster("vllm-pp", [(0.0, 8, 2)], instances=2))
    apart = lawful(cluster("vllm-dp", [(0.0, 8, 2)], instances=2))
    freed = pair.capacity_bytes[0] - apart.capacity_bytes[0]
    scenario = cluster("vllm-dp", [(0.0, 8, 2)])
    from fineserve_sim.catalog import weight_bytes

    copy = weight_bytes(scenario.models[0].model, scenario.models[0].precision, 1)
    assert freed == copy - copy % scenario.models[0].model.layers


def test_prompts_are_spread_by_demand_and_too_long_ones_refused() -> None:
    scenario = cluster("vllm-dp", [(0.0, 100, 50), (0.0, 100, 50), (0.0, 100, 50), (0.0, 100, 50), (0.1, 5000, 1)])
    run = lawful(scenario)
    assert run.result.engine[:4].tolist() == [0, 1, 2, 3]
    assert run.result.fate[4] == Fate.REJECTED


@pytest.mark.parametrize("name", ["vllm-dp", "llumnix", "kunserve"])
def test_a_preempted_request_as_large_as_the_memory_comes_back(name: str) -> None:
    """Its prompt and all that it generated fill every block: no block more is to be had before it may return."""
    rows: list[Row] = [(0.0, 1, 15), (1e-4, 300, 20)]
    run = lawful(cluster(name, rows, instances=1, blocks=20))
    assert (run.result.fate == Fate.FINISHED).all() and run.result.preemptions.tolist() == [0, 1]


def test_swapping_instead_of_recomputing_loses_no_work() -> None:
    rows = burst(60, 1500, 200)
    recompute, swap = (cluster(name, rows, instances=1, blocks=600) for name in ("vllm-dp", "infercept"))
    first, second = lawful(recompute), lawful(swap)
    assert first.result.preemptions.sum() > 0
    assert second.result.preemptions.sum() < first.result.preemptions.sum() / 4
    assert second.result.end_s < first.result.end_s


def test_a_slow_link_makes_swapped_requests_wait() -> None:
    rows = burst(60, 200, 200)
    fast = cluster("infercept", rows, instances=1, blocks=120)
    slow = replace(fast, system=system("infercept", memory=SwapPoolsSpec(host_bytes_per_s=2e8)))
    assert lawful(slow).result.end_s > lawful(fast).result.end_s


def test_llumnix_moves_running_requests_to_free_instances() -> None:
    """In turn, all long requests go to one of two instances; migration evens it out, and they end sooner."""
    rows: list[Row] = [(i * 1e-3, 100, 800 if i % 2 == 0 else 2) for i in range(60)]
    by_turn = system("llumnix", dispatch=RoundRobinDispatchSpec())
    stays = by_turn.model_copy(update={"migration": None})
    evened, stuck = (lawful(cluster(spec, rows, instances=2, blocks=400)) for spec in (by_turn, stays))
    assert evened.migrations > 0 and stuck.migrations == 0
    assert (evened.result.engine[::2] == 1).sum() > 5 and (stuck.result.engine[::2] == 0).all()
    assert evened.result.finish_s.mean() < stuck.result.finish_s.mean()
    assert evened.result.end_s < stuck.result.end_s


def test_profiled_chunk_cost_predicts_the_step_model() -> None:
    step = step_model(served(name="qwen2.5-14b"))
    cost = chunk_cost(step)
    for prefix, chunk in ((0, 512), (0, 2048), (4096, 1024), (16384, 2048)):
        pairs = chunk * prefix + chunk * (chunk + 1) // 2
        assert cost.chunk(prefix, chunk) == pytest.approx(step.step_s(0, 0, chunk, pairs, prefix, 1), rel=0.15)
    assert cost.alpha > 0 and cost.beta > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": MooreHodgsonSpec()}, "schedules by fcfs"),
        ({"execution": system("vllm-pp").execution, "memory": SwapPoolsSpec()}, "swap memory is for instances alone"),
        ({"execution": system("vllm-pp", execution={"stages": 3}).execution}, "pipelines of 3 stages"),
        ({"memory": system("fineserve").memory}, "private or swap memory"),
        ({"memory": system("vllm-dp").memory.model_copy(update={"attention": "flash-2023"})}, "without legacy"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, object], message: str) -> None:
    spec = system("vllm-dp").model_copy(update=changes)
    with pytest.raises(ScenarioError, match=message):
        simulate_groups(cluster(spec, [(0.0, 8, 2)]))


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"drop": {}}, "drop"),
        ({"execution": {"stages": 2}}, "execution"),
        ({"memory": {"policy": "swap"}}, "memory swap"),
    ],
)
def test_axes_of_single_model_clusters_need_dispatch(axes: dict[str, object], named: str) -> None:
    fields = system("dedicated").model_dump() | axes
    with pytest.raises(ValidationError, match=f"{named} needs dispatch, too"):
        SystemSpec.model_validate(fields)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([Fault(1.0, 4)], "fault 0: there is no serving instance 4; expected 0 to 3"),
        ([Fault(1.0, 0), Fault(2.0, 0)], "fault 1: instance 0 is lost at 1 s and not back at 2 s"),
        ([Fault(2.0, 1, 0.5), Fault(1.0, 1, 1.5)], "fault 0: instance 1 is lost at 1 s and not back at 2 s"),
    ],
)
def test_faults_that_cannot_be_are_refused(faults: list[Fault], message: str) -> None:
    with pytest.raises(ScenarioError, match=f"system vllm-dp, {message}"):
        lawful(cluster("vllm-dp", [(0.0, 8, 2)]), faults)
    spares = system("kunserve").model_copy(update={"scaling": SpareInstancesSpec(instances=1)})
    with pytest.raises(ScenarioError, match="there is no serving instance 3; expected 0 to 2"):
        lawful(cluster(spares, [(0.0, 8, 2)]), [Fault(1.0, 3)])
    with pytest.raises(ScenarioError, match="keeps its engines: faults are for clusters of one model"):
        simulate(replace(solo([(0.0, 8, 2)]), faults=(Fault(1.0, 0),)))


def test_two_models_are_refused() -> None:
    two = solo([(0.0, 8, 2)])
    scenario = replace(cluster("vllm-dp", [(0.0, 8, 2)]), models=(served("a"), served("b")))
    assert two.system.dispatch is None and pinned({}) is not None
    with pytest.raises(ScenarioError, match="serves one model"):
        simulate(scenario)


def test_a_request_moves_only_where_a_slot_is_free() -> None:
    """Four short requests take all slots of the second instance and little of its memory (every engine checks its slots)."""
    dispatch = RoundRobinDispatchSpec()
    rows: list[Row] = [(0.001 * i, *((16, 400) if i % 2 else (320, 200))) for i in range(8)]
    four = EngineSettings(token_budget=256, max_sequences=4)
    scenario = cluster(system("llumnix", dispatch=dispatch), rows, instances=2, settings=four)
    assert lawful(scenario).migrations == 1  # when one has ended
