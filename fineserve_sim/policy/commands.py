"""Commands of the controller to its driver, in the order in which the driver carries them out."""

from __future__ import annotations

from typing import NamedTuple


class Dispatch(NamedTuple):
    """Hand the request to the engine, which may prefill it from its next iteration on."""

    request_id: int
    engine: int


class Drop(NamedTuple):
    """Give the request up: its deadline cannot be met any more."""

    request_id: int
    reason: str


class Reject(NamedTuple):
    """Refuse the request: no engine could ever serve it. ``unplaced``: its model has no engine."""

    request_id: int
    reason: str
    unplaced: bool = False


class Survey(NamedTuple):
    """Report the state of everything now: the driver answers with ``Tick`` at this moment."""


class Activate(NamedTuple):
    """Load a model onto these GPUs (in the order of TP ranks) as a new engine; ``EngineReady`` says when it serves.

    The memory for its weights is taken at once. Ids count up from the engines of the first placement. Invariant: no id is used
    twice, for an engine is one stay on GPUs. So a move is an ``Activate`` elsewhere, and an ``Evict`` of the old engine once
    the new one is ready.
    """

    engine: int
    model: str
    gpus: tuple[int, ...]


class Evict(NamedTuple):
    """Take an engine from its GPUs. No request is dispatched to it any more; its weights stay in host memory.

    With ``drain`` it first ends its requests, and ``EngineDrained`` follows. Without ``drain``, its memory is free at once,
    and its requests lose their KV (``RequestReturned``).
    """

    engine: int
    drain: bool


class DropLayers(NamedTuple):
    """Merge ``engines`` into one pipeline, as the new engine ``engine``.

    Layers that another of their instances holds become KV memory, and the KV of requests follows its layers.
    ``LayersDropped`` says when the pipeline serves, ``LayersKept`` that it never will. ``freed_bytes`` counts weights over
    the cluster; ``sufficient`` says whether they are as many as required.
    """

    engine: int
    engines: tuple[int, ...]
    freed_bytes: int
    sufficient: bool


class RestoreLayers(NamedTuple):
    """Bring the missing layers of a pipeline back to its instances.

    When all are there (``LayersRestored``), each instance serves as a new engine of ``into``, on its ``gpus``. The pipeline
    ends its requests (``EngineDrained``).
    """

    engine: int
    into: tuple[int, ...]
    gpus: tuple[tuple[int, ...], ...]


class Migrate(NamedTuple):
    """Copy the KV of a request from engine ``source`` to ``destination``, where it goes on decoding.

    If it decodes at the source, it does so meanwhile. If the source only prefills, the copy begins as soon as the destination
    has room. ``MigrationEnded`` follows, whether the request has moved or not.
    """

    request_id: int
    source: int
    destination: int


Command = Dispatch | Drop | Reject | Survey | Activate | Evict | DropLayers | RestoreLayers | Migrate
