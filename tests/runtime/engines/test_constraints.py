"""Real engines: a constraint holds up nobody else while it is made or followed, and a wrong one is its client's mistake."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from fineserve_runtime.engines.api import Sampling, StepReport, Submission

from .conftest import BF16, Recorder, draw_requests

pytestmark = pytest.mark.filterwarnings("ignore")

YES = ("choice", '["yes", "no"]')
WRONG = [
    Sampling(max_tokens=8, constraint=("json", '{"$ref": "#"}')),
    Sampling(max_tokens=8, constraint=("json", '{"type": "object", "patternProperties": {"(": {}}}')),
    Sampling(max_tokens=8, constraint=("regex", "\\")),
    Sampling(max_tokens=8, constraint=("regex", "(")),
    Sampling(max_tokens=8, constraint=("grammar", "start: start")),
    Sampling(max_tokens=8, constraint=("grammar", "root ::= root")),
    Sampling(max_tokens=8, constraint=("grammar", "%llguidance {}\nstart: /a+/")),
    Sampling(max_tokens=8, constraint=("grammar", "start: <[9999]>")),
    Sampling(max_tokens=8, constraint=YES, allowed_token_ids=(5, 6)),
]


def problems(heard: Recorder) -> dict[int, str]:
    return {
        chunk.request_id: chunk.problem for report in heard.reports for chunk in report.chunks if chunk.finish_reason
    }


def test_a_wrong_constraint_ends_that_request_and_says_why(
    start: Callable[..., tuple[Any, Any]], same_tokens: Callable[..., None]
) -> None:
    """They failed as the engine's fault, which pages an operator and makes clients try again."""
    host, heard = start(BF16)
    requests = draw_requests(6, 4)
    for number, sampling in enumerate(WRONG):
        host.engines[0].submit(Submission(1000 + number, (5, 6, 7), sampling))
    for request in requests:
        host.engines[0].submit(request)
    assert host.engines[0].drain(120)
    told = problems(heard)
    for number, sampling in enumerate(WRONG):
        assert heard.reasons[0, 1000 + number] == "error", sampling.constraint
        assert "constraint" in told[1000 + number], sampling.constraint
        heard.tokens.pop((0, 1000 + number))
    assert not any(told[request.request_id] for request in requests) and not heard.deaths
    same_tokens(BF16, requests, heard.of(0))


