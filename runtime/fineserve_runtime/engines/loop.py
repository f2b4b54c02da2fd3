"""The loop that steps engines: commands in, messages out, the same in a thread of the host and in a process of its own.

Engines of one loop take turns, a step each. vLLM keeps the state of a forward pass in module globals, so engines that share
a process could not step at the same time anyway.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from fineserve_runtime.engines.api import StepReport, Submission
from fineserve_sim.policy.interfaces import EngineState

POLL_S = 0.005
"""How often an idle engine that keeps cached prefixes looks whether others need the room."""

STARVED_S = 0.001
"""Pause after a round in which no engine found room for anything."""

BEAT_S = 1.0
"""So often an engine says that it lives, be it idle."""


REMOVED = "it was removed"


class Submit(NamedTuple):
    engine: int
    submission: Submission


class Abort(NamedTuple):
    engine: int
    request_id: int


Method = Literal[
    "sleep",
    "wake",
    "copy_kv",
    "hold_kv",
    "forget_kv",
    "evacuate",
    "droppable_bytes",
    "drop_layers",
    "borrow",
    "vacate",
]


class Call(NamedTuple):
    """Run a method of an engine between two steps; answered by a `Reply` with the same ``ticket``."""

    engine: int
    ticket: int
    method: Method
    arguments: tuple[Any, ...] = ()


class Stop(NamedTuple):
    pass


class Build(NamedTuple):
    """Build an engine of this loop again, which died. Only to a loop of this process."""

    engine: int
    build: Callable[[], Any]


class Remove(NamedTuple):
    """Let go of an engine for good; answered by `Died`."""

    engine: int


EngineCommand = Submit | Abort | Call | Build | Remove
Command = EngineCommand | Stop


class Ready(NamedTuple):
    engine: int
    state: EngineState


class Stepped(NamedTuple):
    """``seen`` counts the commands of this engine that the report's state takes into account."""

    seen: int
    report: StepReport


class Reply(NamedTuple):
    """``value`` is what the method returned. ``state`` and ``seen`` are the engine's after it, as in `Stepped`."""

    engine: int
    ticket: int
    value: Any
    error: str | None
    seen: int
    state: EngineState


class Died(NamedTuple):
    """``crashed``: an exception in a step ended it; ``details`` is its traceback."""

    engine: int
    reason: str
    crashed: bool = False
    details: str = ""


class Beat(NamedTuple):
    """The engine lives: it is idle, or steps without finding room."""

    engine: int


Message = Ready | Stepped | Reply | Died | Beat


class RankDied(RuntimeError):
    """The engine is gone because a process that it consists of is: no request is to blame."""


class Inbox(Protocol):
    """Where commands arrive. ``take`` waits up to ``timeout_s`` (None: for ever) and returns None when nothing came."""

    def take(self, timeout_s: float | None) -> Command | None: ...


