"""The controller of one model on many instances, which may serve alone or as stages of a pipeline.

It owns which engine runs on which instances, and what waits because none serves. Each request goes to the engine that the
dispatch policy chooses, at once; there it waits in the engine's own queue. At ticks the policies look at everything: requests
migrate between engines (Llumnix), engines merge and split (KunServe), spare instances start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.policy import commands, events
from fineserve_sim.policy.commands import Command
from fineserve_sim.policy.controller import Controller
from fineserve_sim.policy.groups.dispatch import DispatchPolicy
from fineserve_sim.policy.groups.drop_plan import even_split, pipeline_layout
from fineserve_sim.policy.groups.migration import LlumnixMigration
from fineserve_sim.policy.groups.throttle import KunServeDrop, Merge, ScaleOut, Split
from fineserve_sim.policy.groups.view import GroupView, Phase
from fineserve_sim.policy.interfaces import EngineLoad, Request

NEVER = float("inf")

TICK_S = 0.1
"""Between looks at everything, in seconds."""

UNKNOWN = EngineLoad(0, 0)


@dataclass(frozen=True, slots=True)
class GroupModel:
    """What the controller knows of the model. ``max_tokens`` bounds a sequence; ``holds_tokens(n)``: what an engine over n
    instances can hold; ``block_bytes`` of KV over all layers, ``base_bytes`` of KV memory on an instance with all weights."""

    id: str
    layers: int
    max_tokens: int
    block_tokens: int
    block_bytes: int
    base_bytes: int
    holds_tokens: Callable[[int], int]


@dataclass(slots=True)
class _Engine:
    """``instances`` in the order of stages."""

    instances: tuple[int, ...]
    phase: Phase
    load: EngineLoad = UNKNOWN


class GroupController(Controller):
    """``instances`` are GPUs by number of the instance; the first ones serve from the start as engines 0, 1, ... of ``stages``
    each, the last ``spares`` only when asked for. Drop, migration and scale-out look at everything at ticks."""

    stays = "engines of one model queue their requests themselves"

    def __init__(
        self,
        model: GroupModel,
        instances: Sequence[tuple[int, ...]],
        dispatch: DispatchPolicy,
        *,
        drop: KunServeDrop | None = None,
        migration: LlumnixMigration | None = None,
        scale_out: ScaleOut | None = None,
        stages: int = 1,
        spares: int = 0,
    ) -> None:
        super().__init__({})
        self._model, self._gpus = model, tuple(instances)
        self.max_tokens = model.max_tokens
        self._dispatcher = dispatch
        self._drop, self._migration, self._scale_out = drop, migration, scale_out
        self.needs_loads = dispatch.needs_loads
        self.next_tick_s = 0.0 if drop or migration or scale_out else NEVER
        self._ticks = 0
        self._engines: dict[int, _Engine] = {}
        self._merging: dict[int, tuple[int, ...]] = {}  # engines that stop, by the one to be
        self._splitting: dict[int, tuple[int, ...]] = {}  # its successors, by the engine that gets its layers back
        self._moving: dict[int, tuple[int, int]] = {}  # source and destination by request
        self._held: list[Request] = []
        self._next_engine = 0
        serving = len(instances) - spares
        self._spares = list(range(serving, len(instances)))
        for first in range(0, serving, stages):
            self._add(tuple(range(first, first + stages)), Phase.SERVING)
        self._handlers = {
            events.RequestArrived: self._arrive,
            events.RequestReturned: lambda event: self._dispatch(event.request),
            events.RequestAborted: self._abort,
            events.Loads: lambda event: self._note(event.loads),
            events.Tick: self._tick,
            events.EngineReady: lambda event: self._serve(event.engine),
            events.LayersDropped: self._dropped,
            events.LayersKept: self._kept,
            events.LayersRestored: self._restored,
            events.EngineDrained: lambda event: self._remove(event.engine),
            events.EngineFailed: self._failed,
            events.GpusRepaired: lambda event: self._activate([self._gpus.index(event.gpus)]),
            events.MigrationEnded: lambda event: self._moved(event.request_id),
        }

    # --- requests --------------------------------------------------------------------------------------------------

    def _arrive(self, event: events.RequestArrived | events.RequestReturned) -> list[Command]:
        request, longest = event.request, self._model.max_tokens
        if request.prompt_tokens >= longest:
            reason = f"prompt of {request.prompt_tokens} tokens; the longest that fits has {longest - 1}"
            return [commands.Reject(request.id, reason)]
        return self._dispatch(request)

    def _dispatch(self, request: Request) -> list[Command]:
        engine = self._dispatcher.choose()
        if engine is not None and not self._holds(self._engines[engine], request):
            engine = self._able(request)
        if engine is None:
            if self._engines and not any(self._holds(other, request) for other in self._engines.values()):
                return [commands.Drop(request.id, "no instance that is left can hold it")]
            self._held.append(request)
            return []
        self._expect(engine, request)
        return [commands.Dispatch(request.id, engine)]

    def _holds(self, engine: _Engine, request: Request) -> bool:
        return request.prompt_tokens < self._model.holds_tokens(len(engine.instances))

    def _able(self, request: Request) -> int | None:
        """The first engine that can hold a request too long for the one whose turn it was."""
        able = (
            id for id, engine in self._engines.items() if engine.phase.takes_requests and self._holds(engine, request)
        )
        return min(able, default=None)

    def _expect(self, engine: int, request: Request) -> None:
        """Until its load is told again, the engine counts what it was just given."""
        here = self._engines[engine]
        blocks = -(-request.prompt_tokens // self._model.block_tokens) + 1
        head_blocks = max(here.load.head_blocks, 0 if here.load.queued_blocks else blocks)
        load = here.load._replace(queued_blocks=here.load.queued_blocks + blocks, head_blocks=head_blocks)
        self._note({engine: load})

    def _release_held(self) -> list[Command]:
        held, self._held = self._held, []
        return [command for request in held for command in self._dispatch(request)]

    def _abort(self, event: events.RequestAborted) -> list[Command]:
        self._held = [request for request in self._held if request.id != event.request_id]
        return []

    # --- engines ---------------------------------------------------------------------------------------------------

    def _note(self, loads: Mapping[int, EngineLoad]) -> list[Command]:
        for id, load in loads.items():
            engine = self._engines.get(id)
            if engine is not None:
                engine.load = load
                if engine.phase.takes_requests:
                    self._dispatcher.offer(id, len(engine.instances), load)
        return []

    def _add(self, instances: tuple[int, ...], phase: Phase) -> int:
        id = self._next_engine
        self._next_engine += 1
        self._engines[id] = _Engine(instances, phase)
        self._enter(id, phase)
        return id

    def _enter(self, id: int, phase: Phase) -> None:
        engine = self._engines[id]
        engine.phase = phase
        if engine.phase.takes_requests:
            self._dispatcher.offer(id, len(engine.instances), engine.load)
        else:
            self._dispatcher.withdraw(id)

    def _serve(self, id: int) -> list[Command]:
        if id not in self._engines:
            return []
        self._enter(id, Phase.SERVING)
        return self._release_held()

    def _remove(self, id: int) -> list[Command]:
        if self._engines.pop(id, None) is not None:
            self._dispatcher.withdraw(id)
            self._end_split(id)
        return []

    def _end_split(self, id: int) -> None:
        """Its layers do not come back, if they were to."""
        for successor in self._splitting.pop(id, ()):
            self._remove(successor)

    def _dropped(self, event: events.LayersDropped) -> list[Command]:
        for source in self._merging.pop(event.engine, ()):
            self._remove(source)
        return self._serve(event.engine)

    def _kept(self, event: events.LayersKept) -> list[Command]:
        for source in self._merging.pop(event.engine, ()):
            if source in self._engines:
                self._enter(source, Phase.SERVING)
        return self._remove(event.engine) or self._release_held()

    def _restored(self, event: events.LayersRestored) -> list[Command]:
        self._enter(event.engine, Phase.DRAINING)
        for successor in self._splitting.pop(event.engine):
            self._enter(successor, Phase.SERVING)
        return self._release_held()

    def _failed(self, event: events.EngineFailed) -> list[Command]:
        failed = self._engines.get(event.engine)
        if failed is None:
            return []
        self._remove(event.engine)
        used = {instance for engine in self._engines.values() for instance in engine.instances}
        left = [number for number in failed.instances if not set(self._gpus[number]) & set(event.lost)]
        return self._activate(sorted(set(left) - used))

    def _activate(self, instances: Iterable[int]) -> list[Command]:
        """These instances load what they miss, each to serve alone."""
        model = self._model.id
        return [
            commands.Activate(self._add((number,), Phase.LOADING), model, self._gpus[number]) for number in instances
        ]

    # --- looks at everything ---------------------------------------------------------------------------------------

    def _tick(self, event: events.Tick) -> list[Command]:
        if self._now >= self.next_tick_s:
            self._ticks += 1
            self.next_tick_s = self._ticks * TICK_S
        self._note(event.loads)
        answer: list[Command] = []
        if self._migration is not None:
            answer += self._migrate(self._migration)
        if self._drop is not None:
            answer += [
                self._merge(action) if isinstance(action, Merge) else self._split(action)
                for action in self._drop.tick(self._views())
            ]
        if self._scale_out is not None and self._spares and self._scale_out.tick(self._now, self._views()):
            answer += self._activate([self._spares.pop(0)])
        return answer

    def _views(self) -> list[GroupView]:
        model = self._model
        return [
            GroupView(
                id,
                tuple(sorted(engine.instances)),
                engine.phase,
                engine.load,
                engine.load.used_blocks * model.block_bytes,
                len(engine.instances) * model.base_bytes,
            )
            for id, engine in self._engines.items()
            if engine.phase is not Phase.LOADING
        ]

    def _migrate(self, policy: LlumnixMigration) -> list[Command]:
        busy = {engine for pair in self._moving.values() for engine in pair}
        moves = policy.tick([view for view in self._views() if view.engine not in busy])
        self._moving |= {move.request_id: (move.source, move.destination) for move in moves}
        return list[Command](moves)

    def _moved(self, request_id: int) -> list[Command]:
        self._moving.pop(request_id, None)
        return []

    def _merge(self, action: Merge) -> Command:
        target = set(action.instances)
        sources = tuple(
            id
            for id, engine in self._engines.items()
            if engine.phase.takes_requests and set(engine.instances) <= target
        )
        merged = self._add(self._in_order(sources), Phase.CHANGING)
        self._merging[merged] = sources
        for source in sources:
            self._end_split(source)
            self._enter(source, Phase.CHANGING)
        return commands.DropLayers(merged, sources, action.freed_bytes, action.sufficient)

    def _in_order(self, sources: Iterable[int]) -> tuple[int, ...]:
        """The instances of these engines as the stages of one."""
        held: dict[int, range] = {}
        for source in sources:
            instances = self._engines[source].instances
            held |= zip(instances, even_split(self._model.layers, len(instances)), strict=True)
        return tuple(pipeline_layout(held, self._model.layers))

    def _split(self, action: Split) -> Command:
        instances = self._engines[action.engine].instances
        into = tuple(self._add((instance,), Phase.LOADING) for instance in instances)
        self._splitting[action.engine] = into
        self._enter(action.engine, Phase.RESTORING)
        return commands.RestoreLayers(action.engine, into, tuple(self._gpus[instance] for instance in instances))
