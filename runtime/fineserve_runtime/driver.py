"""The driver of real engines: it tells events to the core, and carries out the core's commands.

It takes no decision of its own. One lock guards the core and all requests. News comes from an engine at the end of its step, a
client, the clock or a device thread. Its thread takes the lock, tells the core, carries out the commands and leaves. An
engine's step report is the boundary between two iterations at which its scheduler may start requests.

A request with a TTFT limit of its own enters the core with the arrival time that gives it its deadline: the core's
deadline is arrival + SLO of the model.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

from fineserve_runtime.alarm import Alarm
from fineserve_runtime.bounds import Bounds, Deadlines, Pace
from fineserve_runtime.core import Core, CoreSpec, ModelAdded, ModelFacts, ModelRemoved, RuntimeEvent, StepMeasured
from fineserve_runtime.decisions import Decisions, Log
from fineserve_runtime.desk import Desk
from fineserve_runtime.engines.api import EngineDied, EngineHost, StepReport, TokenChunk
from fineserve_runtime.jobs import End, Handover, Job, Observer, Refused, finish_end
from fineserve_runtime.listener import HostListener
from fineserve_runtime.lives import EngineLives, Health, model_down
from fineserve_runtime.moves import Moves
from fineserve_runtime.places import Place, Places
from fineserve_runtime.regroup import Regrouping
from fineserve_sim.policy.commands import (
    Activate,
    Command,
    Dispatch,
    Drop,
    DropLayers,
    Evict,
    Migrate,
    Reject,
    RestoreLayers,
    Survey,
)
from fineserve_sim.policy.events import EngineStepped, Loads, RequestAborted, RequestArrived, RequestReturned, Tick
from fineserve_sim.policy.fleet.views import Status
from fineserve_sim.policy.interfaces import EngineLoad, Request

_LOOK_S = 0.1
"""So often the clock looks for who missed a deadline and for engines that hang."""

_LEAST_WAIT_S = 0.001
"""A scheduler that may answer otherwise in an instant is not asked by the clock more often than an engine would ask it."""


class Driver:
    """Engines of ``hosts`` (by GPU id) under the core of ``spec``. The hosts' listeners are ``listener(gpu)``; call
    ``start`` once they run."""

    def __init__(
        self,
        spec: CoreSpec,
        *,
        bounds: Bounds | None = None,
        handover: Handover = "exchange",
        log: Log | None = None,
        observers: Sequence[Observer] = (),
        on_incident: Callable[[str, dict[str, object]], None] = lambda what, facts: None,
    ) -> None:
        self._spec = spec
        self._core = Core(spec)
        self._controller = self._core.controller
        self._slo_s = {model.id: model.slo_s for model in spec.models}
        self._memory = {slot.id: slot.memory_bytes for slot in spec.gpus}
        self._weights = {model.id: model.weight_bytes for model in spec.models}
        self._bounds = bounds or Bounds()
        self._deadlines = Deadlines(spec.scheduler, self._bounds, self._slo_s)
        self.incident = on_incident
        self._decisions = Decisions(log, lambda problem: on_incident("decision log failed", {"reason": repr(problem)}))
        self._places = Places({}, self._on_trouble)  # until ``start``: what engines say before is nobody's
        self._lock = threading.RLock()
        self._empty = threading.Condition(self._lock)
        self._desk = Desk(self._slo_s, observers)
        self._lives: EngineLives
        self._moves: Moves
        self._handover = handover
        self._regrouping = Regrouping(self, self._places, self._desk, handover)
        self._pace: dict[str, Pace] = defaultdict(Pace)
        self._next_id = 0
        self._draining = False
        self._retry_after_s: float | None = None
        self._epoch_s = time.monotonic()
        self._next_look_s = 0.0
        self._decisions.begin(spec)

    # --- life ------------------------------------------------------------------------------------------------------

    def listener(self, gpu: int) -> HostListener:
        return HostListener(self, gpu)

    def start(self, hosts: Mapping[int, EngineHost]) -> None:
        """Start with running engines, and put to sleep the ones that are not resident at first."""
        places = Places(hosts, self._on_trouble)
        for engine, stay in enumerate(self._spec.stays):
            places.settle(engine, stay.model, stay.gpus)
            self._desk.open(engine)
        for gpu, host in hosts.items():
            for local, handle in host.engines.items():
                if places.engine_at(Place(gpu, local)) is None:
                    handle.sleep()
        keeps_resident = self._spec.residency is None
        self._lives = EngineLives(self, places, self._desk, tuple(self._slo_s), keeps_resident=keeps_resident)
        self._epoch_s = time.monotonic()
        self._moves = Moves(self, places, self._desk)
        self._regrouping = Regrouping(self, places, self._desk, self._handover)
        self._alarm = Alarm(self._on_alarm, lambda problem: self._on_trouble(problem, "clock"))
        with self._lock:
            self._places = places
            for engine in places.engines():
                if not places.handle(engine).alive:  # while others started, and nobody heard
                    self._lives.died(engine, "it died before the driver started", crashed=False)
            self._lives.tell_memory()
        self._alarm.set(self._epoch_s)

    def begin_drain(self, patience_s: float | None = None) -> None:
        """Refuse new requests from now on. Present requests go on. Clients are asked to come back after ``patience_s``.
        Takes no lock, since a signal handler may interrupt the thread that holds it."""
        self._retry_after_s = patience_s
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether all requests ended within ``timeout_s``."""
        with self._empty:
            return self._empty.wait_for(lambda: not self._desk, timeout_s)

    def close(self) -> None:
        """End what is left, clearly, and stop. The hosts are their owner's to close."""
        self._alarm.close()
        self._draining = True
        self.end_all()
        self._moves.close()
        self._regrouping.close()
        self._places.close()

    def end_all(self) -> None:
        with self._lock:
            for job in self._desk.all():
                self.give_up(job, End("failed", "shutdown", "the server is shutting down"))

    @property
    def sound(self) -> bool:
        """Whether the process's own threads live, so that no restart of the server is called for. Takes no lock."""
        return self._alarm.alive and all(host.sound for host in self._places.hosts.values())

    def health(self, model: str) -> Health:
        with self._lock:
            return self._lives.health(model)

    def stop(self, model: str) -> None:
        """Put a model to sleep by hand. Raises ValueError as ``EngineLives.stop`` does."""
        with self._lock:
            self._lives.stop(model)

    def resume(self, model: str) -> None:
        with self._lock:
            self._lives.resume(model)

    def add_model(self, facts: ModelFacts, gpu: int | None) -> None:
        """Serve one more model, whose engines run on ``gpu``, or sleep on all devices (None: residency moves models)."""
        with self._lock:
            self._slo_s[facts.id], self._weights[facts.id] = facts.slo_s, facts.weight_bytes
            self._desk.add_model(facts.id)
            self._lives.add_model(facts.id)
            self.tell(ModelAdded(facts, gpu))
            self.tell(self._tick())

    def remove_model(self, model: str, problem: str) -> list[Future[None]]:
        """Serve it no more; its requests end with ``problem``, and its engines by and by. Call ``stop`` before."""
        with self._lock:
            for job in self._desk.of(model):
                self.give_up(job, End("refused", "model_removed", problem))
            self._lives.remove_model(model)
            self.tell(ModelRemoved(model))
            del self._slo_s[model], self._weights[model]
            self._desk.remove_model(model)
            self._pace.pop(model, None)
            return [self._places.remove(gpu, model) for gpu in self._places.hosts]

    def live(self, model: str) -> int:
        with self._lock:
            return len(self._desk.of(model))

    def status(self, engine: int) -> Status | None:
        return self._core.status(engine)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._lock:
            yield

    def untouched(self, model: str) -> int:
        """Requests of the model that have no token yet."""
        return self._desk.untouched(model)

    def now(self) -> float:
        return time.monotonic() - self._epoch_s

    # --- what clients ask ------------------------------------------------------------------------------------------

    def submit(self, make: Callable[[int], Job]) -> Job:
        """Take in the request that ``make`` builds with its id. Its sink hears of everything else, perhaps before this
        returns. Raises Refused when the server drains or the model's queue is full."""
        with self._lock:
            if self._draining:
                raise Refused("draining", "the server is shutting down", self._retry_after_s)
            job = make(self._next_id)
            self._check_room(job.model)
            self._next_id += 1
            job.arrival_s = self.now() - job.waited_s
            job.queued_s = job.due_from_s
            self._desk.take_in(job)
            self.arrive(job)
            return job

    def _check_room(self, model: str) -> None:
        if model not in self._slo_s:
            raise Refused("model_removed", f"model {model} was removed", None)
        health = self._lives.health(model)
        if health.condition == "stopped":
            raise Refused("model_stopped", f"model {model} was put to sleep by an operator", None)
        if health.condition == "down":
            end = model_down(model, health, started=False)
            raise Refused(end.reason, end.message, end.retry_after_s)
        waiting = self._desk.untouched(model)
        if waiting >= self._bounds.queued_requests:
            problem = f"{waiting} requests wait for model {model} already; try again later"
            raise Refused("queue_full", problem, self._pace[model].drained_in_s(waiting, self.now()))

    def abort(self, request_id: int) -> None:
        """The client left. Unknown ids are ignored."""
        with self._lock:
            if (job := self._desk.get(request_id)) is not None:
                self.give_up(job, End("aborted", "abort", "the client left"))

    def complete(self, request_id: int) -> None:
        """End a request whose text reached a stop string. Unknown ids are ignored."""
        with self._lock:
            if (job := self._desk.get(request_id)) is not None:
                self.give_up(job, End("finished", "stop"))

    def arrive(self, job: Job, *, again: bool = False) -> None:
        """Tell the core of a request, be it new or on its way ``again``; with its engine its model may have gone down, and it
        was told so."""
        if self._desk.get(job.id) is None:
            return
        request = Request(job.id, job.model, self._deadlines.core_arrival_s(job), job.tokens)
        if self._controller.needs_loads and (loads := self._places.changed_loads(self._desk.prompts_on)):
            self.tell(Loads(loads))
        self.tell(RequestReturned(request) if again else RequestArrived(request))
        if (engine := self._controller.engine_of(job.id)) is not None and self._places.is_idle(engine):
            self.consult(engine)

    def give_up(self, job: Job, end: End) -> None:
        """Take a request out of wherever it is."""
        self.tell(RequestAborted(job.id))
        if job.engine is not None:
            self._places.handle(job.engine).abort(job.id)
        self._end(job, end)

    def send_again(self, job: Job, reason: str) -> None:
        """Its engine died: another goes on from where it is, once."""
        if job.retried or not job.can_resume:
            self._end(job, End("failed", "engine_died", f"the engine died: {reason}"))
            return
        job.retried = True
        if job.generated:  # who has no token waits for it since he came
            job.queued_s = self.now()
        self.arrive(job, again=True)

    def _end(self, job: Job, end: End) -> None:
        engine = self._desk.end(job, end, self.now())
        if engine is not None:
            self._lives.sleep_if_drained(engine)
        self._lives.sleep_if_stopped(job.model)
        if not self._desk:
            self._empty.notify_all()

    # --- what engines report ---------------------------------------------------------------------------------------

    def stepped(self, gpu: int, report: StepReport) -> None:
        with self._lock:
            engine = self._places.engine_at(Place(gpu, report.engine))
            if engine is None:
                return
            model = self._places.handle(engine).config.name
            for chunk in report.chunks:
                job = self._desk.get(chunk.request_id)
                if job is not None and job.engine == engine:
                    self._emit(job, chunk)
            for request_id in report.preempted:
                self._desk.note_preemption(request_id)
            if report.prefill_tokens:
                self.tell(StepMeasured(model, report.prefill_tokens, report.decodes, report.ended_s - report.started_s))
            if self._places.engine_at(Place(gpu, report.engine)) == engine:  # with its last request it may have left
                self.consult(engine)
            self._consult_others(gpu, engine)

    def _emit(self, job: Job, chunk: TokenChunk) -> None:
        if chunk.token_ids or chunk.vector:
            if job.first_token_s is None:
                self._pace[job.model].note(self.now())
            self._desk.emit(job, chunk, self.now())
        if chunk.finish_reason is not None:
            self._end(job, finish_end(chunk))

    def died(self, gpu: int, local: int, reason: str, *, crashed: bool) -> None:
        with self._lock:
            place = Place(gpu, local)
            if (engine := self._places.engine_at(place)) is not None:
                self._lives.died(engine, reason, crashed=crashed)
            if place.gpu in self._places.hosts:
                self._regrouping.died(place)

    # --- schedulers ------------------------------------------------------------------------------------------------

    def consult(self, engine: int) -> None:
        """The engine stands between two iterations: let its scheduler start requests."""
        if not self._controller.waiting(engine):
            return
        states = self._places.states(self._core.scope_of(engine))
        if engine not in states:
            return
        self.tell(EngineStepped(engine, states))
        self._ask_again(engine)

    def _ask_again(self, engine: int) -> None:
        """Busy engines ask at every step. Where all engines are idle and a request still waits, the clock asks again."""
        states = self._places.states(self._core.scope_of(engine))
        if engine in states and self._controller.waiting(engine) and not any(s.running for s in states.values()):
            at_s = self._controller.unchanged_until(self.now(), engine, states)
            self._alarm.set(self._epoch_s + max(at_s, self.now() + _LEAST_WAIT_S))

    def _consult_others(self, gpu: int, engine: int) -> None:
        """An engine that takes turns with this one is between two steps, too. The step may have freed memory for which an idle
        engine waits."""
        turns = self._places.take_turns(gpu)
        for other in self._places.engines(gpu):
            if other != engine and self._controller.waiting(other) and (turns or self._places.is_idle(other)):
                self.consult(other)

    # --- the clock -------------------------------------------------------------------------------------------------

    def _on_alarm(self) -> None:
        with self._lock:
            if self.now() >= self._next_look_s:
                self._next_look_s = self.now() + _LOOK_S
                self._expire()
                self._lives.look(self._bounds.silent_s)
            if self.now() >= self._controller.next_tick_s:
                self.tell(self._tick())
            for engine in self._places.engines():
                if self._controller.waiting(engine) and self._places.is_idle(engine):
                    self.consult(engine)
            next_s = min(self._controller.next_tick_s, self._next_look_s)
            self._alarm.set(self._epoch_s + max(next_s, self.now() + _LEAST_WAIT_S))

    def _on_trouble(self, problem: Exception, where: str = "device") -> None:
        """The clock goes on after any error at a tick, and so do the threads of devices."""
        self.incident("internal error", {"where": where, "reason": repr(problem)})
        self._alarm.set(time.monotonic() + 1.0)

    def _tick(self) -> Tick:
        ready = [e for e in self._places.engines() if self._core.status(e) in (Status.RESIDENT, Status.DRAINING)]
        free = {gpu: self._places.free_bytes(gpu, self._memory[gpu], self._weights) for gpu in self._memory}
        states = self._places.states(ready)
        loads = self._all_loads() if self._spec.migration or self._spec.drop else {}
        return Tick({engine: state.running for engine, state in states.items() if state.running}, free, loads)

    def _all_loads(self) -> dict[int, EngineLoad]:
        """The loads of all engines, with the request of each that a migration would move."""
        loads = self._places.loads(self._desk.prompts_on)
        for engine in loads:
            shortest = self._desk.shortest_on(engine)
            blocks = -(-shortest.tokens // self._places.handle(engine).config.block_tokens) if shortest else 0
            loads[engine] = loads[engine]._replace(
                stalled=self._regrouping.stalled(engine),
                shortest=shortest.id if shortest else None,
                shortest_blocks=blocks,
            )
        return loads

    def _expire(self) -> None:
        """No request waits for ever: neither for an engine that does not come back, nor in an engine that does not go on."""
        for job in self._desk.all():
            unled = job.engine is None and self._controller.engine_of(job.id) is None
            if (end := self._deadlines.overdue(job, self.now(), unled=unled)) is not None:
                self.give_up(job, end)

    # --- the core --------------------------------------------------------------------------------------------------

    def tell(self, event: RuntimeEvent) -> None:
        """Log the event, let the core decide, log the commands and carry them out."""
        now = self.now()
        commands = self._core.handle(now, event)
        self._decisions.note(now, event, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Dispatch():
                self.hand_over(self._job(command), command.engine)
            case Drop():
                job = self._job(command)
                self._end(job, self._deadlines.missed(job, command.reason))
            case Reject():
                self._end(self._job(command), End("refused", "rejected", command.reason))
            case Survey():
                self.tell(self._tick())
            case Activate():
                self._lives.activate(command)
            case Evict():
                self._lives.evict(command)
            case Migrate():
                self._moves.start(command)
            case DropLayers():
                self._regrouping.drop(command)
            case RestoreLayers():
                self._regrouping.restore(command)

    def _job(self, command: Dispatch | Drop | Reject) -> Job:
        job = self._desk.get(command.request_id)
        assert job is not None, f"{command}: the core decides on a request that has ended"
        return job

    def drain(self, engine: int) -> None:
        self._lives.evict(Evict(engine, drain=True))

    def hand_over(self, job: Job, engine: int) -> None:
        self._desk.attach(job, engine, self.now())
        try:
            self._places.submit(engine, job.submission())
        except EngineDied:
            return  # its death is reported to all of its requests together
        except (ValueError, RuntimeError) as problem:
            self._end(job, End("refused", "rejected", str(problem)))
