"""The loop that steps engines: what one request breaks, and what tells that an engine lives."""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from fineserve_runtime.engines.api import Sampling, Submission, TokenChunk
from fineserve_runtime.engines.links import ProcessLink, ThreadLink
from fineserve_runtime.engines.loop import (
    BEAT_S,
    Beat,
    Build,
    Died,
    EngineLoop,
    Message,
    Ready,
    Stepped,
    Stop,
    Submit,
    give_memory_back,
)

from fineserve_sim.policy.interfaces import EngineState

STATE = EngineState(0, 0, 0, 8, 1024, 1.0)


class BrokenCore:
    """Refuses request 1, crashes at a step with request 2, hangs with request 3."""

    starved = False
    keeps_prefixes = False

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []
        self.closed = False

    def add(self, submission: Submission) -> None:
        if submission.request_id == 1:
            raise ValueError("stop_token_ids\nout of vocabulary")
        self.chunks.append(TokenChunk(submission.request_id, (7,), "length"))

    def refuse(self, request_id: int, problem: str) -> None:
        self.chunks.append(TokenChunk(request_id, (), "error", problem))

    @property
    def has_work(self) -> bool:
        return bool(self.chunks)

    def step(self) -> Any:
        from fineserve_runtime.engines.api import StepReport

        if any(chunk.request_id == 2 for chunk in self.chunks):
            raise IndexError("index 99999 is out of bounds")
        if any(chunk.request_id == 3 for chunk in self.chunks):
            time.sleep(3600)
        chunks, self.chunks = tuple(self.chunks), []
        return StepReport(0, 0.0, 0.001, 0.0, 1, 0, 0, chunks, (), STATE)

    def state(self) -> EngineState:
        return STATE

    def publish(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@contextmanager
def loop() -> Iterator[tuple[ThreadLink, Callable[[], Message]]]:
    heard: queue.Queue[Message] = queue.Queue()
    link = ThreadLink({0: BrokenCore}, heard.put)

    def next_() -> Message:
        while isinstance(message := heard.get(timeout=300), Beat):
            pass
        return message

    try:
        yield link, next_
    finally:
        link.close()


def ask(request_id: int) -> Submit:
    return Submit(0, Submission(request_id, (5,), Sampling()))


def test_what_an_engine_refuses_ends_that_request_alone() -> None:
    with loop() as (link, heard):
        assert isinstance(heard(), Ready)
        link.send(ask(1))
        message = heard()
        assert isinstance(message, Stepped)
        (chunk,) = message.report.chunks
        assert chunk[:3] == (1, (), "error") and chunk.problem == "ValueError: stop_token_ids out of vocabulary"
        link.send(ask(4))
        message = heard()
        assert isinstance(message, Stepped) and message.report.chunks == (TokenChunk(4, (7,), "length"),)


@pytest.mark.parametrize(("sender", "steps"), [(0, [(0, [4]), (1, [4, 5])]), (1, [(0, [4]), (1, [4]), (0, [5])])])
def test_what_comes_in_an_engines_step_is_in_the_next_step_of_who_is_asked(
    sender: int, steps: list[tuple[int, list[int]]]
) -> None:
    """Engines of one thread take turns. A request waits for no whole round of them, and nobody waits while one has work."""
    script = Script([Submit(0, ask(4).submission), Submit(1, ask(4).submission)])

    class Core(BrokenCore):
        def __init__(self, engine: int) -> None:
            super().__init__()
            self.engine = engine

        def step(self) -> Any:
            if self.engine == sender and len(told) == sender:  # its first one
                script.commands.append(Submit(1 - sender, ask(5).submission))
            report = super().step()._replace(engine=self.engine)
            told.append((self.engine, [chunk.request_id for chunk in report.chunks]))
            return report

    told: list[tuple[int, list[int]]] = []
    EngineLoop({0: lambda: Core(0), 1: lambda: Core(1)}, script, lambda message: None).run()
    assert told == steps


def test_who_had_nothing_to_do_is_asked_again_before_anybody_waits() -> None:
    """The request comes when the other engine's turn begins."""
    script = Script([None, None, Submit(0, ask(4).submission)])
    stepped = queue.SimpleQueue[Message]()

    def emit(message: Message) -> None:
        if isinstance(message, Stepped):
            stepped.put(message)

    EngineLoop({0: BrokenCore, 1: BrokenCore}, script, emit).run()
    assert stepped.qsize() == 1


class Script:
    """An inbox that has these, None where it is empty for once, and says stop to a loop that would wait for more."""

    def __init__(self, commands: list[Any]) -> None:
        self.commands = commands

    def take(self, timeout_s: float | None) -> Any:
        if self.commands:
            return self.commands.pop(0)
        return Stop() if timeout_s else None


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_memory_that_was_freed_below_what_is_kept_goes_back() -> None:
    c = ctypes.CDLL(None)
    c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    if not hasattr(c, "malloc_trim"):
        pytest.skip("another C library")
    page, blocks = resource.getpagesize(), [c.malloc(50_000) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, 50_000)
    for block in blocks[:-1]:  # the last one lies above them
        c.free(block)
    before = int(Path("/proc/self/statm").read_text().split()[1])
    give_memory_back()
    after = int(Path("/proc/self/statm").read_text().split()[1])
    c.free(blocks[-1])
    assert (before - after) * page > 80e6


def test_objects_that_hold_each_other_go_with_the_memory() -> None:
    """Requests that ended kept compiled constraints of a hundred megabytes: few objects, so Python did not look for them."""

    class Request:
        itself: Request

    request = Request()
    request.itself = request
    ended = weakref.ref(request)
    gc.disable()
    try:
        del request
        assert ended() is not None
        give_memory_back()
        assert ended() is None
    finally:
        gc.enable()


def test_an_idle_engine_gives_memory_back_once_after_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a beat without work; here each round has one."""
    given: list[int] = []
    monkeypatch.setattr("fineserve_runtime.engines.loop.BEAT_S", -1.0)
    monkeypatch.setattr("fineserve_runtime.engines.loop.give_memory_back", lambda: given.append(len(script.commands)))
    commands = [None, None, Submit(0, ask(4).submission), *[None] * 8]
    script = Script(commands)
    EngineLoop({0: BrokenCore}, script, lambda message: None).run()
    assert len(given) == 1


def test_an_engine_of_a_thread_that_crashed_can_be_built_again() -> None:
    with loop() as (link, heard):
        heard()
        link.send(ask(2))
        died = heard()
        assert isinstance(died, Died) and died.crashed
        assert died.reason == "IndexError: index 99999 is out of bounds" and "Traceback" in died.details
        link.send(Build(0, BrokenCore))
        assert isinstance(heard(), Ready)
        link.send(ask(4))
        assert isinstance(heard(), Stepped)


def test_an_idle_engine_says_that_it_lives() -> None:
    beats: queue.Queue[float] = queue.Queue()
    link = ThreadLink(
        {0: BrokenCore}, lambda message: beats.put(time.monotonic()) if isinstance(message, Beat) else None
    )
    first, second = beats.get(timeout=300), beats.get(timeout=300)
    assert second - first < BEAT_S + 5, "it is not asked for anything"
    link.close()


def stand_still(connection: Connection) -> None:
    connection.send("hello")
    connection.recv()


def test_a_stopped_process_can_be_ended() -> None:
    heard: queue.Queue[Any] = queue.Queue()
    link = ProcessLink(0, stand_still, (), heard.put)
    assert heard.get(timeout=300) == "hello"
    os.kill(link.process.pid or 0, signal.SIGSTOP)
    link.kill()
    assert heard.get(timeout=300) == Died(0, "its process ended with code -9")
    link.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_message_that_cannot_be_handled_is_the_engines_death() -> None:
    """Not its silent end: nobody would ever hear of it again."""
    died = threading.Event()
    reasons: list[str] = []

    def receive(message: Any) -> None:
        if message == "hello":
            raise OSError("No space left on device")
        reasons.append(message.reason)
        died.set()

    link = ProcessLink(0, stand_still, (), receive)
    assert died.wait(30)
    assert reasons == ["what it said could not be handled: OSError: No space left on device"]
    link.close()
