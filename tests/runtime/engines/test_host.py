"""The life of engines in one process: state, aborts, starvation, sleep and wake, configurations that cannot work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fineserve_runtime.engines.api import EngineConfig, Sampling, StepReport, Submission, TinyModel
from fineserve_runtime.engines.table import SlabTable

from .conftest import BF16, FP8, SLAB_BYTES, draw_requests, submit_together

pytestmark = pytest.mark.filterwarnings("ignore")
Stock = Callable[..., dict[int, tuple[int, ...]]]
Check = Callable[..., None]
Start = Callable[..., tuple[Any, Any]]


def test_all_engines_starve_and_all_finish(start: Start, same_tokens: Check) -> None:
    """Each sequence grows into nearly the whole region, and those of three engines grow together: they take turns."""
    small = TinyModel(layers=1, hidden=64, heads=2, kv_heads=2, head_dim=32)
    configs = [
        EngineConfig(f"m{seed}", replace(small, seed=seed), max_model_len=256, max_batched_tokens=64)
        for seed in (1, 2, 3)
    ]
    host, heard = start(*configs, slabs=10, slab_bytes=8192)
    requests = [
        Submission(number, tuple(range(2 + number, 22 + number)), Sampling(max_tokens=230, ignore_eos=True))
        for number in range(3)
    ]
    for request in requests:
        for engine in range(3):
            host.engines[engine].submit(request)
    for engine in range(3):
        assert host.engines[engine].drain(120), "livelock"
        assert heard.preemptions(engine) > 1
    for engine, config in enumerate(configs):
        same_tokens(config, requests, heard.of(engine))
    assert host.ledger().used_bytes == 0


def test_state_and_step_reports(start: Start) -> None:
    host, heard = start(BF16, slabs=33)
    engine = host.engines[0]
    assert engine.state() == (0, 0, 0, 16, 32 * 32, 1.0)
    assert engine.kv_capacity_tokens == 32 * 32
    states: list[Any] = []
    heard.then = lambda report: states.append((report, engine.state()))
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    submit_together(host, heard, [Submission(number, tuple(range(2, 102)), sampling) for number in range(3)])
    assert engine.drain(60)
    assert sum(report.prefill_tokens for report in heard.reports) == 300
    assert sum(report.decodes for report in heard.reports) == 21
    assert all(report.started_s < report.ended_s for report in heard.reports)
    assert all(0 < report.schedule_s < report.ended_s - report.started_s for report in heard.reports)
    busiest = max(states, key=lambda entry: entry[0].state.decoding)[1]
    assert busiest.running == busiest.decoding == 3
    assert busiest.free_slots == 13
    assert busiest.free_kv_tokens == (32 - 3 * 4) * 32
    assert engine.state() == (0, 0, 0, 16, 32 * 32, 1.0)
    assert engine.stats().steps == len(heard.reports) + 1


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_state_is_that_of_all_its_requests(
    start: Start, monkeypatch: pytest.MonkeyPatch, prefix_caching: bool
) -> None:
    """What the scheduler counts as requests change is what looking at each of them gives: chunks, preemptions, aborts."""
    from fineserve_runtime.engines.vllm_scheduler import SlabScheduler

    counted: list[Any] = []
    seen: list[tuple[int, int, int]] = []
    engine_state = SlabScheduler.engine_state

    def also_look(scheduler: Any) -> Any:
        left = [request.num_tokens - request.num_computed_tokens for request in scheduler.requests.values()]
        put_out = [request.num_output_tokens > 0 for request in scheduler.requests.values()]
        decodes = [some and tokens <= 1 for some, tokens in zip(put_out, left, strict=True)]
        prefill = sum(max(0, tokens) for tokens, decode in zip(left, decodes, strict=True) if not decode)
        seen.append((len(left), sum(decodes), prefill))
        counted.append(engine_state(scheduler))
        return counted[-1]

    monkeypatch.setattr(SlabScheduler, "engine_state", also_look)
    host, heard = start(replace(BF16, prefix_caching=prefix_caching, max_batched_tokens=64), slabs=20)
    engine = host.engines[0]
    aborted = iter((5, 58, 59))

    def abort_some(report: StepReport) -> None:
        if len(heard.reports) % 20 == 0 and (number := next(aborted, None)) is not None:
            engine.abort(number)

    heard.then = abort_some
    for request in draw_requests(7, count=60, prefix_tokens=64 if prefix_caching else 0):
        engine.submit(request)
    assert engine.drain(120)
    assert heard.preemptions(0) and "abort" in heard.reasons.values()
    assert [(state.running, state.decoding, state.prefill_tokens) for state in counted] == seen
    assert seen[-1] == (0, 0, 0)


def test_priority_goes_first(start: Start) -> None:
    host, heard = start(replace(BF16, max_sequences=1))
    finished: list[int] = []
    heard.then = lambda report: finished.extend(chunk.request_id for chunk in report.chunks if chunk.finish_reason)
    requests = [
        Submission(number, tuple(range(2, 80)), Sampling(max_tokens=40), priority)
        for number, priority in enumerate((0, 5, 0, -1))
    ]
    submit_together(host, heard, requests)
    assert host.engines[0].drain(60)
    assert finished == [3, 0, 2, 1]


def test_abort(start: Start) -> None:
    """Running, waiting and unknown requests; the others are not disturbed, and every request ends just once."""
    host, heard = start(replace(BF16, max_sequences=2))
    engine = host.engines[0]
    requests = [
        Submission(number, tuple(range(2, 50)), Sampling(max_tokens=64, ignore_eos=True)) for number in range(4)
    ]

    def abort_some(report: StepReport) -> None:
        if len(heard.tokens.get((0, 0), ())) >= 3:
            for number in (0, 3, 99):
                engine.abort(number)

    heard.then = abort_some
    submit_together(host, heard, requests)
    assert engine.drain(60)
    assert heard.reasons == {(0, 0): "abort", (0, 3): "abort", (0, 1): "length", (0, 2): "length"}
    assert len(heard.of(0)[0]) < 64
    assert engine.stats().leased_bytes == 0


def test_end_of_sequence_and_stop_tokens(start: Start, stock: Stock) -> None:
    host, heard = start(BF16)
    prompt = tuple(range(2, 50))
    free = Submission(0, prompt, Sampling(max_tokens=30, ignore_eos=True))
    tokens = stock(BF16, [free])[0]
    host.engines[0].submit(Submission(1, prompt, Sampling(max_tokens=30, ignore_eos=True, stop_token_ids=(tokens[5],))))
    assert host.engines[0].drain(60)
    assert heard.reasons[0, 1] == "stop"
    assert heard.of(0)[1] == tokens[: tokens.index(tokens[5]) + 1]
    assert host.engines[0].eos_token_ids == (1,)


def test_sleep_and_wake_move_weights_and_keep_tokens(start: Start, same_tokens: Check) -> None:
    """Weights are views of the region. While one model sleeps its bytes are the other's KV; it wakes in other slabs. Tokens
    are stock vLLM's before, meanwhile and afterwards."""
    small = TinyModel(seed=1, hidden=128, heads=2, kv_heads=2, head_dim=64, layers=4)
    one = replace(BF16, name="one", model=small, prefix_caching=True)
    other = replace(BF16, name="other", model=replace(small, seed=2))
    host, heard = start(one, other, slabs=96, weights_in_region=True)
    requests = draw_requests(7, count=30)

    def answers(engine: int) -> None:
        heard.tokens.clear(), heard.reasons.clear()
        for request in requests:
            host.engines[engine].submit(request)
        assert host.engines[engine].drain(60)
        same_tokens((one, other)[engine], requests, heard.of(engine))

    answers(0), answers(1)
    awake = host.ledger()
    held = host.engines[0].stats().weight_bytes
    assert held > 2**20
    table = SlabTable(host.table_path)
    weight_slabs = [slab for slab in range(table.header.slab_count) if table.owner_of(slab) == 0]
    assert host.engines[0].sleep() < 5
    assert host.engines[0].asleep
    assert host.engines[0].stats().weight_bytes == host.engines[0].stats().cached_bytes == 0
    assert host.ledger().free_bytes >= awake.free_bytes + held
    with pytest.raises(RuntimeError, match="one is asleep; wake it first"):
        host.engines[0].submit(requests[0])
    reused: set[int] = set()
    heard.then = lambda report: reused.update(slab for slab in weight_slabs if table.owner_of(slab) == 1)
    answers(1)
    assert len(reused) > 10, "the other's KV was to lie where the weights were"
    heard.then = lambda report: None
    assert host.engines[1].sleep() < 5
    assert host.engines[0].wake() < 5  # into the slabs where the other one's weights were
    assert host.engines[1].wake() < 5
    answers(0), answers(1)


