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


Event = RequestArrived | EngineStepped | RequestAborted
