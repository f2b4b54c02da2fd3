"""Which engine is on which instances, and how engines merge into pipelines and split again: where weights and KV go (KunServe,
sections 4.1 to 4.4).

Drop: the engines that merge stop after their batches, dropped layers are remapped to KV memory, and the queues join. KV of
layers that now belong to somebody else is sent there (``exchange``); a request stalls until all its own is there, others run.

Restore: the memory that dropping gave is closed to KV, missing layers are pulled from the other instances of the pipeline
at the lowest priority, while it serves. Then every instance takes requests alone, and the pipeline ends what it has.

KV that has to move is charged to its new holders as soon as the engines merge: the receiving side has dropped its layers
by then, and in sum as much leaves as comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.links import Link, Transfer
from fineserve_sim.cluster.engine.pipeline import WEIGHTS, PipelineEngine
from fineserve_sim.cluster.engine.spans import SpanEngine
from fineserve_sim.cluster.engine.tp_group import TpGroup
from fineserve_sim.cluster.fleet.exchange import Exchange, Report, TransferRules
from fineserve_sim.cluster.host import TIMER, Cluster, Scope
from fineserve_sim.cluster.sharing.domain import MemoryDomain, PrivateDomain, connected
from fineserve_sim.policy.commands import DropLayers, RestoreLayers
from fineserve_sim.policy.events import EngineDrained, LayersDropped, LayersKept, LayersRestored
from fineserve_sim.policy.groups.drop_plan import even_split, pipeline_layout
from fineserve_sim.policy.memory.preemption import arrival_order

REMAP = order_of(Kind.TIMER, 1 << 18)

Stand = tuple[int, tuple[TpGroup, ...], tuple[range, ...]]
"""The id of an engine, its instances in the order of stages, and their layers."""

EngineMaker = Callable[[Stand, bool], Engine]
"""By what stands where, and whether another engine has the instances too for a while."""


@dataclass(slots=True, eq=False)
class _Merge:
    """A merge under way into engine ``id``: so many sources are still ``running`` and have to stop."""

    id: int
    sources: list[Engine]
    running: int


class Regrouping:
    """The engines on ``instances``; carries out ``DropLayers`` and ``RestoreLayers``."""

    def __init__(self, cluster: Cluster, instances: Sequence[TpGroup], make: EngineMaker, rules: TransferRules) -> None:
        self.report = Report()
        self._cluster, self._instances, self._make, self._rules = cluster, instances, make, rules
        self._layers = instances[0].sizes.layers
        self._merges: list[_Merge] = []
        self._pulls: dict[int, list[Transfer]] = {}  # layers on their way back, by engine
        cluster.stopped = self._stopped
        cluster.actions |= {DropLayers: self._drop, RestoreLayers: self._restore}

    # --- engines ---------------------------------------------------------------------------------------------------

    def create(self, stands: Iterable[Stand]) -> list[Engine]:
        """New engines, on instances where others may still be ending their requests."""
        made = [self._make(stand, bool(self.on(stand[1]))) for stand in stands]
        self._cluster.engines |= {engine.index: engine for engine in made}
        self._connect(made)
        return made

    def remove(self, engine: Engine) -> None:
        """An engine that has ended."""
        left = self._cluster.disconnect(engine)
        if isinstance(engine, PipelineEngine):
            self.report.count(engine)
        self._connect(left)

    def _connect(self, changed: Collection[Engine]) -> None:
        """Form the domains of these engines anew: of engines on the same instances, directly or by way of others."""
        cluster, ids = self._cluster, {engine.index for engine in changed}
        for group in connected({id: engine.columns for id, engine in cluster.engines.items()}):
            if ids.isdisjoint(group):
                continue
            members = [cluster.engines[id] for id in group]
            only = members[0] if len(members) == 1 else None
            domain = PrivateDomain(only, []) if isinstance(only, SpanEngine) else MemoryDomain(members)
            cluster.connect(members, [domain], [Scope((id,)) for id in group])
            cluster.touch(members[0])

    def on(self, instances: Collection[TpGroup]) -> list[Engine]:
        """The engines on any of these instances."""
        wanted = {instance.id for instance in instances}
        return [engine for engine in self._cluster.engines.values() if not wanted.isdisjoint(engine.columns)]

    def _layout_of(self, engine: Engine) -> tuple[range, ...]:
        return engine.layout if isinstance(engine, PipelineEngine) else even_split(self._layers, 1)

    # --- drop ------------------------------------------------------------------------------------------------------

    def _drop(self, command: DropLayers, now: float) -> None:
        """Merge these engines, once they have stopped."""
        sources = [self._cluster.engines[id] for id in command.engines]
        for engine in sources:
            self._cancel_restore(engine)
        self._merges.append(_Merge(command.engine, sources, len(sources)))
        for engine in sources:
            self._cluster.settle_now(engine, now)
            engine.stop(now)

    def _stopped(self, engine: Engine, now: float) -> None:
        """The last batch of an engine that stops has left: when all of a merge have, remap."""
        (merge,) = (merge for merge in self._merges if engine in merge.sources)
        merge.running -= 1
        if not merge.running:
            self._cluster.at(now + self._rules.remap_s, REMAP, partial(self._merge, merge))

    def _merge(self, merge: _Merge, now: float) -> None:
        cluster = self._cluster
        if merge not in self._merges:
            return  # an instance failed meanwhile
        self._merges.remove(merge)
        cluster.settle_all(now, TIMER)
        held: dict[int, range] = {}
        for engine in merge.sources:
            held |= zip(engine.columns, self._layout_of(engine), strict=True)
        layout = pipeline_layout(held, self._layers)
        self.report.drops.append((now, tuple(sorted(layout))))
        moving = [(sequence, engine.columns) for engine in merge.sources for sequence in engine.dissolve()]
        waiting = [sequence for engine in merge.sources for sequence in engine.take_waiting()]
        for engine in merge.sources:
            self.remove(engine)
        members = tuple(self._instances[id] for id in layout)
        missing = {member: frozenset(layout[member.id]) - member.resident for member in members}
        (merged,) = self.create([(merge.id, members, tuple(layout.values()))])
        assert isinstance(merged, PipelineEngine)
        self._settle_resident(merged)
        if any(missing.values()):  # ranges that round to whole layers: nothing runs until the layer is there
            merged.stopping = True
            self._fetch(missing, held, partial(self._complete, merged))
        exchange = Exchange(merged, self._rules, self.report, partial(self._transferred, "KV exchange", merged), now)
        exchange.carry_over(moving, held)
        for engine in cluster.engines.values():
            if not (engine.stopping or engine.closing):
                waiting += engine.take_waiting()
                cluster.touch(engine)
        if not merged.stopping:
            cluster.hear(now, LayersDropped(merged.index))
        cluster.returned(merged, sorted(waiting, key=arrival_order), now)

    def _complete(self, merged: PipelineEngine, now: float) -> None:
        """A merged engine has the last layer that it missed."""
        if not merged.gone:
            self._cluster.order = TIMER
            merged.go_on(now)
            self._cluster.hear(now, LayersDropped(merged.index))

    # --- restore ---------------------------------------------------------------------------------------------------

    def _restore(self, command: RestoreLayers, now: float) -> None:
        """Bring back what the instances of an engine miss; it splits when all has arrived."""
        engine = self._cluster.engines[command.engine]
        assert isinstance(engine, PipelineEngine)
        everything = frozenset(range(self._layers))
        missing = {stage: everything - stage.resident for stage in engine.stages}
        engine.kv.forget()
        for stage in engine.stages:
            stage.load(everything)
        self._cluster.touch(engine)
        held = dict(zip(engine.columns, engine.layout, strict=True))
        into = dict(zip(command.gpus, command.into, strict=True))
        self._pulls[engine.index] = self._fetch(missing, held, partial(self._split, engine, into, now))

    def _split(self, engine: PipelineEngine, into: Mapping[tuple[int, ...], int], began_s: float, now: float) -> None:
        """Its instances serve alone as the engines ``into``, by their GPUs."""
        cluster = self._cluster
        del self._pulls[engine.index]
        cluster.order = TIMER
        self._transferred("restore", engine, began_s, now)
        self.report.restores.append((now, tuple(sorted(engine.columns))))
        waiting = engine.take_waiting()
        engine.closing = True
        self.create((into[stage.gpus], (stage,), even_split(self._layers, 1)) for stage in engine.stages)
        cluster.hear(now, LayersRestored(engine.index))
        cluster.returned(engine, waiting, now)
        self._end_if_drained(engine, now)

    def end_drained(self, now: float) -> None:
        """Pipelines whose instances serve alone again end with their last request."""
        for engine in list(self._cluster.engines.values()):
            if engine.closing:
                self._end_if_drained(engine, now)

    def _end_if_drained(self, engine: Engine, now: float) -> None:
        if engine.running or engine.busy:
            return
        engine.dissolve()
        self.remove(engine)
        self._cluster.hear(now, EngineDrained(engine.index))
        self._settle_resident(engine)

    def _cancel_restore(self, engine: Engine) -> None:
        """What is on its way does not count as resident any more, nor what has come so far."""
        pulls = self._pulls.pop(engine.index, None)
        if pulls is not None:
            for transfer in pulls:
                transfer.cancel()
            self._settle_resident(engine)

    # --- failure ---------------------------------------------------------------------------------------------------

    def forget(self, hit: Sequence[Engine], now: float) -> list[LayersKept]:
        """These engines are lost: merges that they were part of do not happen, and the other sources go on. Returns what
        there is to tell of that once they are gone."""
        for engine in hit:
            self._cancel_restore(engine)
        lost = [merge for merge in self._merges if any(engine in hit for engine in merge.sources)]
        for merge in lost:
            self._merges.remove(merge)
            for engine in merge.sources:
                if engine not in hit:
                    engine.go_on(now)
        return [LayersKept(merge.id) for merge in lost]

    # --- layers ----------------------------------------------------------------------------------------------------

    def _settle_resident(self, engine: Engine) -> None:
        """Its instances keep the layers that their engines run, all of them while they come back; others are dropped."""
        for instance in (self._instances[number] for number in engine.columns):
            needed: set[int] = set()
            here = self.on([instance])
            for other in here:
                own = self._layout_of(other)[other.columns.index(instance.id)]
                needed.update(range(self._layers) if other.index in self._pulls else own)
            instance.load(frozenset(needed))
            for other in here:
                self._cluster.touch(other)

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
                    pulls.append((self._instances[holder].link_to(taker), len(found) * taker.sizes.layer_bytes))
        left = len(pulls)

        def arrived(now: float) -> None:
            nonlocal left
            left -= 1
            if not left:
                done(now)

        self.report.weight_bytes += sum(bytes for _, bytes in pulls)
        return [self._rules.send(link, bytes, WEIGHTS, arrived) for link, bytes in pulls]

    def _transferred(self, what: str, engine: Engine, began_s: float, now: float) -> None:
        log = self._cluster.log
        if log is not None:
            log.transferred(what, engine.index, list(engine.columns), began_s, now)
