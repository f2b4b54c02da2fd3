"""Live migration (Llumnix): a request goes on at another engine of its model, with its KV.

    source       decodes ----------------------------> stops
    copies       all full blocks -> those since then -> what is left, with the block that is not full
    destination  keeps them, and room for them ------------------------> decodes

A stage copies what the source has computed since the last one, while the request decodes there. When a stage has one block or
none, the request stops, and the last copy takes about a step. No token is computed again. The move ends early where the
request ends, is preempted, or finds no room: then it stays where it is.

A thread a move waits for the engines. It takes the driver's lock to hand the request over, and to tell the core.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Protocol

from fineserve_runtime.core import RuntimeEvent
from fineserve_runtime.desk import Desk
from fineserve_runtime.engines.api import EngineHandle
from fineserve_runtime.jobs import Job
from fineserve_runtime.places import Places
from fineserve_sim.policy.commands import Migrate
from fineserve_sim.policy.events import MigrationEnded

_MOVES = 16
"""So many moves are under way at a time; further ones wait."""


class Owner(Protocol):
    """The part of the driver that moves need."""

    def tell(self, event: RuntimeEvent) -> None: ...

    def arrive(self, job: Job, *, again: bool = False) -> None: ...

    def hand_over(self, job: Job, engine: int) -> None: ...

    def incident(self, what: str, facts: dict[str, object]) -> None: ...

    def locked(self) -> Any: ...


class _Outcome(Enum):
    """``STAYS``: the source has the request, if it is anywhere. ``STOPPED``: no engine has it. ``COPIED``: the destination
    has all of its KV, and no engine the request."""

    STAYS = auto()
    STOPPED = auto()
    COPIED = auto()


class Moves:
    """Carries out `Migrate` commands, and tells the core when each has ended."""

    def __init__(self, owner: Owner, places: Places, desk: Desk) -> None:
        self._owner, self._places, self._desk = owner, places, desk
        self._pool = ThreadPoolExecutor(_MOVES, thread_name_prefix="move")

    def start(self, move: Migrate) -> None:
        """Call it under the driver's lock."""
        source, destination = self._places.handle(move.source), self._places.handle(move.destination)
        with suppress(RuntimeError):  # closed
            self._pool.submit(self._run, move, source, destination)

    def close(self) -> None:
        """Start no more; moves under way end with their engines."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, move: Migrate, source: EngineHandle, destination: EngineHandle) -> None:
        try:
            self._carry_out(move, source, destination)
        except Exception as problem:  # the pool would keep it to itself
            self._owner.incident("internal error", {"where": "move", "reason": repr(problem)})

    def _carry_out(self, move: Migrate, source: EngineHandle, destination: EngineHandle) -> None:
        begun_s = time.monotonic()
        outcome, stopped_s = _copy(move.request_id, source, destination)
        with self._owner.locked():
            moved = outcome is not _Outcome.STAYS and self._hand_over(move, copied=outcome is _Outcome.COPIED)
            if moved:
                now_s = time.monotonic()
                facts = {"took_s": now_s - begun_s, "stopped_s": now_s - stopped_s}
                self._owner.incident("migrated", {**move._asdict(), **facts})
            else:
                destination.forget_kv(move.request_id)
            self._owner.tell(MigrationEnded(move.request_id))

    def _hand_over(self, move: Migrate, *, copied: bool) -> bool:
        """Whether the request goes on at the destination. It may have ended, or its source died and it is elsewhere."""
        job = self._desk.get(move.request_id)
        if job is None or job.engine != move.source:
            return False
        self._desk.detach(job)
        if copied and move.destination in self._places.engines():
            self._owner.hand_over(job, move.destination)
            return True
        self._owner.arrive(job, again=True)  # the destination died with its KV
        return False


def _copy(request_id: int, source: EngineHandle, destination: EngineHandle) -> tuple[_Outcome, float]:
    """The outcome, and when the request stopped at its source."""
    held, fresh = 0, 2
    try:
        while fresh > 1:
            part = source.copy_kv(request_id, held)
            if part is None or not destination.hold_kv(request_id, part):
                return _Outcome.STAYS, 0.0
            fresh = len(part.blocks)
            held += fresh
        stopped_s = time.monotonic()
        last = source.copy_kv(request_id, held, stop=True)
    except RuntimeError:  # an engine died
        return _Outcome.STAYS, 0.0
    if last is None:
        return _Outcome.STAYS, 0.0
    try:
        copied = destination.hold_kv(request_id, last, last=True)
    except RuntimeError:
        copied = False
    return _Outcome.COPIED if copied else _Outcome.STOPPED, stopped_s
