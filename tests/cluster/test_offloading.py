"""KV of prefixes in host memory: what it must equal, what it never makes worse, and what a copy takes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from fineserve_traces import Trace
from simkit import Row, gpus, logged, served, system, trace_of, with_kv_blocks

from fineserve_sim.cluster import EngineSettings, Fate, RunResult, Scenario, ScenarioError, ServedModel, simulate
from fineserve_sim.cluster.components import why_whole
from fineserve_sim.cluster.compose.memory import geometry
from fineserve_sim.cluster.engine.offload import TIMER, OffloadedBlocks
from fineserve_sim.cluster.offloading import KVOffloading
from fineserve_sim.cluster.scenario import Clients
from fineserve_sim.cluster.simulation import prepare, simulate_whole
from fineserve_sim.systems import load_systems
from fineserve_sim.systems.spec import PrivatePoolsSpec

MODEL = served(name="llama-3.1-8b")
KEEPS = {"policy": "private", "prefix_cache": True}
BLOCK_BYTES = geometry(MODEL, EngineSettings()).block_bytes
NEW_TOKENS, ANSWER_TOKENS = 400, 60


def conversations(users: int, turns: int, gap_s: float) -> Trace:
    """A turn of each user in turn, ``gap_s`` apart; a prompt is all that was said before, and something new."""
    rows: list[Row] = []
    ids = []
    for turn in range(turns):
        prompt = turn * (NEW_TOKENS + ANSWER_TOKENS) + NEW_TOKENS
        for user in range(users):
            rows.append((len(rows) * gap_s, prompt, ANSWER_TOKENS))
            ids.append(tuple(1000 * user + block for block in range(-(-(prompt + ANSWER_TOKENS) // 16))))
    trace = trace_of(rows)
    tokens = trace.prompt_tokens + trace.output_tokens
    return replace(trace, prefix_hashes=tuple(ids), prefix_block_tokens=16, prefix_tokens=tokens)


def scenario(trace: Trace, blocks: int, offloading: KVOffloading | None, m: ServedModel = MODEL) -> Scenario:
    settings = with_kv_blocks([m], blocks, EngineSettings(kv_offloading=offloading))
    return Scenario(system("dedicated", memory=KEEPS), (m,), gpus(m.tp), trace, settings, check=True)


def same(a: RunResult, b: RunResult) -> bool:
    names = ("first_token_s", "finish_s", "fate", "preemptions", "generated_tokens")
    return all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for name in names)


def ttft_s(one: Scenario) -> np.ndarray:
    result = simulate(one)
    assert (result.fate == Fate.FINISHED).all()
    return result.first_token_s - one.whole_trace.arrival_s


def computed_tokens(one: Scenario) -> int:
    """Prompt tokens that engines computed."""
    log: list[dict[str, object]] = []
    simulate(replace(one, log=log.append))
    return sum(line["prefill_tokens"] for line in log if line.get("span") == "EngineComputed")  # type: ignore[misc]


def test_nothing_in_host_memory_is_no_host_memory() -> None:
    build = partial(scenario, conversations(5, 4, 0.3), 300)
    assert same(simulate(build(KVOffloading(0.0))), simulate(build(None)))


def test_systems_that_keep_no_prefixes_have_none() -> None:
    plain = replace(scenario(conversations(3, 3, 0.3), 300, None), system=system("dedicated"))
    asked = replace(plain, engine=replace(plain.engine, kv_offloading=KVOffloading(64.0, store_s_per_gib=1.0)))
    assert same(simulate(plain), simulate(asked))


@pytest.mark.parametrize("gap_s", [2.0, 0.05])
def test_host_memory_without_end_finds_what_gpus_without_end_do(gap_s: float) -> None:
    """Behind a link that takes no time, and if nobody is preempted: the same tokens are computed, at the same times."""
    trace = conversations(6, 4, gap_s)
    below, above = scenario(trace, 1500, KVOffloading(1e4, 1e30)), scenario(trace, 20_000, None)
    assert computed_tokens(below) == computed_tokens(above) < trace.prompt_tokens.sum()
    if gap_s > 1:
        assert ttft_s(below) == pytest.approx(ttft_s(above), rel=1e-9)
    without = scenario(trace, 300, None)
    assert computed_tokens(without) > computed_tokens(above)


@pytest.mark.parametrize("users", [4, 9])
def test_more_host_memory_is_never_worse(users: int) -> None:
    """For requests that do not meet: each finds as much or more, and a longer hit comes no later."""
    trace = conversations(users, 5, 2.0)
    waits = [ttft_s(scenario(trace, 200, KVOffloading(gib, 50e9))) for gib in (0.0, 0.3, 1.0, 2.0, 4.0, 64.0)]
    for less, more in pairwise(waits):
        assert (more <= less + 1e-9).all()
    assert waits[-1].mean() < 0.8 * waits[0].mean()


def test_the_bytes_never_exceed_the_capacity() -> None:
    run = prepare(scenario(conversations(8, 4, 0.2), 300, KVOffloading(1.0)))
    (engine,) = run.parts.cluster.engines.values()
    assert isinstance(engine.kv, OffloadedBlocks)
    host, found = engine.kv.host, list[int]()

    def look(now: float) -> None:
        host.check()
        found.append(len(host))

    for number in range(400):
        run.parts.cluster.clock.at(number * 0.02, TIMER, look)
    run.to_the_end()
    assert host.capacity_blocks == 2**30 // BLOCK_BYTES == max(found)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_hit_takes_its_copy_and_the_rest_of_its_prompt(tp: int) -> None:
    """Three users take turns and the GPU holds one of them. The links of all GPUs carry their parts at the same time."""
    m, rate = served(name="llama-3.1-8b", tp=tp), 20e9
    one = scenario(conversations(3, 2, 5.0), 58, KVOffloading(64.0, rate), m)
    found_s = ttft_s(one)
    hit_blocks = (NEW_TOKENS + ANSWER_TOKENS - 1) // 16  # the last token of an answer has no KV yet
    copied_s = hit_blocks * geometry(m, one.engine).block_bytes / rate
    hit, rest = 16 * hit_blocks, 2 * NEW_TOKENS + ANSWER_TOKENS - 16 * hit_blocks
    (engine,) = prepare(one).parts.cluster.engines.values()
    step_s = engine.step.step_s(0, 0, rest, rest * hit + rest * (rest + 1) // 2, hit, 1)
    assert found_s[4:] == pytest.approx([copied_s + step_s] * 2, rel=1e-9)
    block_s = copied_s / hit_blocks
    assert found_s[3] == pytest.approx(copied_s - block_s + step_s, rel=1e-9), "one block was still on the GPUs"


def test_others_compute_while_a_prefix_comes() -> None:
    first, second = conversations(3, 1, 5.0), (860, ANSWER_TOKENS)
    rows: list[Row] = [(5.0 * user, NEW_TOKENS, ANSWER_TOKENS) for user in range(3)]
    trace = trace_of([*rows, (15.0, *second), (15.01, 100, 1)])
    ids = (*(first.prefix_hashes or ()), tuple(range(58)), tuple(range(7000, 7007)))
    trace = replace(
        trace, prefix_hashes=ids, prefix_block_tokens=16, prefix_tokens=trace.prompt_tokens + trace.output_tokens
    )
    hit_s, stranger_s = ttft_s(scenario(trace, 70, KVOffloading(64.0, 1e8)))[3:]
    assert hit_s > 0.1 > stranger_s


def test_a_preempted_request_finds_its_own_kv() -> None:
    """No request is like another here: all that comes back is what was lost by preemption."""
    rows: list[Row] = [(0.001 * number, 500, 400) for number in range(6)]
    build = partial(scenario, trace_of(rows), 220)
    runs = {gib: logged(build(KVOffloading(gib) if gib else None)) for gib in (0.0, 64.0)}
    assert all(run.result.preemptions.sum() > 0 for run in runs.values())
    assert computed_tokens(build(KVOffloading(64.0))) < computed_tokens(build(None))


def test_a_store_lengthens_steps_by_what_it_is_said_to() -> None:
    trace = trace_of([(0.0, 1000, 1), (5.0, 600, 1)])
    plain_s, stored_s = (ttft_s(scenario(trace, 300, KVOffloading(64.0, store_s_per_gib=cost))) for cost in (0.0, 0.25))
    token_bytes = BLOCK_BYTES / 16
    assert stored_s - plain_s == pytest.approx([tokens * token_bytes / 2**30 * 0.25 for tokens in (1000, 600)])


def test_engines_apart_find_what_they_find_together() -> None:
    trace = conversations(6, 4, 0.2)
    models = tuple(replace(MODEL, id=id) for id in "ab")
    trace = replace(trace, models=("a", "b"), model=(np.arange(len(trace)) % 2).astype(np.int32))
    settings = with_kv_blocks([MODEL], 300, EngineSettings(kv_offloading=KVOffloading(2.0, 5e9)))
    for known in (trace, replace(trace, prefix_hashes=None, prefix_block_tokens=None, prefix_tokens=None)):
        one = Scenario(system("dedicated", memory=KEEPS), models, gpus(2), known, settings)
        assert why_whole(one) is None
        assert same(simulate(one), simulate_whole(one))


def test_clients_that_ask_again_find_what_they_said() -> None:
    trace = conversations(3, 4, 0.0)
    for known in (trace, replace(trace, prefix_hashes=None, prefix_block_tokens=None, prefix_tokens=None)):
        one = replace(scenario(known, 120, KVOffloading(8.0)), clients=Clients((3,), (0.5,), len(trace)))
        result = simulate(one)
        assert (result.fate == Fate.FINISHED).all() and same(result, simulate(replace(one, exact_steps=True)))


def test_engines_that_cannot_have_it_say_so() -> None:
    one = scenario(conversations(2, 2, 1.0), 300, KVOffloading(1.0))
    with pytest.raises(ScenarioError, match="kv_offloading is vLLM's"):
        simulate(replace(one, engine=replace(one.engine, batching="sglang")))
    pipelines = load_systems()["vllm-pp"].model_copy(update={"memory": PrivatePoolsSpec(prefix_cache=True)})
    with pytest.raises(ScenarioError, match="for instances alone, not for pipelines"):
        simulate(replace(one, system=pipelines, gpus=gpus(2)))
