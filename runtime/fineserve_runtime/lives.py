"""The life of engines under the driver: they wake, sleep, die, hang, and start again after a while.

All calls come under the driver's lock. What takes long is done by ``Places``, which calls back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Thread
from typing import Any, Literal, NamedTuple, Protocol

from fineserve_runtime.backoff import Backoff
from fineserve_runtime.core import RuntimeEvent
from fineserve_runtime.desk import Desk
from fineserve_runtime.engines.api import EngineHost
from fineserve_runtime.jobs import End, Job
from fineserve_runtime.places import Places
from fineserve_sim.policy.commands import Activate, Evict
from fineserve_sim.policy.events import EngineDrained, EngineFailed, EngineReady, EnginesResized
from fineserve_sim.policy.fleet.views import Status

_START_S = 5.0
"""Clients that come back for a model that starts again are asked for so much more patience than its back-off."""

_LOCK_S = 3.0
"""So long an engine may be silent and then hold its region's lock, which takes milliseconds: all others of the device wait."""

_PATIENCE_S = 3.0
"""For so long a back-off is no reason to send clients away."""

Condition = Literal["ready", "starting", "sleeping", "stopped", "down"]


class Health(NamedTuple):
    """The state of a model. ``down``: its engine died, did not come back, and is tried again in ``retry_after_s``.
    ``sleeping``: the next request wakes it. ``stopped``: an operator put it to sleep, and wakes it. ``down_s`` are the seconds
    without an engine that it did not choose, all together."""

    condition: Condition
    retry_after_s: float
    down_s: float


class Owner(Protocol):
    """The part of the driver that the lives of engines need."""

    def tell(self, event: RuntimeEvent) -> None: ...

    def status(self, engine: int) -> Status | None: ...

    def consult(self, engine: int) -> None: ...

    def arrive(self, job: Job, *, again: bool = False) -> None: ...

    def give_up(self, job: Job, end: End) -> None: ...

    def send_again(self, job: Job, reason: str) -> None: ...

    def incident(self, what: str, facts: dict[str, object]) -> None: ...

    def now(self) -> float: ...

    def locked(self) -> Any:
        """A context manager: callbacks of other threads take the driver's lock."""
        ...


@dataclass(slots=True)
class _Delayed:
    """An activation that waits for its process's back-off: it died, or found no memory for its weights in one piece."""

    command: Activate
    due_s: float


