"""The controller of one model on many instances, which serve alone or as stages of a pipeline.

It owns which engine runs on which instances, and the requests that wait because no engine serves. A request goes at once to
the engine that the dispatch policy chooses, and waits in that engine's own queue. At ticks the policies look at everything:
requests migrate between engines (Llumnix), engines merge and split (KunServe), spare instances start.

    SERVING --merge--> CHANGING --LayersDropped--> a pipeline SERVING
                                --LayersKept-----> SERVING, as before
    a pipeline SERVING --split--> RESTORING --LayersRestored--> DRAINING --EngineDrained--> gone; successors SERVING

Invariant: an instance belongs to one engine, except while engines change. Then the old and the new ones are *tied*, and the
new ones are gone if the old one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.policy import commands, events
from fineserve_sim.policy.commands import Command
from fineserve_sim.policy.controller import Controller, check_state
from fineserve_sim.policy.groups.dispatch import DispatchPolicy, GroupEngine, LlumnixMigration, Phase
from fineserve_sim.policy.groups.drop_plan import DropPlan, Group, KunServeDrop, ScaleOut, even_split, pipeline_layout
from fineserve_sim.policy.groups.roles import Roles, decode_router
from fineserve_sim.policy.interfaces import EngineLoad, Request

TICK_S = 0.1
"""Seconds between two looks at everything."""


@dataclass(frozen=True, slots=True)
class GroupModel:
    """The controller's knowledge of the model.

    ``max_tokens`` bounds a sequence. ``holds_tokens(instances)`` are the tokens that an engine over these can hold, until
    ``EnginesResized`` says otherwise.
    """

    id: str
    layers: int
    max_tokens: int
    block_tokens: int
    holds_tokens: Callable[[tuple[int, ...]], int]


class GroupController(Controller):
    """Dispatches requests to engines, and merges, splits and starts engines.

    ``instances`` are the GPUs of each instance. The first ones serve from the start, as engines 0, 1, ... of ``stages``
    instances each. The last ``spares`` serve only when ``scale_out`` asks for them. With ``roles``, ``dispatch`` chooses among
    the engines that prefill, and a prefilled request goes to the decoding engine with the most free KV memory.
    """

    stays = "engines of one model queue their requests themselves"

    def __init__(
        self,
        model: GroupModel,
        instances: Sequence[tuple[int, ...]],
        dispatch: DispatchPolicy,
        *,
        drop: KunServeDrop | None,
        migration: LlumnixMigration | None,
        scale_out: ScaleOut | None,
        stages: int,
        spares: int,
        roles: Roles | None = None,
    ) -> None:
        super().__init__({model.id: ()})
        self._model, self._gpus = model, tuple(instances)
        self.max_tokens = model.max_tokens
        self._dispatcher, self._decoders, self._roles = dispatch, decode_router(), roles
        self._prefilled: list[events.PrefillEnded] = []  # requests that no engine takes over now
        self._drop, self._migration, self._scale_out = drop, migration, scale_out
        self.needs_loads = dispatch.needs_loads or roles is not None
        if drop or migration or scale_out:
            self.next_tick_s = 0.0
        self._ticks = 0
        self._engines: dict[int, GroupEngine] = {}
        self._given = 0  # ids of engines so far; ids are never used again
        # By engine that changes: the engines it is made of, or splits into. Empty once all of them serve or are gone.
        self._tied: dict[int, tuple[int, ...]] = {}
        self._moving: dict[int, commands.Migrate] = {}  # by request, until ``MigrationEnded``
        self._held: list[Request] = []  # requests that no engine takes now, in the order of arrival
        serving = len(instances) - spares
        self._spares = list(range(serving, len(instances)))
        for first in range(0, serving, stages):
            self._add(tuple(range(first, first + stages)), Phase.SERVING)
        self._handlers = {
            events.RequestArrived: self._arrive,
            events.RequestReturned: lambda event: self._dispatch(self._expected(event)),
            events.RequestAborted: self._abort,
            events.Loads: lambda event: self._note(event.loads),
            events.Tick: self._tick,
            events.EnginesResized: self._resize,
            events.EngineReady: lambda event: self._serve(self._told_of(event.engine, Phase.LOADING)),
            events.LayersDropped: self._dropped,
            events.LayersKept: self._kept,
            events.LayersRestored: self._restored,
            events.EngineDrained: self._drained,
            events.EngineFailed: self._failed,
            events.GpusRepaired: self._repaired,
            events.PrefillEnded: self._prefill_ended,
            events.MigrationEnded: self._moved,
        }

    def _arrive(self, event: events.RequestArrived | events.RequestReturned) -> list[Command]:
        request, longest = self._expected(event), self.max_tokens
        if request.prompt_tokens >= longest:
            reason = f"prompt of {request.prompt_tokens} tokens; the longest that fits has {longest - 1}"
            return [commands.Reject(request.id, reason)]
        return self._dispatch(request)

    def _dispatch(self, request: Request) -> list[Command]:
        id = self._dispatcher.choose()
        if id is not None and request.prompt_tokens >= self._engines[id].holds_tokens:  # then the first that holds it
            others = self._able(self._dispatcher, request.prompt_tokens)
            id = next((engine.id for engine in others if engine.takes_requests), None)
        if id is not None:
            self._promise(id, request.prompt_tokens)
            return [commands.Dispatch(request.id, id)]
        able = next(self._able(self._dispatcher, request.prompt_tokens), None)
        if able is None and next(self._able(self._dispatcher, -1), None) is not None:
            return [commands.Drop(request.id, "no instance that is left can hold it")]
        self._held.append(request)
        return []

    def _promise(self, id: int, tokens: int) -> None:
        """Add a dispatched prompt to the load of an engine, until the controller is told that load again."""
        self._note({id: self._engines[id].promised(tokens, self._model.block_tokens)})

    def _able(self, router: DispatchPolicy, tokens: int) -> Iterator[GroupEngine]:
        """The engines of this router that can hold so many tokens and more."""
        return (
            engine
            for engine in self._engines.values()
            if tokens < engine.holds_tokens and self._router(engine) is router
        )

    def _router(self, engine: GroupEngine) -> DispatchPolicy:
        """The policy that chooses among engines like this one."""
        return self._dispatcher if self._roles is None or self._roles.prefills(engine) else self._decoders

    def _prefill_ended(self, event: events.PrefillEnded) -> list[Command]:
        if event.request_id in self._moving or any(event.request_id == held.request_id for held in self._prefilled):
            raise ValueError(f"request {event.request_id} is prefilled already: that cannot be")
        source = self._told_of(event.engine)
        if self._roles is None or (source is not None and not self._roles.prefills(source)):
            raise ValueError(f"a prefill ends at engine {event.engine}, which decodes: that cannot be")
        return [] if source is None else self._hand_over(event)

    def _hand_over(self, prefilled: events.PrefillEnded) -> list[Command]:
        id = self._decoders.choose()
        if id is not None and prefilled.tokens >= self._engines[id].holds_tokens:
            id = next((engine.id for engine in self._able(self._decoders, prefilled.tokens)), None)
        if id is None:
            self._prefilled.append(prefilled)
            return []
        self._promise(id, prefilled.tokens)
        move = self._moving[prefilled.request_id] = commands.Migrate(prefilled.request_id, prefilled.engine, id)
        return [move]

    def _longest(self, engine: int) -> int:
        """Tokens of the longest sequence that an engine holds: a request moves only where it may become as long."""
        return min(self.max_tokens, self._engines[engine].holds_tokens)

    def _release_held(self) -> list[Command]:
        held, self._held = self._held, []
        prefilled, self._prefilled = self._prefilled, []
        again = [command for request in prefilled for command in self._hand_over(request)]
        return again + [command for request in held for command in self._dispatch(request)]

    def _abort(self, event: events.RequestAborted) -> list[Command]:
        self._held = [request for request in self._held if request.id != event.request_id]
        return []

    def _note(self, loads: Mapping[int, EngineLoad]) -> list[Command]:
        for id, load in loads.items():
            engine = self._engines.get(id) or self._told_of(id)
            if engine is not None:
                engine.load = load
                if engine.takes_requests:
                    router = self._dispatcher if self._roles is None else self._router(engine)
                    router.offer(engine)
        return []

    def _resize(self, event: events.EnginesResized) -> list[Command]:
        for id, tokens in event.kv_tokens.items():
            if engine := self._told_of(id):
                engine.holds_tokens = tokens
        return []

    def phase(self, engine: int) -> Phase | None:
        """The phase of an engine; None for one that is gone or never was."""
        found = self._engines.get(engine)
        return found.phase if found else None

    def _told_of(self, id: int, *phases: Phase) -> GroupEngine | None:
        """The engine that an event names; None if it is gone. ValueError if it never was, or is in no such phase."""
        engine = self._engines.get(id)
        check_state(id, engine.phase if engine else None, phases, self._given)
        return engine

    def _add(self, instances: tuple[int, ...], phase: Phase) -> int:
        id, self._given = self._given, self._given + 1
        self._engines[id] = GroupEngine(id, instances, phase, EngineLoad(0, 0), self._model.holds_tokens(instances))
        self._enter(id, phase)
        return id

    def _enter(self, id: int, phase: Phase) -> None:
        engine = self._engines[id]
        engine.phase = phase
        if engine.takes_requests:
            self._router(engine).offer(engine)
        else:
            self._router(engine).withdraw(id)

    def _serve(self, engine: GroupEngine | None) -> list[Command]:
        if engine is None:
            return []
        self._enter(engine.id, Phase.SERVING)
        return self._release_held()

    def _remove(self, id: int) -> None:
        if (engine := self._engines.pop(id, None)) is not None:
            self._router(engine).withdraw(id)
            self._prefilled = [held for held in self._prefilled if held.engine != id]
            self._remove_tied(id)

    def _remove_tied(self, id: int) -> None:
        """The engines that it was made of are gone with it, or it is not to split any more."""
        for other in self._tied.pop(id, ()):
            self._remove(other)

    def _drained(self, event: events.EngineDrained) -> list[Command]:
        if self._told_of(event.engine, Phase.DRAINING):
            self._remove(event.engine)
        return []

    def _merged(self, id: int) -> GroupEngine | None:
        """The pipeline to come that an event names, None if it is gone."""
        merged = self._told_of(id, Phase.CHANGING)
        if merged and id not in self._tied:
            raise ValueError(f"engine {id} is to be merged: it is not what others merge into")
        return merged

    def _dropped(self, event: events.LayersDropped) -> list[Command]:
        merged = self._merged(event.engine)
        self._remove_tied(event.engine)
        return self._serve(merged)

    def _kept(self, event: events.LayersKept) -> list[Command]:
        self._merged(event.engine)
        for source in self._tied.pop(event.engine, ()):
            if source in self._engines:
                self._enter(source, Phase.SERVING)
        self._remove(event.engine)
        return self._release_held()

    def _restored(self, event: events.LayersRestored) -> list[Command]:
        if self._told_of(event.engine, Phase.RESTORING):
            self._enter(event.engine, Phase.DRAINING)
            for successor in self._tied.pop(event.engine):
                self._enter(successor, Phase.SERVING)
        return self._release_held()

    def _repaired(self, event: events.GpusRepaired) -> list[Command]:
        engines = self._engines.values()
        used = {*self._spares, *(instance for engine in engines for instance in engine.instances)}
        repaired = [number for number, gpus in enumerate(self._gpus) if gpus == event.gpus and number not in used]
        if not repaired:
            raise ValueError(f"GPUs {event.gpus} are repaired, but no instance on them had failed")
        return self._activate(repaired)

    def _failed(self, event: events.EngineFailed) -> list[Command]:
        failed = self._told_of(event.engine)
        if failed is None:
            return []
        self._remove(event.engine)
        used = {instance for engine in self._engines.values() for instance in engine.instances}
        left = {number for number in failed.instances if not set(self._gpus[number]) & set(event.lost)}
        return self._activate(sorted(left - used))

    def _activate(self, instances: Iterable[int]) -> list[Command]:
        """These instances load their missing weights, each to serve alone."""
        model = self._model.id
        return [
            commands.Activate(self._add((number,), Phase.LOADING), model, self._gpus[number]) for number in instances
        ]

    def _tick(self, event: events.Tick) -> list[Command]:
        if self._now >= self.next_tick_s:
            self._ticks += 1
            self.next_tick_s = self._ticks * TICK_S
        self._note(event.loads)
        answer: list[Command] = []
        if self._migration is not None:
            busy = {engine for move in self._moving.values() for engine in (move.source, move.destination)}
            moves = self._migration.tick([engine for engine in self._loaded() if engine.id not in busy])
            moves = [move for move in moves if self._longest(move.destination) >= self._longest(move.source)]
            self._moving |= {move.request_id: move for move in moves}
            answer += moves
        if self._drop is not None:
            found = self._drop.tick(self._loaded())
            if isinstance(found, DropPlan):
                answer += [self._merge(group, found) for group in found.merged]
            else:
                answer += [self._split(id) for id in found]
        if self._scale_out is not None and self._spares and self._scale_out.tick(self._now, self._loaded()):
            answer += self._activate([self._spares.pop(0)])
        return answer

    def _loaded(self) -> list[GroupEngine]:
        return [engine for engine in self._engines.values() if engine.phase is not Phase.LOADING]

    def _moved(self, event: events.MigrationEnded) -> list[Command]:
        if self._moving.pop(event.request_id, None) is None:
            raise ValueError(f"request {event.request_id} was not to migrate")
        return []

    def _merge(self, group: Group, plan: DropPlan) -> Command:
        sources = [
            engine for engine in self._engines.values() if engine.takes_requests and set(engine.instances) <= set(group)
        ]
        layers = self._model.layers
        held: dict[int, range] = {}
        for source in sources:
            held |= zip(source.instances, even_split(layers, len(source.instances)), strict=True)
        merged = self._add(tuple(pipeline_layout(held, layers)), Phase.CHANGING)
        for source in sources:
            self._remove_tied(source.id)
            self._enter(source.id, Phase.CHANGING)
        self._tied[merged] = tuple(source.id for source in sources)
        return commands.DropLayers(merged, self._tied[merged], plan.freed_bytes, plan.sufficient)

    def _split(self, id: int) -> Command:
        instances = self._engines[id].instances
        into = tuple(self._add((instance,), Phase.LOADING) for instance in instances)
        self._tied[id] = into
        self._enter(id, Phase.RESTORING)
        return commands.RestoreLayers(id, into, tuple(self._gpus[instance] for instance in instances))
