"""What drivers tell the controller. Times are arguments of ``Controller.handle``, not part of the event."""

from __future__ import annotations

from typing import NamedTuple

from fineserve_sim.policy.interfaces import EngineState, Request


class RequestArrived(NamedTuple):
    request: Request


class EngineStepped(NamedTuple):
    """An engine stands between two iterations (or idle): now is when its local scheduler may start requests.

    ``engines`` holds the state of every engine in the scheduler's scope, the stepping one among them.
    """

    engine: int
    engines: dict[int, EngineState]


class RequestAborted(NamedTuple):
    """The client left."""

    request_id: int


class Tick(NamedTuple):
    """The moment that the controller asked for, by ``next_tick_s`` or by the command ``Survey``: everything as it is now.

    ``engines`` holds the state of every engine that is ready (draining ones too), ``free_bytes`` by GPU what another
    model's weights could take: usable memory less weights and contexts of engines (loading ones too) and KV in use.
    """

    engines: dict[int, EngineState]
    free_bytes: dict[int, int]


class EngineReady(NamedTuple):
    """The weights of an activated engine are loaded: it serves from now on."""

    engine: int


class EngineDrained(NamedTuple):
    """An engine that was evicted with ``drain`` has ended its last request; its memory is free."""

    engine: int


class EngineFailed(NamedTuple):
    """An engine is lost, be it loading, serving or draining; its memory is free. The requests that it had are told one by one,
    after this, by ``RequestArrived``: as after an eviction, what they generated so far is part of their prompts."""

    engine: int


Event = RequestArrived | EngineStepped | RequestAborted | Tick | EngineReady | EngineDrained | EngineFailed