class EngineLoop:
    """Steps engines until it is told to stop. ``build`` maps engine ids to functions that make a `SteppedCore`."""

    def __init__(self, build: Mapping[int, Callable[[], Any]], inbox: Inbox, emit: Callable[[Message], None]) -> None:
        self._build = build
        self._inbox = inbox
        self._emit = emit
        self._cores: dict[int, Any] = {}
        self._seen = dict.fromkeys(build, 0)
        self._step_s = dict.fromkeys(build, 0.0)
        self._next_beat_s = 0.0
        self._stepped = False  # since memory was given back
        self._stopping = False

    def run(self) -> None:
        for engine, build in self._build.items():
            self._begin(engine, build)
        wait_s = BEAT_S
        while not self._stopping:
            self._take_commands(wait_s)
            wait_s = self._round()
            self._beat()
        for core in self._cores.values():
            core.close()

    def _begin(self, engine: int, build: Callable[[], Any]) -> None:
        try:
            self._cores[engine] = build()
            self._cores[engine].publish()
        except Exception as error:
            self._cores.pop(engine, None)
            self._emit(Died(engine, one_line(error), details=_traceback(error)))
            return
        self._emit(Ready(engine, self._cores[engine].state()))

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            for engine in self._cores:
                self._emit(Beat(engine))
            if self._stepped and not any(core.has_work for core in self._cores.values()):
                give_memory_back()
                self._stepped = False

    def _take_commands(self, wait_s: float) -> bool:
        """Whether any came."""
        command = first = self._inbox.take(wait_s)
        while command is not None and not self._stopping:
            self._obey(command)
            command = self._inbox.take(0.0)
        return first is not None

    def _obey(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._stopping = True
            return
        if isinstance(command, Build):
            self._seen[command.engine], self._step_s[command.engine] = 0, 0.0
            self._begin(command.engine, command.build)
            return
        self._seen[command.engine] += 1
        core = self._cores.get(command.engine)
        if core is None:
            return
        try:
            if isinstance(command, Submit):
                self._add(core, command.submission)
            elif isinstance(command, Abort):
                core.abort(command.request_id)
            elif isinstance(command, Remove):
                self._cores.pop(command.engine).close()
                self._emit(Died(command.engine, REMOVED))
            else:
                self._call(core, command)
        except Exception as error:
            self._bury(command.engine, error)

    def _add(self, core: Any, submission: Submission) -> None:
        """What the engine refuses ends that request alone."""
        try:
            core.add(submission)
        except Exception as error:
            core.refuse(submission.request_id, one_line(error))

    def _call(self, core: Any, call: Call) -> None:
        value, failure = None, None
        try:
            value = getattr(core, call.method)(*call.arguments)
        except RuntimeError as error:  # refused, nothing changed
            failure = str(error)
        core.publish()
        self._emit(
            Reply(call.engine, call.ticket, value, failure, self._seen[call.engine], self._state(call.engine, core))
        )

    def _round(self) -> float:
        """One step of each engine that has work; what came meanwhile is in the next one's. Returns how long to wait for
        commands before the next round."""
        wait_s = BEAT_S
        for engine in list(self._cores):
            if self._take_commands(0.0):
                wait_s = 0.0  # it may be for one that had its turn
            core = self._cores.get(engine)
            if core is None or self._stopping:
                continue
            try:
                if core.has_work:
                    wait_s = min(STARVED_S if self._step(engine, core) else 0.0, wait_s)
                elif core.keeps_prefixes:
                    core.make_room()
                    core.publish()
                    wait_s = min(POLL_S, wait_s)
            except Exception as error:
                self._bury(engine, error)
        return wait_s

    def _step(self, engine: int, core: Any) -> bool:
        """True when the engine found room for nothing."""
        report = core.step()
        self._stepped = True
        if report is None:
            return bool(core.starved)
        if report.prefill_tokens or report.decodes:
            self._step_s[engine] = report.ended_s - report.started_s
        core.publish()
        state = report.state._replace(slowdown=self._slowdown(engine))
        self._emit(Stepped(self._seen[engine], report._replace(state=state)))
        return False

    def _state(self, engine: int, core: Any) -> EngineState:
        state: EngineState = core.state()
        return state._replace(slowdown=self._slowdown(engine))

    def _slowdown(self, engine: int) -> float:
        """Engines of one loop take turns: a step of each per step of one."""
        busy_s = sum(self._step_s[other] for other, core in self._cores.items() if other == engine or core.has_work)
        return busy_s / self._step_s[engine] if self._step_s[engine] else 1.0

    def _bury(self, engine: int, error: Exception) -> None:
        core = self._cores.pop(engine)
        with contextlib.suppress(Exception):  # it is broken; what it leased is reclaimed by who hears of its death
            core.close()
        if isinstance(error, RankDied):
            self._emit(Died(engine, str(error)))
        else:
            self._emit(Died(engine, one_line(error), crashed=True, details=_traceback(error)))


def give_memory_back() -> None:
    """What is not used any more goes back to the operating system, within 20 ms.

    Ended requests hold each other in cycles, and with them the matchers of their constraints. These can take a hundred MB
    and are few objects, so Python would not look for them soon. What was freed in the middle of the heap glibc gives back when
    asked and at no other time.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def one_line(error: BaseException) -> str:
    """The error for a log: its kind and all that it says, on one line of at most 500 characters."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:500]


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-4000:]