class EngineLives:
    """``keeps_resident``: the core starts lost engines again by itself, not with the next request. Raises ValueError as
    ``Places`` does."""

    def __init__(
        self, owner: Owner, places: Places, desk: Desk, models: tuple[str, ...], *, keeps_resident: bool
    ) -> None:
        self._owner = owner
        self._places = places
        self._desk = desk
        self._keeps_resident = keeps_resident
        self._leaving: set[int] = set()  # engines that drain and have not begun to sleep
        self._backoff = Backoff()
        self._delayed: dict[int, _Delayed] = {}
        self._killed_s: dict[int, float] = {}  # until then no other engine of the device is ended
        self._held_s: dict[tuple[int, int], float] = {}  # since when silent engines were seen with their region's lock
        self._gone: set[str] = set()  # models whose clients were told so
        self._stopped: set[str] = set()
        self._down_since_s: dict[str, float] = {}
        self._down_s = dict.fromkeys(models, 0.0)
        self._kv_tokens: dict[int, int] = {}  # of engines, as the core was told

    def add_model(self, model: str) -> None:
        self._down_s[model] = 0.0

    def remove_model(self, model: str) -> None:
        """Forget a model that is stopped and has no requests, and where it was."""
        for engine in self._places.engines():
            if self._places.handle(engine).config.name == model:
                self._desk.close(engine)
                self._delayed.pop(engine, None)
                self._leaving.discard(engine)
                self._places.leave(engine)
        self._stopped.discard(model)
        self._gone.discard(model)
        self._down_since_s.pop(model, None)
        del self._down_s[model]

    def health(self, model: str) -> Health:
        now = self._owner.now()
        since_s = self._down_since_s.get(model)
        down_s = self._down_s.get(model, 0.0) + (0.0 if since_s is None else now - since_s)
        condition = self._condition(model)
        waits_s = [each.due_s - now for each in self._delayed.values() if each.command.model == model]
        retry_after_s = math.ceil(max(0.0, min(waits_s, default=0.0)) + _START_S) if condition == "down" else 0.0
        return Health(condition, retry_after_s, down_s)

    def _condition(self, model: str) -> Condition:
        if model in self._stopped:
            return "stopped"
        engines = [e for e in self._places.engines() if self._places.handle(e).config.name == model]
        if any(self.serves(engine) for engine in engines):
            return "ready"
        if any(self._owner.status(e) is Status.LOADING and e not in self._delayed for e in engines):
            return "starting"
        waits = any(each.command.model == model for each in self._delayed.values())
        if model in self._gone and (waits or self._keeps_resident):
            return "down"
        return "starting" if waits or (self._keeps_resident and model in self._down_since_s) else "sleeping"

    def serves(self, engine: int) -> bool:
        handle = self._places.handle(engine)
        return handle.alive and not handle.asleep and self._owner.status(engine) is Status.RESIDENT

    # --- up and down -----------------------------------------------------------------------------------------------

    def activate(self, command: Activate) -> None:
        engine = command.engine
        self._places.settle(engine, command.model, command.gpus)
        self._desk.open(engine)
        now = self._owner.now()
        wait_s = self._backoff.wait_s(self._places.place(engine), now)
        if command.model in self._stopped:
            self._delayed[engine] = _Delayed(command, math.inf)
        elif wait_s > 0:
            self._delayed[engine] = _Delayed(command, now + wait_s)
            if wait_s > _PATIENCE_S:
                self._turn_away(command.model)
        else:
            self._wake(command)

    def look(self, silent_s: float) -> None:
        """What changes without an event; the driver asks at each of its looks."""
        self.wake_delayed()
        self.watch(silent_s)
        self.tell_memory()

    def tell_memory(self) -> None:
        """Tell the core how many tokens the memory of each engine holds, where that changed: weights came or went."""
        known, self._kv_tokens = self._kv_tokens, self._places.kv_tokens()
        if changed := {engine: held for engine, held in self._kv_tokens.items() if known.get(engine) != held}:
            self._owner.tell(EnginesResized(changed))

    def wake_delayed(self) -> None:
        """Wake engines whose back-off has ended."""
        for engine, delayed in list(self._delayed.items()):
            if self._owner.now() >= delayed.due_s:
                del self._delayed[engine]
                self._wake(delayed.command)

    def _wake(self, command: Activate) -> None:
        engine, model = command.engine, command.model
        again = not self._places.handle(engine).alive

        def done(seconds: float, problem: BaseException | None) -> None:
            facts: dict[str, object] = {"engine": engine, "model": model, "took_s": seconds, "again": again}
            with self._owner.locked():
                if self._owner.status(engine) is None:
                    return  # it was put to sleep or removed meanwhile
                if problem is None:
                    self._up(engine, model, facts)
                else:
                    self._stays_down(engine, model, facts | {"reason": str(problem)})

        self._places.wake(engine, done)

    def _up(self, engine: int, model: str, facts: dict[str, object]) -> None:
        self._owner.incident("activated", facts)
        now = self._owner.now()
        self._backoff.up(self._places.place(engine), now)
        self._down_s[model] += now - self._down_since_s.pop(model, now)
        self._gone.discard(model)
        self.tell_memory()
        self._owner.tell(EngineReady(engine))
        self._owner.consult(engine)

    def _stays_down(self, engine: int, model: str, facts: dict[str, object]) -> None:
        self._owner.incident("activation failed", facts)
        dead = not self._places.handle(engine).alive
        self._backoff.down(self._places.place(engine), self._owner.now())
        self._desk.close(engine)
        self._places.leave(engine)
        if dead:
            self._note_down(model)
            self._turn_away(model)
        self._owner.tell(EngineFailed(engine))

    def _note_down(self, model: str) -> None:
        if self._condition(model) != "ready":
            self._down_since_s.setdefault(model, self._owner.now())

    def _turn_away(self, model: str) -> None:
        """No engine serves the model for a while. Waiting requests are told now, not at their deadlines."""
        if self._condition(model) == "ready":
            return
        self._gone.add(model)
        health = self.health(model)
        if health.condition != "down":  # another engine of it starts
            return
        for job in self._desk.all():
            if job.model == model and job.engine is None:
                self._owner.give_up(job, model_down(model, health, started=bool(job.generated)))

    def died(self, engine: int, reason: str, *, crashed: bool) -> None:
        """Its requests go on at another engine once, from their last token. The ones that cannot, or may have caused the
        death, fail."""
        model = self._places.handle(engine).config.name
        facts: dict[str, object] = {"engine": engine, "model": model, "gpu": self._places.gpu_of(engine)}
        self._owner.incident("engine died", facts | {"reason": reason, "crashed": crashed})
        self._backoff.down(self._places.place(engine), self._owner.now())
        lost = self._desk.close(engine)
        self._leaving.discard(engine)
        self._delayed.pop(engine, None)
        self._places.leave(engine)
        self._note_down(model)
        self._owner.tell(EngineFailed(engine))
        for job in lost:
            if crashed and job.unproven:
                problem = f"the engine failed with this request or one beside it: {reason}"
                self._owner.give_up(job, End("failed", "engine_error", problem))
            else:
                self._owner.send_again(job, reason)

    # --- asleep by hand --------------------------------------------------------------------------------------------

    def stop(self, model: str) -> None:
        """Put the model to sleep when its last request ends; new ones are refused. Raises ValueError for one that was removed,
        and where weights cannot leave their memory."""
        if model not in self._down_s:
            raise ValueError(f"model {model} was removed")
        if not all(host.config.weights_in_region for host in self._places.hosts.values()):
            raise ValueError("models can be put to sleep only where runtime.weights_in_region is true")
        self._stopped.add(model)
        self.sleep_if_stopped(model)

    def resume(self, model: str) -> None:
        """Wake it, now where the system keeps it resident, else with its next request."""
        self._stopped.discard(model)
        for delayed in self._delayed.values():
            if delayed.command.model == model:
                delayed.due_s = 0.0
        self.wake_delayed()

    def sleep_if_stopped(self, model: str) -> None:
        """The core takes the engine for lost and asks for another, which waits until the model is resumed."""
        if model not in self._stopped or self._desk.of(model):
            return
        for engine in self._places.engines():
            handle = self._places.handle(engine)
            if handle.config.name == model and handle.alive and not handle.asleep and engine not in self._delayed:
                self._desk.close(engine)
                self._sleep(engine, drained=False)
                self._owner.tell(EngineFailed(engine))

    # --- the core's evictions --------------------------------------------------------------------------------------

    def evict(self, command: Evict) -> None:
        engine = command.engine
        if self._delayed.pop(engine, None) is not None:
            self._places.leave(engine)
            return
        if command.drain:
            self._leaving.add(engine)
            self.sleep_if_drained(engine)
            return
        again = self._desk.close(engine)
        for job in again:
            self._places.handle(engine).abort(job.id)
        self._sleep(engine, drained=False)
        for job in again:
            self._owner.arrive(job, again=True)

    def sleep_if_drained(self, engine: int) -> None:
        if engine in self._leaving and not self._desk.on(engine):
            self._leaving.discard(engine)
            self._desk.close(engine)
            self._sleep(engine, drained=True)

    def _sleep(self, engine: int, *, drained: bool) -> None:
        def done(seconds: float, problem: BaseException | None) -> None:
            with self._owner.locked():
                facts: dict[str, object] = {"engine": engine, "took_s": seconds, "problem": problem and str(problem)}
                self._owner.incident("evicted", facts)
                if drained:
                    self._owner.tell(EngineDrained(engine))

        self._places.sleep(engine, done)
        self._places.leave(engine)

    # --- the watch -------------------------------------------------------------------------------------------------

    def watch(self, silent_s: float) -> None:
        """End one engine of a device that gave no sign of life for ``silent_s``, or that holds up the others. They may have
        waited for its lock, so they get another chance."""
        for gpu, host in self._places.hosts.items():
            silent = {local: each.silent_s for local, each in host.engines.items() if each.alive}
            stuck = self._stuck(gpu, host, silent)
            hung = sorted(
                (each for each in silent if silent[each] > silent_s or each in stuck), key=lambda each: -silent[each]
            )
            if not hung or self._killed_s.get(gpu, -math.inf) > self._owner.now():
                continue
            reason = f"no sign of life for {silent[hung[0]]:.0f} s"
            for local in hung:
                self._owner.incident(
                    "engine hung", {"gpu": gpu, "model": host.engines[local].config.name, "reason": reason}
                )
            self._killed_s[gpu] = self._owner.now() + silent_s
            Thread(target=host.end_hung, args=(hung, reason), name="killer", daemon=True).start()

    def _stuck(self, gpu: int, host: EngineHost, silent: Mapping[int, float]) -> set[int]:
        """Engines that stopped while they held the lock of the region: seen with it at each look for ``_LOCK_S``."""
        now = self._owner.now()
        holders = {local for local, for_s in silent.items() if for_s > _LOCK_S and host.holds_up(local)}
        others = {place: held for place, held in self._held_s.items() if place[0] != gpu}
        here = {(gpu, local): self._held_s.get((gpu, local), now) for local in holders}
        self._held_s = others | here
        return {local for (_, local), since_s in here.items() if now - since_s >= _LOCK_S}


def model_down(model: str, health: Health, *, started: bool) -> End:
    """The end of a request whose model is down."""
    problem = f"model {model} is down; it starts again in about {health.retry_after_s:.0f} s"
    return End("failed" if started else "refused", "model_down", problem, health.retry_after_s)
