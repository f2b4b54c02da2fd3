"""Engines merge into pipelines and split again: where weights and KV go (KunServe, sections 4.1 to 4.4).

Drop: the engines that merge stop after their batches, dropped layers are remapped to KV memory, and the queues join. KV of
layers that now belong to somebody else is sent there (``exchange``); a request stalls until all its own is there, others run.

Restore: the memory that dropping gave is closed to KV, missing layers are pulled from the other instances of the pipeline
at the lowest priority, while it serves. Then every instance takes requests alone, and the pipeline ends what it has.

KV that has to move is charged to its new holders as soon as the engines merge: the receiving side has dropped its layers
by then, and in sum as much leaves as comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from simpy.events import Event as ClockEvent

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.links import Link, Transfer
from fineserve_sim.cluster.engine.pipeline import WEIGHTS, PipelineEngine
from fineserve_sim.cluster.engine.tp_group import TpGroup
from fineserve_sim.cluster.fleet.exchange import Exchange, Report, TransferRules
from fineserve_sim.cluster.host import TIMER, Cluster
from fineserve_sim.policy.commands import DropLayers, RestoreLayers
from fineserve_sim.policy.events import Event, LayersDropped, LayersKept, LayersRestored
from fineserve_sim.policy.groups.drop_plan import even_split, pipeline_layout
from fineserve_sim.policy.memory.preemption import arrival_order

REMAP = order_of(Kind.TIMER, 1 << 18)


class Home(Protocol):
    """The fleet whose engines are regrouped, and whose requests move."""

    cluster: Cluster
    instances: tuple[TpGroup, ...]

    def create(
        self, id: int, members: tuple[TpGroup, ...], layout: tuple[range, ...], *, shared: bool = False
    ) -> Engine: ...
    def remove(self, engine: Engine) -> None: ...
    def drained(self, engine: Engine, now: float) -> None: ...
    def on(self, instances: Sequence[TpGroup]) -> list[Engine]: ...
    def stages_of(self, engine: Engine) -> tuple[TpGroup, ...]: ...


@dataclass(slots=True, eq=False)
class _Merge:
    """A merge under way into engine ``id``: ``running`` sources still have to stop."""

    id: int
    sources: list[Engine]
    running: set[int]


@dataclass(slots=True, eq=False)
class _Restore:
    """Layers on their way back to ``engine``, whose instances then serve as the engines ``into``."""

    engine: PipelineEngine
    into: tuple[int, ...]
    began_s: float
    pulls: list[Transfer] = field(default_factory=list)


class Regrouping:
    """Carries out ``DropLayers`` and ``RestoreLayers``."""

    def __init__(self, home: Home, rules: TransferRules) -> None:
        self._home, self._rules = home, rules
        self._merges: list[_Merge] = []
        self._restores: dict[int, _Restore] = {}
        self._fetching: dict[int, Engine] = {}  # merged engines that miss a layer yet
        self._draining: dict[int, Engine] = {}
        self.report = Report()

    # --- drop ------------------------------------------------------------------------------------------------------

    def drop(self, command: DropLayers, now: float) -> None:
        """Merge these engines, once they have stopped."""
        sources = [self._home.cluster.engines[id] for id in command.engines]
        for engine in sources:
            self._cancel_restore(engine)
        self._merges.append(_Merge(command.engine, sources, {engine.index for engine in sources}))
        for engine in sources:
            self._home.cluster.settle_now(engine, now)
            engine.stop(now)

    def stopped(self, engine: Engine, now: float) -> None:
        """The last batch of an engine that stops has left: when all of a merge have, remap."""
        for merge in self._merges:
            if engine in merge.sources and engine.index in merge.running:
                merge.running.remove(engine.index)
                if not merge.running:
                    self._home.cluster.clock.at(now + self._rules.remap_s, REMAP, partial(self._merge, merge))
                return

    def _merge(self, merge: _Merge, _: ClockEvent) -> None:
        home, cluster = self._home, self._home.cluster
        now: float = cluster.clock.now
        if merge not in self._merges:
            return  # an instance failed meanwhile
        self._merges.remove(merge)
        cluster.settle_all(now, TIMER)
        held = {
            instance.id: layers
            for engine in merge.sources
            for instance, layers in zip(home.stages_of(engine), self._layout_of(engine), strict=True)
        }
        layout = pipeline_layout(held, home.instances[0].sizes.layers)
        members = tuple(home.instances[id] for id in layout)
        self.report.drops.append((now, tuple(sorted(layout))))
        moving = [(sequence, home.stages_of(engine)) for engine in merge.sources for sequence in engine.dissolve()]
        waiting = [sequence for engine in merge.sources for sequence in engine.take_waiting()]
        for engine in merge.sources:
            home.remove(engine)
        missing = {member: frozenset(layout[member.id]) - member.resident for member in members}
        merged = home.create(merge.id, members, tuple(layout.values()), shared=True)
        assert isinstance(merged, PipelineEngine)
        for member in members:
            self._settle_resident(member)
        if any(missing.values()):  # ranges that round to whole layers: nothing runs until the layer is there
            merged.stopping = True
            self._fetching[merged.index] = merged
            self._fetch(missing, held, partial(self._complete, merged))
        Exchange(self._rules, self.report, partial(self._transferred, "KV exchange", merged)).carry_over(
            merged, moving, held, now
        )
        for engine in self._serving():
            waiting += engine.take_waiting()
            cluster.touch(engine)
        if not merged.stopping:
            home.cluster.hear(now, LayersDropped(merged.index))
        cluster.returned(merged, sorted(waiting, key=arrival_order), now)

    def _complete(self, merged: PipelineEngine, now: float) -> None:
        """A merged engine has the last layer that it missed."""
        if self._fetching.pop(merged.index, None) is not None:
            self._home.cluster.order = TIMER
            merged.go_on(now)
            self._home.cluster.hear(now, LayersDropped(merged.index))

    def _layout_of(self, engine: Engine) -> tuple[range, ...]:
        if isinstance(engine, PipelineEngine):
            return engine.layout
        return even_split(self._home.instances[0].sizes.layers, 1)

    # --- restore ---------------------------------------------------------------------------------------------------

    def restore(self, command: RestoreLayers, now: float) -> None:
        """Bring back what the instances of an engine miss; it splits when all has arrived."""
        engine = self._home.cluster.engines[command.engine]
        assert isinstance(engine, PipelineEngine)
        into = dict(zip(command.gpus, command.into, strict=True))
        everything = frozenset(range(engine.stages[0].sizes.layers))
        missing = {stage: everything - stage.resident for stage in engine.stages}
        engine.kv.forget()
        for stage in engine.stages:
            stage.load(everything)
        self._home.cluster.touch(engine)
        restore = _Restore(engine, tuple(into[stage.gpus] for stage in engine.stages), now)
        self._restores[engine.index] = restore
        held = {stage.id: layers for stage, layers in zip(engine.stages, engine.layout, strict=True)}
        restore.pulls = self._fetch(missing, held, partial(self._split, restore))

    def _split(self, restore: _Restore, now: float) -> None:
        engine, home = restore.engine, self._home
        if self._restores.get(engine.index) is not restore:
            return
        del self._restores[engine.index]
        home.cluster.order = TIMER
        self._transferred("restore", engine, restore.began_s, now)
        self.report.restores.append((now, tuple(sorted(engine.columns))))
        waiting = engine.take_waiting()
        engine.closing = True
        self._draining[engine.index] = engine
        for id, stage in zip(restore.into, engine.stages, strict=True):
            home.create(id, (stage,), even_split(stage.sizes.layers, 1), shared=True)
        home.cluster.hear(now, LayersRestored(engine.index))
        home.cluster.returned(engine, waiting, now)
        self._end_if_drained(engine, now)

    def end_drained(self, now: float) -> None:
        """Pipelines whose instances serve alone again end with their last request."""
        for engine in list(self._draining.values()):
            self._end_if_drained(engine, now)

    def _end_if_drained(self, engine: Engine, now: float) -> None:
        if engine.running or engine.busy:
            return
        del self._draining[engine.index]
        stages = self._home.stages_of(engine)
        self._home.drained(engine, now)
        for stage in stages:
            self._settle_resident(stage)

    def _cancel_restore(self, engine: Engine) -> None:
        """What is on its way does not count as resident any more, nor what has come so far."""
        restore = self._restores.pop(engine.index, None)
        if restore is not None:
            for transfer in restore.pulls:
                transfer.cancel()
            for stage in restore.engine.stages:
                self._settle_resident(stage)

    # --- failure ---------------------------------------------------------------------------------------------------

    def forget(self, hit: Sequence[Engine], now: float) -> list[Event]:
        """These engines are lost: merges that they were part of do not happen, and the other sources go on. Returns what
        there is to tell of that once they are gone."""
        kept: list[Event] = []
        for engine in hit:
            self._cancel_restore(engine)
            self._fetching.pop(engine.index, None)
            self._draining.pop(engine.index, None)
        for merge in [merge for merge in self._merges if any(engine in hit for engine in merge.sources)]:
            self._merges.remove(merge)
            kept.append(LayersKept(merge.id))
            for engine in merge.sources:
                if engine not in hit:
                    engine.go_on(now)
        return kept

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _serving(self) -> list[Engine]:
        away = self._draining.keys() | self._fetching.keys()
        return [
            engine for engine in self._home.cluster.engines.values() if not engine.stopping and engine.index not in away
        ]

    def _settle_resident(self, instance: TpGroup) -> None:
        """An instance keeps the layers that its engines run; all others are dropped."""
        needed: set[int] = set()
        for engine in self._home.on([instance]):
            if engine.index in self._restores:
                needed |= set(range(instance.sizes.layers))
            else:
                stage = self._home.stages_of(engine).index(instance)
                needed |= set(self._layout_of(engine)[stage])
        instance.load(frozenset(needed))
        for engine in self._home.on([instance]):
            self._home.cluster.touch(engine)

    def _fetch(
        self, missing: dict[TpGroup, frozenset[int]], holders: dict[int, range], done: Callable[[float], None]
    ) -> list[Transfer]:
        """Pull layers, each from the first of ``holders`` (layers by instance) that has it; ``done`` when all have arrived."""
        pulls: list[tuple[Link, int]] = []
        for taker, layers in missing.items():
            wanted = layers
            for holder, held in holders.items():
                found = wanted & frozenset(held)
                if found and holder != taker.id:
                    wanted -= found
                    link = self._home.instances[holder].link_to(taker)
                    pulls.append((link, len(found) * taker.sizes.layer_bytes))
        left = set(range(len(pulls)))

        def arrived(number: int, now: float) -> None:
            left.discard(number)
            if not left:
                done(now)

        if not pulls:
            done(self._home.cluster.clock.now)
        self.report.weight_bytes += sum(bytes for _, bytes in pulls)
        return [
            self._rules.send(link, bytes, WEIGHTS, partial(arrived, number))
            for number, (link, bytes) in enumerate(pulls)
        ]

    def _transferred(self, what: str, engine: Engine, began_s: float, now: float) -> None:
        log = self._home.cluster.log
        if log is not None:
            log.transferred(what, engine.index, list(engine.columns), began_s, now)
