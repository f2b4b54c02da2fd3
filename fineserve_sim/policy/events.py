"""What drivers tell the controller. Times are arguments of ``Controller.handle``, not part of the event."""

from __future__ import annotations

from typing import NamedTuple

from fineserve_sim.policy.interfaces import EngineLoad, EngineState, Request


class RequestArrived(NamedTuple):
    request: Request


class RequestReturned(NamedTuple):
    """An engine gave a request back, or lost it: it waits again, the tokens generated so far as part of its prompt."""

    request: Request


class EngineStepped(NamedTuple):
    """An engine stands between two iterations (or idle): now is when its local scheduler may start requests. ``engines`` holds
    the state of every engine in the scheduler's scope, the stepping one among them."""

    engine: int
    engines: dict[int, EngineState]


class RequestAborted(NamedTuple):
    """The client left."""

    request_id: int


class Tick(NamedTuple):
    """The moment that the controller asked for, by ``next_tick_s`` or by the command ``Survey``: everything as it is now.

    ``running`` holds, by engine that has any, the requests that were dispatched to it and have not ended; ``free_bytes`` by
    GPU what another model's weights could take: usable memory less weights and contexts of engines (loading ones too) and KV
    in use. ``loads`` holds those of every engine, where the controller dispatches by them.
    """

    running: dict[int, int]
    free_bytes: dict[int, int]
    loads: dict[int, EngineLoad] = {}  # noqa: RUF012 - the default of a named tuple, never changed


class Loads(NamedTuple):
    """The engines whose load changed since the last look, as they are now; told before a request comes, where
    ``Controller.needs_loads``."""

    loads: dict[int, EngineLoad]


class EngineReady(NamedTuple):
    """The weights of an activated engine are loaded: it serves from now on."""

    engine: int


class EnginesResized(NamedTuple):
    """The KV tokens that each of these engines can hold from now on if no other engine holds any, as its memory counts them,
    in whole blocks: its GPUs have got more or fewer engines. Until it is told, an engine is taken to hold what the largest
    GPU could."""

    kv_tokens: dict[int, int]


class EngineDrained(NamedTuple):
    """An engine that was evicted with ``drain`` has ended its last request; its memory is free."""

    engine: int


class EngineFailed(NamedTuple):
    """An engine is lost, be it loading, serving or draining, for the GPUs ``lost`` failed, and with it all others on them; its
    memory is free. The requests that it had are told one by one, after this, by ``RequestReturned``."""

    engine: int
    lost: tuple[int, ...] = ()


class GpusRepaired(NamedTuple):
    """GPUs that had failed are back, with nothing in their memory."""

    gpus: tuple[int, ...]


class LayersDropped(NamedTuple):
    """The pipeline that ``DropLayers`` asked for serves from now on."""

    engine: int


class LayersKept(NamedTuple):
    """The pipeline that ``DropLayers`` asked for will not be: an instance failed. Its other engines serve on."""

    engine: int


class LayersRestored(NamedTuple):
    """The instances of a pipeline hold all layers again: its successors serve, and it drains."""

    engine: int


class MigrationEnded(NamedTuple):
    """A request has moved, or will not."""

    request_id: int


OfRequests = RequestArrived | RequestReturned | RequestAborted | MigrationEnded
OfEngines = EngineStepped | EngineReady | EnginesResized | EngineDrained | EngineFailed | GpusRepaired
OfLayers = LayersDropped | LayersKept | LayersRestored
Event = OfRequests | OfEngines | OfLayers | Tick | Loads