def test_an_engine_is_added_beside_one_that_serves_and_removed(start: Start, same_tokens: Check) -> None:
    """Its weights take a run of slabs, its KV the slabs that are left, in blocks of a size that the start did not know."""
    small = TinyModel(seed=1, hidden=128, heads=2, kv_heads=2, head_dim=64, layers=4)
    one, uneven = replace(BF16, name="one", model=small), replace(BF16, name="uneven", model=replace(small, layers=3))
    host, heard = start(one, slabs=140, slab_multiple=4, weights_in_region=True)
    requests, free_bytes = draw_requests(7, count=30), host.ledger().free_bytes
    for turn in range(2):
        for request in requests[:15]:
            host.engines[0].submit(request)
        assert host.add(uneven) == 1
        for request in requests[15:]:
            host.engines[0].submit(request)
        for request in requests:
            host.engines[1].submit(request)
        assert host.engines[0].drain(60) and host.engines[1].drain(60)
        same_tokens(one, requests, heard.of(0)), same_tokens(uneven, requests, heard.of(1))
        host.remove(1)
        assert host.ledger().free_bytes == free_bytes, turn
        heard.tokens.clear(), heard.reasons.clear()
    with pytest.raises(RuntimeError, match="free slabs in a row for its weights"):
        host.add(replace(BF16, name="large", model=TinyModel(seed=1, layers=16)))
    assert list(host.engines) == [0] and not heard.deaths