def test_others_go_on_while_a_constraint_is_checked(
    start: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 60 KB takes seconds. It was checked by the thread that steps the engine."""
    from vllm import SamplingParams

    checked, checking, reported, other_ended = Event(), Event(), Event(), Event()
    check = SamplingParams._validate_structured_outputs

    def slow(params: Any, *arguments: Any) -> None:
        if params.structured_outputs is not None and any(argument is not None for argument in arguments[1:2]):
            checking.set()
            assert checked.wait(60)
        check(params, *arguments)

    monkeypatch.setattr(SamplingParams, "_validate_structured_outputs", slow)
    host, heard = start(BF16)

    def listen(report: StepReport) -> None:
        if report.state.running == 1 and report.state.prefill_tokens == 0:
            reported.set()
        if (0, 2) in heard.reasons:
            other_ended.set()

    heard.then = listen
    host.engines[0].submit(Submission(1, (5, 6, 7), Sampling(max_tokens=16, constraint=YES)))
    assert checking.wait(60) and reported.wait(20), "a scheduler is asked at reports"
    host.engines[0].submit(Submission(2, (5, 6, 7), Sampling(max_tokens=4, ignore_eos=True)))
    assert other_ended.wait(20) and (0, 1) not in heard.reasons
    checked.set()
    assert host.engines[0].drain(60) and heard.reasons[0, 1] == "stop"


def test_a_request_that_left_while_its_constraint_was_checked_leaves_nothing(
    start: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fineserve_runtime.engines import vllm_grammars

    asked = Event()
    monkeypatch.setattr(vllm_grammars.Grammars, "_make", lambda grammars, request: asked.set())
    host, heard = start(BF16)
    host.engines[0].submit(Submission(1, (5, 6, 7), Sampling(max_tokens=16, constraint=YES)))
    assert asked.wait(60)
    host.engines[0].abort(1)
    assert host.engines[0].drain(60) and heard.reasons[0, 1] == "abort"


def test_constraints_that_compile_for_ever_end_and_hold_up_no_others(
    start: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them held both threads, and any other constraint waited until the request's own time was over."""
    from fineserve_runtime.engines import vllm_grammars

    compiled, make = Event(), vllm_grammars.Grammars._make

    def slow(grammars: Any, request: Any) -> None:
        if request.sampling_params.max_tokens == 77:
            assert compiled.wait(120)
        make(grammars, request)

    monkeypatch.setattr(vllm_grammars.Grammars, "_make", slow)
    monkeypatch.setattr(vllm_grammars, "COMPILE_S", 0.2)
    host, heard = start(BF16)
    for number in range(3):
        host.engines[0].submit(Submission(number, (5, 6, 7), Sampling(max_tokens=77, constraint=YES)))
    assert host.engines[0].drain(60)
    assert {heard.reasons[0, number] for number in range(3)} == {"error"}
    assert all("takes too long to compile" in problems(heard)[number] for number in range(3))
    monkeypatch.setattr(vllm_grammars, "COMPILE_S", 60.0)
    host.engines[0].submit(Submission(3, (5, 6, 7), Sampling(max_tokens=16, constraint=YES)))
    assert host.engines[0].drain(60) and heard.reasons[0, 3] == "stop"
    compiled.set()


def test_the_compiler_takes_half_of_the_processors_and_keeps_no_large_constraint(
    start: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had eight threads, and kept what took a hundred megabytes."""
    import xgrammar
    from fineserve_runtime.engines import vllm_grammars

    built: list[tuple[Any, int]] = []

    class Compiler(xgrammar.GrammarCompiler):
        def __init__(self, *arguments: Any, max_threads: int, **options: Any) -> None:
            super().__init__(*arguments, max_threads=max_threads, **options)
            built.append((self, max_threads))

    monkeypatch.setattr(xgrammar, "GrammarCompiler", Compiler)
    host, heard = start(BF16)
    for number, words in enumerate(('["yes", "no"]', '["one", "two"]')):
        host.engines[0].submit(Submission(number, (5, 6, 7), Sampling(max_tokens=16, constraint=("choice", words))))
        assert host.engines[0].drain(60) and heard.reasons[0, number] == "stop"
        ((compiler, threads),) = built
        assert (compiler.get_cache_size_bytes() > 0) == (number == 0)
        monkeypatch.setattr(vllm_grammars, "_KEPT_BYTES", 0)
    assert threads == max(1, (os.cpu_count() or 1) // 4)
    assert xgrammar.GrammarCompiler is Compiler, "it was put back"


def test_a_constraint_that_takes_too_long_to_follow_ends_its_request(
    start: Callable[..., tuple[Any, Any]], same_tokens: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fineserve_runtime.engines import vllm_grammars

    monkeypatch.setattr(vllm_grammars, "FREE_S", -1.0)
    host, heard = start(BF16)
    requests = draw_requests(7, 4)
    host.engines[0].submit(Submission(1000, (5, 6, 7), Sampling(max_tokens=16, constraint=YES)))
    for request in requests:
        host.engines[0].submit(request)
    assert host.engines[0].drain(60)
    assert heard.reasons[0, 1000] == "error" and "takes too long to follow" in problems(heard)[1000]
    heard.tokens.pop((0, 1000))
    same_tokens(BF16, requests, heard.of(0))


def test_the_budget_of_a_constraint_grows_with_its_tokens(vllm_installed: None) -> None:
    from fineserve_runtime.engines.vllm_grammars import FREE_S, TOKEN_S, TimedGrammar

    class Grammar:
        """A matcher whose every mask takes twice what a token may."""

        now_s = 0.0

        def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
            self.now_s += 2 * TOKEN_S

        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
            return True

    grammar = Grammar()
    timed, tokens = TimedGrammar(grammar, lambda: grammar.now_s), 0
    while not timed.too_slow:
        timed.fill_bitmask(None, 0)
        timed.accept_tokens("1", [5])
        tokens += 1
    assert tokens == pytest.approx(FREE_S / TOKEN_S, abs=2)
