"""Systems with kvcached's pages, vTensor's chunks or room for whole sequences: tokens of vLLM's own engines, logs that replay.

Memory is scarce, and what is freed is poisoned. ``FINESERVE_PARITY_REQUESTS=300`` serves so many a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from fineserve_runtime.config import load_file
from fineserve_runtime.decisions import Entry
from fineserve_runtime.demo import make_demo
from fineserve_runtime.engines.api import EngineConfig, EngineHandle, EngineStats, Submission
from fineserve_runtime.engines.lease import SlabLease
from fineserve_runtime.jobs import Job
from fineserve_runtime.launch import Running, launch
from fineserve_runtime.replay_log import replay
from fineserve_runtime.serve import served_scenario
from runtimekit import Heard, eventually

from .conftest import REQUESTS, Tokens, draw_requests

pytestmark = pytest.mark.filterwarnings("ignore")  # vllm and torch warn about themselves
Check = Callable[[EngineConfig, list[Submission], Tokens], None]
WEIGHTS = 5_300_000  # bytes of a tiny model's, rounded up
PAGE = 8 * 16384  # with its eight tensors: two blocks of A, four of B
PAGES = "policy: kvcached, page_bytes: 16384"
EVICTS = "policy: prism, idle_s: 0.0, pressure_fraction: 0.9, move: false, tick_s: 0.1"


class Case(NamedTuple):
    """A system with ``kv_bytes``. Where it ``evicts``, weights lie in the region, too, and ``models`` are asked in turn.
    Prompts share prefixes of ``prefix_tokens``."""

    system: str
    kv_bytes: int
    models: str = "AB"
    evicts: bool = False
    prefix_tokens: int = 0


CASES = {
    "kvcached": Case(f"{{base: kvcached, name: s, memory: {{{PAGES}}}}}", 12 * PAGE),
    "sync": Case(f"{{base: kvcached, name: s, memory: {{{PAGES}, mode: sync}}}}", 12 * PAGE),
    "muxserve++": Case(f"{{base: muxserve++, name: s, memory: {{{PAGES}, mode: contiguous}}}}", 40 * PAGE),
    "prism": Case(f"{{base: prism, name: s, memory: {{{PAGES}}}, residency: {{{EVICTS}}}}}", 12 * PAGE, evicts=True),
    "flexinfer": Case(
        "{base: flexinfer, name: s, memory: {policy: vtensor, chunk_bytes: 8192}}", 16 * 65536, "A", prefix_tokens=96
    ),
    "native": Case("native", 5 * 16 * 65536, "A"),
}
BY_HAND = ("sync", "muxserve++")
"""Modes of the same pages, in long runs alone: each takes most of a minute."""


@dataclass
class Play:
    """What each model was asked and answered, its engine, and the engine's figures at the end."""

    requests: dict[str, list[Submission]]
    heard: dict[str, list[Heard]]
    configs: dict[str, EngineConfig] = field(default_factory=dict)
    stats: dict[str, EngineStats] = field(default_factory=dict)
    log: list[Entry] = field(default_factory=list)

    def tokens(self, model: str) -> Tokens:
        pairs = zip(self.requests[model], self.heard[model], strict=True)
        return {request.request_id: tuple(heard.tokens_) for request, heard in pairs}

    def ask(self, running: Running, model: str, requests: list[Submission]) -> None:
        for request in requests:
            sink = Heard()
            running.driver.submit(job(model, request, sink))
            self.heard[model].append(sink)

    def all_ended(self) -> bool:
        return all(each.end for heard in self.heard.values() for each in heard)


def job(model: str, request: Submission, sink: Heard) -> Callable[[int], Job]:
    return lambda id: Job(id, model, request.prompt_token_ids, request.sampling, sink, 300.0)