def test_sleep_is_refused_while_requests_are_left_or_weights_lie_elsewhere(start: Start) -> None:
    host, _ = start(BF16)
    host.engines[0].submit(Submission(0, (2, 3, 4), Sampling(max_tokens=400, ignore_eos=True)))
    with pytest.raises(RuntimeError, match="still has 1 requests; drain it first"):
        host.engines[0].sleep()
    assert host.engines[0].drain(60)
    with pytest.raises(RuntimeError, match="only when weights_in_region is set"):
        host.engines[0].sleep()
    assert not host.engines[0].asleep


def test_an_engine_that_fails_dies_alone(start: Start, same_tokens: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process too: its requests are lost, its slabs come back, the other one goes on."""
    from fineserve_runtime.engines.vllm_worker import SlabWorker

    host, heard = start(BF16, FP8, slabs=64)
    execute = SlabWorker.execute_model

    def fail_once(worker: Any, scheduler_output: Any) -> Any:
        if worker._settings.engine == 0 and len(heard.reports) > 20:
            raise RuntimeError("cosmic ray")
        return execute(worker, scheduler_output)

    monkeypatch.setattr(SlabWorker, "execute_model", fail_once)
    first, second = draw_requests(1, count=40), draw_requests(2, count=40)
    for one, other in zip(first, second, strict=True):
        host.engines[0].submit(one)
        host.engines[1].submit(other)
    assert heard.died.wait(60)
    assert heard.deaths[0][:2] == (0, "RuntimeError: cosmic ray")
    assert heard.deaths[0][2]
    assert host.engines[1].drain(60)
    same_tokens(FP8, second, heard.of(1))
    assert host.ledger().used_bytes == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_model_len": 4096}, "bf16: its KV memory holds 2016 tokens, max_model_len is 4096"),
        ({"kv_cache_dtype": "turboquant_4bit"}, "kv_cache_dtype 'turboquant_4bit' is not served"),
        ({"model": Path("/nowhere")}, "model folder /nowhere: no config.json"),
        ({"model": TinyModel(vocab=100)}, "vocab is 100"),
    ],
)
def test_configurations_that_cannot_work(start: Start, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(replace(BF16, **change), slabs=64)
    host, _ = start(BF16)  # and nothing is left behind
    with pytest.raises(ValueError, match="prompt of 512 tokens; it must be 1 to 511"):
        host.engines[0].submit(Submission(0, tuple(range(512)), Sampling()))


def test_a_region_larger_than_its_folder_is_refused(start: Start) -> None:
    """Running out of shared memory later would kill the process without a word."""
    with pytest.raises(ValueError, match=r"region_bytes is \d+, but .* has room for \d+; lower it, or enlarge"):
        start(BF16, slabs=2**32)


def test_contract_names_what_changed(vllm_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fineserve_runtime.engines.vllm_seams import UnsupportedVllm, check_contract, contract_problems
    from vllm.v1.core.block_pool import BlockPool

    assert contract_problems() == []
    check_contract()
    monkeypatch.delattr(BlockPool, "touch")
    monkeypatch.setattr(BlockPool, "get_new_blocks", lambda self, count: [])
    with pytest.raises(
        UnsupportedVllm, match=r"get_new_blocks has no parameter num_blocks; .*touch is gone.*; install vLLM 0\.32\.0"
    ):
        check_contract()


def test_idle_engine_gives_up_its_prefixes(start: Start) -> None:
    """Its prefixes fill the region; when another engine needs slabs, it makes room without a request of its own."""
    host, _ = start(replace(BF16, prefix_caching=True), replace(FP8, prefix_caching=True), slabs=40)
    for number in range(6):
        prompt = tuple(range(2 + number * 50, 202 + number * 50))
        host.engines[0].submit(Submission(number, prompt, Sampling(max_tokens=8)))
    assert host.engines[0].drain(60)
    kept = host.engines[0].stats().cached_bytes
    assert kept > 30 * SLAB_BYTES
    for number in range(8):
        host.engines[1].submit(Submission(number, tuple(range(2, 402)), Sampling(max_tokens=90, ignore_eos=True)))
    assert host.engines[1].drain(60)
    assert host.engines[0].stats().cached_bytes < kept
    deadline = time.monotonic() + 5
    while host.ledger().free_bytes < SLAB_BYTES and time.monotonic() < deadline:
        time.sleep(0.01)
    assert host.ledger().free_bytes >= SLAB_BYTES, "some slabs stay free for whoever comes"
