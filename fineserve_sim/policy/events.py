"""Events that a driver reports to the controller. ``Controller.handle`` takes the time of an event beside it."""

from __future__ import annotations

from typing import NamedTuple

from fineserve_sim.policy.interfaces import EngineLoad, EngineState, Request


class RequestArrived(NamedTuple):
    request: Request


class RequestReturned(NamedTuple):
    """An engine gave a request back, or lost it. The request waits again; its generated tokens are part of its prompt."""

    request: Request


class EngineStepped(NamedTuple):
    """An engine is between two iterations, or idle: its local scheduler may start requests now.

    ``engines`` holds the state of every engine in the scheduler's scope, this one included.
    """

    engine: int
    engines: dict[int, EngineState]


class RequestAborted(NamedTuple):
    """The client left."""

    request_id: int


class Tick(NamedTuple):
    """The state of everything now, as the controller asked by ``next_tick_s`` or by the command ``Survey``.

    * ``running``: by engine, how many requests were dispatched to it and have not ended; engines without any are left out.
    * ``free_bytes``: by GPU, the bytes that the weights of another model could take. Weights and contexts of all engines, also
      of those that load, and KV in use are taken off usable memory.
    * ``loads``: by engine, where the controller dispatches by them.
    """

    running: dict[int, int]
    free_bytes: dict[int, int]
    loads: dict[int, EngineLoad] = {}  # noqa: RUF012 - the default of a named tuple, never changed


class Loads(NamedTuple):
    """The present load of each engine whose load changed since the last report.

    Drivers report it before a request arrives, where ``Controller.needs_loads``.
    """

    loads: dict[int, EngineLoad]


class EngineReady(NamedTuple):
    """The weights of an activated engine are loaded: it serves from now on."""

    engine: int


class EnginesResized(NamedTuple):
    """The KV tokens that each of these engines can hold from now on, if no other engine holds any.

    It follows when a GPU gets more or fewer engines. The memory counts whole blocks. Before its first such event, an engine
    counts with the tokens that it would hold alone on the largest GPU.
    """

    kv_tokens: dict[int, int]


class EngineDrained(NamedTuple):
    """An engine that was evicted with ``drain`` has ended its last request; its memory is free."""

    engine: int


class EngineFailed(NamedTuple):
    """An engine is lost, and its memory is free. It may have been loading, serving or draining.

    If the GPUs ``lost`` failed, all other engines on them are lost too. ``RequestReturned`` follows for each request of the
    engine.
    """

    engine: int
    lost: tuple[int, ...] = ()


class GpusRepaired(NamedTuple):
    """GPUs that had failed are back, with nothing in their memory."""

    gpus: tuple[int, ...]


class LayersDropped(NamedTuple):
    """The pipeline that ``DropLayers`` asked for serves from now on."""

    engine: int


class LayersKept(NamedTuple):
    """An instance failed, so the pipeline that ``DropLayers`` asked for will not form. Its other engines serve on."""

    engine: int


class LayersRestored(NamedTuple):
    """The instances of a pipeline hold all layers again: its successors serve, and it drains."""

    engine: int


class PrefillEnded(NamedTuple):
    """A prompt is computed at an engine that only prefills, where its KV, of so many tokens, waits to go on."""

    request_id: int
    engine: int
    tokens: int


class MigrationEnded(NamedTuple):
    """A request has moved, or will not."""

    request_id: int


OfRequests = RequestArrived | RequestReturned | RequestAborted | PrefillEnded | MigrationEnded
OfEngines = EngineStepped | EngineReady | EnginesResized | EngineDrained | EngineFailed | GpusRepaired
OfLayers = LayersDropped | LayersKept | LayersRestored
Event = OfRequests | OfEngines | OfLayers | Tick | Loads
