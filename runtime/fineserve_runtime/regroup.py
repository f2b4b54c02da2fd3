"""Two engines become one pipeline over both devices, and two engines again (KunServe).

vLLM fixes layers and KV tensors when an engine is built. So both shapes are there from the start, over one set of weights.
Each of two devices has an engine with all layers. A pipeline over both sleeps, and borrows their weights when it wakes.

    drop      both engines stop at the end of a step, and all requests leave them
              each gives up the layers that the other keeps; the pipeline wakes over what they keep
              requests go on there, the oldest first, with their KV (the exchange) or by computing it again
    restore   the pipeline holds no KV any more where layers were, and serves on
              the layers come back from host memory; both engines wake and take requests
              the pipeline ends what it has, and sleeps

An engine that dies before the pipeline serves undoes the drop: what is left wakes, and the requests are computed again. Later,
the death of a lender ends the pipeline, too, and the core starts each instance by itself.

Changes run one after another in the thread of the devices, which waits for the engines. It takes the driver's lock where it
tells the core.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from threading import Event
from typing import Any, NamedTuple, Protocol

from fineserve_runtime.core import RuntimeEvent
from fineserve_runtime.desk import Desk
from fineserve_runtime.engines.api import EngineHandle, KvPart
from fineserve_runtime.jobs import Handover, Job
from fineserve_runtime.places import Place, Places, wake_patiently
from fineserve_sim.policy.commands import DropLayers, RestoreLayers
from fineserve_sim.policy.events import EngineDrained, GpusRepaired, LayersDropped, LayersKept, LayersRestored
from fineserve_sim.policy.fleet.views import Status

_RETRY_S = 0.5
"""After so long a restore that failed is tried again."""


class Owner(Protocol):
    """The part of the driver that changes need."""

    def tell(self, event: RuntimeEvent) -> None: ...

    def status(self, engine: int) -> Status | None: ...

    def arrive(self, job: Job, *, again: bool = False) -> None: ...

    def hand_over(self, job: Job, engine: int) -> None: ...

    def drain(self, engine: int) -> None:
        """The engine ends its requests and sleeps."""
        ...

    def incident(self, what: str, facts: dict[str, object]) -> None: ...

    def locked(self) -> Any: ...


class _Left(NamedTuple):
    """A request that left its engine for the pipeline."""

    request_id: int
    part: KvPart | None


class Regrouping:
    """Carries out `DropLayers` and `RestoreLayers`, and tells the core what became of them."""

    def __init__(self, owner: Owner, places: Places, desk: Desk, handover: Handover) -> None:
        self._owner, self._places, self._desk = owner, places, desk
        self._with_kv = handover == "exchange"
        self._freed_from = 0
        self._on_their_way: dict[int, int] = {}  # by pipeline, requests that are still to come
        self._closed = Event()

    def stalled(self, engine: int) -> int:
        """Requests that a pipeline is still to get."""
        return self._on_their_way.get(engine, 0)

    def drop(self, command: DropLayers) -> None:
        """Call it under the driver's lock; so all below."""
        whole = sorted((self._places.handle(engine) for engine in command.engines), key=lambda handle: handle.gpus)
        gpus = tuple(gpu for handle in whole for gpu in handle.gpus)
        place = self._places.process(whole[0].config.name, gpus)
        self._places.run(place.gpu, partial(self._drop, command, whole, place))

    def restore(self, command: RestoreLayers) -> None:
        model = self._places.handle(command.engine).config.name
        places = [self._places.process(model, gpus) for gpus in command.gpus]
        work = partial(self._restore, command, places, self._places.handle(command.engine))
        self._places.run(places[0].gpu, work)

    def died(self, place: Place) -> None:
        """An engine without requests died: a pipeline must be there when it is wanted."""
        if self._places.at(place).config.borrows:
            self._places.run(place.gpu, partial(self._revive, place))

    def close(self) -> None:
        self._closed.set()

    # --- drop --------------------------------------------------------------------------------------------------------

    def _drop(self, command: DropLayers, whole: Sequence[EngineHandle], place: Place) -> None:
        left: list[_Left] = []
        begun_s = time.monotonic()
        try:
            for handle in whole:
                left += [_Left(*found) for found in handle.evacuate(with_kv=self._with_kv)]
            emptied_s = time.monotonic()
            self._reshape(whole, place)
        except RuntimeError as problem:
            self._undo(command, whole, left, str(problem))
            return
        ready_s, pipeline = time.monotonic(), self._places.at(place)
        with self._owner.locked():
            if serves := pipeline.alive:  # else its death was nobody's, and is not told again
                self._begin(command, pipeline, len(left))
        if not serves:
            self._undo(command, whole, left, "the pipeline died")
            return
        self._deliver(command.engine, pipeline, left)
        facts = {
            "stop_s": emptied_s - begun_s,
            "reshape_s": ready_s - emptied_s,
            "deliver_s": time.monotonic() - ready_s,
        }
        self._owner.incident("layers dropped", {"engine": command.engine, "requests": len(left), **facts})

    def _reshape(self, whole: Sequence[EngineHandle], place: Place) -> None:
        self._revive(place)
        pipeline = self._places.at(place)
        lent = [handle.drop_layers() for handle in whole]
        self._freed_from = min(each.freed_from for each in lent)
        pipeline.borrow(lent)
        pipeline.vacate(None)
        pipeline.wake()

    def _begin(self, command: DropLayers, pipeline: EngineHandle, requests: int) -> None:
        """The pipeline serves; so many ``requests`` are to come. What it still has of an earlier change is its own again."""
        model = pipeline.config.name
        former = self._places.engine_at(self._places.process(model, pipeline.gpus))
        kept = self._desk.close(former) if former is not None else []
        for source in command.engines:
            self._desk.close(source)
            self._places.leave(source)
        if former is not None:
            self._places.leave(former)
            self._owner.tell(EngineDrained(former))
        self._places.settle(command.engine, model, pipeline.gpus)
        self._desk.open(command.engine)
        for job in kept:
            self._desk.reattach(job, command.engine)
        self._on_their_way[command.engine] = requests
        self._owner.tell(LayersDropped(command.engine))

    def _deliver(self, engine: int, pipeline: EngineHandle, left: Iterable[_Left]) -> None:
        """Each request goes on as soon as its KV has come, while others run."""
        for request_id, part in sorted(left, key=lambda each: each.request_id):
            arrived = self._is_held(pipeline, request_id, part)
            with self._owner.locked():
                job = self._desk.get(request_id)
                self._on_their_way[engine] -= 1
                if job is None:
                    pipeline.forget_kv(request_id)
                elif arrived and self._owner.status(engine) is not None:
                    self._owner.hand_over(job, engine)
                else:
                    self._owner.arrive(job, again=True)

    def _is_held(self, pipeline: EngineHandle, request_id: int, part: KvPart | None) -> bool:
        try:
            return part is None or pipeline.hold_kv(request_id, part, last=True)
        except RuntimeError:  # the pipeline died
            return False

    def _undo(self, command: DropLayers, whole: Sequence[EngineHandle], left: Iterable[_Left], reason: str) -> None:
        self._owner.incident("layers kept", {"engine": command.engine, "reason": reason})
        for handle in whole:
            with suppress(RuntimeError):
                wake_patiently(handle)
        with self._owner.locked():
            found = [self._desk.get(each.request_id) for each in left]
            homeless = [job for job in found if job is not None and job.engine in command.engines]
            for job in homeless:  # before others, who lost their engine, are given to a source that serves again
                self._desk.detach(job)
            if self._owner.status(command.engine) is not None:
                self._owner.tell(LayersKept(command.engine))
            settled = [self._places.handle(engine).gpus for engine in self._places.engines()]
            for handle in whole:
                if handle.gpus not in settled:  # it died, and nobody else starts it again
                    self._owner.tell(GpusRepaired(handle.gpus))
            for job in homeless:
                self._owner.arrive(job, again=True)

    # --- restore -----------------------------------------------------------------------------------------------------

    def _restore(self, command: RestoreLayers, places: Sequence[Place], pipeline: EngineHandle) -> None:
        begun_s = time.monotonic()
        while not self._are_back([self._places.at(place) for place in places], pipeline):
            with self._owner.locked():
                gone = self._owner.status(command.engine) is None
            if gone or self._closed.wait(_RETRY_S):
                return  # the pipeline died, and the core starts its instances by themselves; or the server ends
        with self._owner.locked():
            if self._owner.status(command.engine) is None:
                return
            model = pipeline.config.name
            for engine, gpus in zip(command.into, command.gpus, strict=True):
                self._places.settle(engine, model, gpus)
                self._desk.open(engine)
            self._owner.tell(LayersRestored(command.engine))
            self._owner.drain(command.engine)
        self._owner.incident("layers restored", {"engine": command.engine, "took_s": time.monotonic() - begun_s})

    def _are_back(self, whole: Sequence[EngineHandle], pipeline: EngineHandle) -> bool:
        try:
            pipeline.vacate(self._freed_from)
            for handle in whole:
                handle.wake()
        except RuntimeError as problem:
            self._owner.incident("layers not restored", {"reason": str(problem)})
            return False
        return True

    def _revive(self, place: Place) -> None:
        """Start a pipeline that died. Raises RuntimeError where it does not start."""
        if not self._places.at(place).alive:
            self._places.restart(place)
            self._places.at(place).sleep()
