"""Grammars of constrained requests beside the thread that steps the engine, and within a budget.

vLLM checks a constraint and makes a matcher of it, which takes seconds for some: a thread of low priority does both here,
while the request waits in vLLM's scheduler. Nothing can stop the library once it compiles, so a thread that takes too long is
left to itself, and another one serves the next requests. In each step the matcher then says which tokens may follow. For an
ambiguous grammar that takes longer and longer, and every request of the batch waits for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from fineserve_runtime.engines.loop import one_line
from fineserve_runtime.engines.vllm_seams import grammar_threads

FREE_S, TOKEN_S = 0.5, 0.005
"""Processor time that the matcher of a request may take: so much, and so much more for each token."""

COMPILE_S = 20.0
"""After so long a constraint is given up before its matcher is there."""

_THREADS, _LEFT = 2, 4
"""Makers of grammars, and how many of them may be left to constraints that were given up."""

_NICE = 10
"""Makers of grammars give way to the thread that steps."""

_KEPT_BYTES = 2 * 2**20
"""A compiled grammar above it is not kept for the next request that has it. By the library's count; it takes up to six times as
much."""

_NO_TOKEN = "the constraint and the other options of the request leave no token"
_UNMADE = f"the constraint takes too long to compile: more than {COMPILE_S:g} s"
_TOO_SLOW = f"the constraint takes too long to follow: more than {1000 * TOKEN_S:g} ms a token"


class TimedGrammar(StructuredOutputGrammar):  # type: ignore[misc]
    """``grammar``, and the processor time that it took: the machine's load does not count."""

    def __init__(self, grammar: Any, clock: Callable[[], float] = time.thread_time) -> None:
        self._grammar = grammar
        self._clock = clock
        self._taken_s = 0.0
        self._tokens = 0

    @property
    def too_slow(self) -> bool:
        return self._taken_s > FREE_S + TOKEN_S * self._tokens

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self._tokens += len(tokens)
        return bool(self._timed(self._grammar.accept_tokens, request_id, tokens))

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        self._timed(self._grammar.fill_bitmask, bitmask, batch_index)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        found: list[int] = self._grammar.validate_tokens(tokens)
        return found

    def rollback(self, num_tokens: int) -> None:
        self._grammar.rollback(num_tokens)

    def is_terminated(self) -> bool:
        return bool(self._grammar.is_terminated())

    def reset(self) -> None:
        self._grammar.reset()

    def _timed(self, work: Callable[..., Any], *arguments: Any) -> Any:
        begun_s = self._clock()
        try:
            return work(*arguments)
        finally:
            self._taken_s += self._clock() - begun_s


class Grammars:
    """Takes the place of ``grammar_init`` of one engine core's manager."""

    def __init__(self, core: Any) -> None:
        self._config = core.vllm_config
        self._manager = manager = core.structured_output_manager
        self._init, self._create = manager.grammar_init, manager._create_grammar
        manager.grammar_init = self._begin
        manager._create_grammar = lambda request: TimedGrammar(self._create(request))
        manager._use_async_grammar_compilation = False  # it is in a thread of ours already
        self._requests: dict[str, Any] = {}
        self._orders: SimpleQueue[Any] = SimpleQueue()
        self._first = threading.Lock()
        self._making: dict[threading.Thread, tuple[str, float]] = {}  # request, and since when
        self._threads: list[threading.Thread] = []
        self._left: list[threading.Thread] = []

    def problem(self, request_id: str) -> str:
        """Why vLLM gave the request up; nothing for one without a constraint."""
        request = self._requests.get(request_id)
        if request is None:
            return ""
        grammar = request.structured_output_request.grammar
        return f"the constraint cannot be used: {one_line(grammar)}" if isinstance(grammar, Exception) else _NO_TOKEN

    def too_slow(self) -> list[tuple[str, str]]:
        """Requests over their budget, and what to tell them."""
        of = {id: request.structured_output_request.grammar for id, request in self._requests.items()}
        slow = [(id, _TOO_SLOW) for id, grammar in of.items() if isinstance(grammar, TimedGrammar) and grammar.too_slow]
        return slow + [(id, _UNMADE) for id in self._given_up(time.monotonic())]

    def _given_up(self, now_s: float) -> list[str]:
        """Requests whose constraint is still compiled after ``COMPILE_S``; new threads take the place of their makers'."""
        self._left = [thread for thread in self._left if thread.is_alive()]
        found = []
        for thread, (request_id, begun_s) in list(self._making.items()):
            late = request_id in self._requests and now_s - begun_s > COMPILE_S
            if late and thread in self._threads and len(self._left) < _LEFT:
                self._threads.remove(thread)
                self._left.append(thread)
                found.append(request_id)
        if found:
            self._start()
        return found

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def close(self) -> None:
        for _ in self._threads:
            self._orders.put(None)

    def _begin(self, request: Any) -> None:
        """The request waits in the scheduler until it has a grammar, or an exception in its place."""
        self._requests[request.request_id] = request
        request.structured_output_request.grammar = Future()
        self._start()
        self._orders.put(request)

    def _start(self) -> None:
        while len(self._threads) < _THREADS:
            self._threads.append(threading.Thread(target=self._run, name="grammars", daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # threads that it starts are as patient
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        me = threading.current_thread()
        while me not in self._left and (request := self._orders.get()) is not None:
            if request.request_id in self._requests:
                self._making[me] = request.request_id, time.monotonic()
                self._make(request)
                del self._making[me]

    def _make(self, request: Any) -> None:
        """``_init`` makes the library's backend for the first one."""
        try:
            config = self._config
            request.sampling_params.verify(
                config.model_config, config.speculative_config, config.structured_outputs_config, self._tokenizer
            )
            with self._making_the_first() if self._manager.backend is None else contextlib.nullcontext():
                self._init(request)
            self._keep_small(request.structured_output_request.grammar)
        except Exception as problem:
            failed: Future[Any] = Future()
            failed.set_exception(problem)
            request.structured_output_request.grammar = failed

    @contextlib.contextmanager
    def _making_the_first(self) -> Iterator[None]:
        """Makers take half of the processors together, and one each at least. Eight threads each took as much as an engine."""
        with self._first, grammar_threads(max(1, (os.cpu_count() or 1) // 2 // _THREADS)):
            yield

    def _keep_small(self, grammar: Any) -> None:
        """xgrammar keeps what it compiles, and can only forget all of it. Guidance keeps nothing."""
        compiled = getattr(getattr(grammar, "_grammar", None), "ctx", None)
        if compiled is not None and compiled.memory_size_bytes > _KEPT_BYTES:
            self._manager.backend.compiler.clear_cache()

    @property
    def _tokenizer(self) -> Any:
        return getattr(self._manager, "tokenizer", None)
