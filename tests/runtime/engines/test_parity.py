"""Greedy tokens of engines over the slab equal those of vLLM's own engines, whatever happens to the memory.

All of them, on processors whose kernels compute a row alike in every batch. Elsewhere a token may differ where vLLM's own two
best logits tie (``same_tokens`` in conftest.py asks it).
Freed slabs are filled with 0xFF, so a byte that is read before it is written turns into NaN and shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fineserve_runtime.engines.api import EngineConfig, StepReport, TinyModel

from .conftest import BF16, FP8, REQUESTS, draw_requests

pytestmark = pytest.mark.filterwarnings("ignore")  # vllm and torch warn about themselves
Stock = Callable[..., dict[int, tuple[int, ...]]]
Check = Callable[..., None]
Start = Callable[..., tuple[Any, Any]]
TIGHT = 24  # slabs; the requests want about 150 at a time


def serve(host: Any, *workloads: list[Any]) -> None:
    """All requests at once, engines alternating."""
    for turn in range(max(map(len, workloads))):
        for engine, requests in enumerate(workloads):
            if turn < len(requests):
                host.engines[engine].submit(requests[turn])
    for engine in range(len(workloads)):
        assert host.engines[engine].drain(120), f"engine {engine} did not finish"


def test_two_models_interleaved(start: Start, same_tokens: Check) -> None:
    host, heard = start(BF16, FP8)
    first, second = draw_requests(1), draw_requests(2)
    serve(host, first, second)
    same_tokens(BF16, first, heard.of(0))
    same_tokens(FP8, second, heard.of(1))
    assert REQUESTS or not heard.preemptions(0)


def test_under_pressure_with_slabs_changing_owners(start: Start, same_tokens: Check) -> None:
    host, heard = start(BF16, FP8, slabs=TIGHT)
    first, second = draw_requests(1), draw_requests(2)
    serve(host, first, second)
    for engine, (config, requests) in enumerate([(BF16, first), (FP8, second)]):
        assert heard.preemptions(engine), "the memory was to be scarce"
        assert host.engines[engine].stats().blocks_zeroed > 50, "slabs were to change owners"
        same_tokens(config, requests, heard.of(engine))
    assert host.ledger().used_bytes == 0


def test_without_zeroing_the_tokens_differ(start: Start, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poison works: the tests above can fail."""
    from fineserve_runtime.engines import vllm_worker

    monkeypatch.setattr(vllm_worker, "zero_blocks", lambda *arguments: None)
    host, heard = start(BF16, FP8, slabs=TIGHT)
    first, second = draw_requests(1), draw_requests(2)
    serve(host, first, second)
    wrong = sum(heard.of(0)[number] != tokens for number, tokens in stock(BF16, first).items())
    wrong += sum(heard.of(1)[number] != tokens for number, tokens in stock(FP8, second).items())
    assert wrong > 20


@pytest.mark.parametrize("slabs", [512, 48])
def test_prefix_caching(start: Start, same_tokens: Check, slabs: int) -> None:
    """Prefixes are found again; where memory is scarce they are given up when the other engine needs their slabs."""
    configs = [replace(config, prefix_caching=True) for config in (BF16, FP8)]
    host, heard = start(*configs, slabs=slabs)
    workloads = [draw_requests(seed, count=60, prefix_tokens=96) for seed in (3, 4)]
    most_cached = [0, 0]

    def watch(report: StepReport) -> None:
        cached = host.engines[report.engine].stats().cached_bytes
        most_cached[report.engine] = max(most_cached[report.engine], cached)

    heard.then = watch
    serve(host, *workloads)
    for engine, config in enumerate((BF16, FP8)):
        same_tokens(config, workloads[engine], heard.of(engine))
        assert most_cached[engine], "prefixes stay when their last reader leaves"
        prompts = sum(len(request.prompt_token_ids) for request in workloads[engine])
        computed = sum(report.prefill_tokens for report in heard.reports if report.engine == engine)
        assert (computed < 0.8 * prompts) if slabs == 512 else heard.preemptions(engine)


def test_three_block_sizes_and_requests_that_come_in_waves(start: Start, same_tokens: Check) -> None:
    """48 KiB beside 64 and 32: slabs of 192 KiB, several blocks each. New requests come while others run."""
    uneven = EngineConfig("uneven", TinyModel(seed=3, layers=3), max_model_len=512, max_batched_tokens=128)
    configs = (BF16, FP8, uneven)
    workloads = [draw_requests(seed, count=40) for seed in (1, 2, 5)]
    waiting = [list(requests[4:]) for requests in workloads]
    host, heard = start(*configs, slabs=14, slab_bytes=3 * 65536)

    def send_next(report: StepReport) -> None:
        for chunk in report.chunks:
            if chunk.finish_reason and waiting[report.engine]:
                host.engines[report.engine].submit(waiting[report.engine].pop(0))

    heard.then = send_next
    serve(host, *(requests[:4] for requests in workloads))
    for engine, config in enumerate(configs):
        same_tokens(config, workloads[engine], heard.of(engine))
    assert host.slab_plan.slab_bytes == 3 * 65536


def test_a_static_split_is_a_limit_on_leases(start: Start, same_tokens: Check) -> None:
    half = 12 * 65536
    host, heard = start(replace(BF16, kv_limit_bytes=half * 2), replace(FP8, kv_limit_bytes=half), slabs=40)
    first, second = draw_requests(1, count=40), draw_requests(2, count=40)
    most = [0, 0]

    def watch(report: StepReport) -> None:
        most[report.engine] = max(most[report.engine], host.engines[report.engine].stats().leased_bytes)

    heard.then = watch
    serve(host, first, second)
    same_tokens(BF16, first, heard.of(0))
    same_tokens(FP8, second, heard.of(1))
    assert half < most[0] <= 2 * half
    assert 0 < most[1] <= half