@contextmanager
def started(case: Case, folder: Path, log: list[Entry]) -> Iterator[Running]:
    path = make_demo(folder, 0)
    found = load_file(path).section.models
    files = {"A": found["tiny-bf16"], "B": found["tiny-fp8"]}
    models = [
        {"id": model, "model": {"config": f"{files[model].path}/config.json"}, "precision": "W16A16", "rate_per_s": 4}
        for model in case.models
    ]
    served = {
        model: {"path": files[model].path, "kv_cache_dtype": files[model].kv_cache_dtype, "max_model_len": 512}
        for model in case.models
    }
    changes = [
        ("models", json.dumps(models)),
        ("runtime.models", json.dumps(served)),
        ("systems", f"[{case.system}]"),
        ("slo.ttft_s", "300"),
        ("runtime.region_bytes", str(case.kv_bytes + case.evicts * len(case.models) * WEIGHTS)),
        ("runtime.region_name", f"{folder.parent.name}-{folder.name}"),
        ("runtime.poison_freed", "true"),
        ("runtime.weights_in_region", json.dumps(case.evicts)),
        ("runtime.queued_requests", "1000"),
    ]
    file = load_file(path, changes)
    with launch(file, served_scenario(file, None), log=log.append) as running:
        yield running


def play(case: Case, folder: Path) -> Play:
    played = Play(
        {model: draw_requests(ord(model), 12, case.prefix_tokens) for model in case.models},
        {m: [] for m in case.models},
    )
    with started(case, folder, played.log) as running:
        for part in (slice(0, 6), slice(6, None)):
            for model, requests in played.requests.items():
                played.ask(running, model, requests[part])
                if case.evicts:
                    eventually(played.all_ended)
        eventually(played.all_ended)
        handles = [handle for host in running.hosts.values() for handle in host.engines.values()]
        eventually(lambda: not any(handle.stats().used_bytes for handle in handles))
        played.configs = {handle.config.name: handle.config for handle in handles}
        played.stats = {handle.config.name: figures(handle) for handle in handles}
    return played


def figures(handle: EngineHandle) -> EngineStats:
    print(f"\n{handle.config.name}: {handle.stats()}")
    return handle.stats()


def check(case: Case, same_tokens: Check, folder: Path) -> Play:
    """All answers are those of stock engines, on memory that was poisoned before, and the log replays."""
    played = play(case, folder)
    for model, requests in played.requests.items():
        assert {heard.end.kind for heard in played.heard[model] if heard.end} == {"finished"}
        stock = replace(played.configs[model], block_tokens=32, prefix_caching=False)
        same_tokens(stock, requests, played.tokens(model))
        assert played.stats[model].blocks_zeroed, "poisoned memory was to be used again"
    result = replay([json.loads(json.dumps(entry)) for entry in played.log])
    assert result.difference is None and result.commands["Dispatch"]
    assert not case.evicts or (result.commands["Evict"] and result.commands["Activate"])
    return played


@pytest.mark.parametrize("name", ["kvcached", "prism", "flexinfer", *(BY_HAND if REQUESTS else ())])
def test_a_system_gives_the_tokens_of_stock_engines(name: str, same_tokens: Check, tmp_path: Path) -> None:
    played = check(CASES[name], same_tokens, tmp_path)
    for stats in played.stats.values():
        assert (stats.prefix_hits > 0) == (CASES[name].prefix_tokens > 0)
        assert stats.pages_mapped >= stats.pages_unmapped > 0 and stats.map_s > 0 and stats.unmap_s > 0


def test_a_sequence_gets_all_its_blocks_at_once_and_side_by_side(
    same_tokens: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sequences than have room wait and are not preempted."""
    granted: list[list[int]] = []
    alloc = SlabLease.alloc

    def watch(lease: SlabLease, blocks: int) -> list[int] | None:
        granted.append(alloc(lease, blocks) or [])
        return granted[-1]

    monkeypatch.setattr(SlabLease, "alloc", watch)
    played = check(CASES["native"], same_tokens, tmp_path)
    assert played.stats["A"].preemptions == 0 and len(granted) >= len(played.requests["A"])
    for ids in granted:
        assert ids == list(range(ids[0], ids[0] + 16)) and ids[0] % 16 == 0, "512 tokens are 16 blocks"
