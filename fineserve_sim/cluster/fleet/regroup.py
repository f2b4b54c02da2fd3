"""How engines merge into pipelines and split again, and where weights and KV go then (KunServe, sections 4.1 to 4.4).

Drop: the engines that merge stop after their batches. Dropped layers become KV memory, and the queues join. The KV of a layer
goes to the instance that has the layer now. All instances send at once, oldest requests first. *Coordinated*: in chunks
of about one stage's time, activations first. *Bulk*: one queue. A request stalls until all its KV is there; others run.

Restore: the memory that dropping gave takes no more KV. The pipeline pulls missing layers from its other instances at the
lowest priority, while it serves. Then every instance takes requests alone, and the pipeline ends its requests.

KV that has to move counts at its new holders as soon as the engines merge. The receiving side has dropped its layers by then,
and in sum as much leaves as comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import NamedTuple

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.links import ACTIVATION, KV, WEIGHTS, Done, Link, Transfer
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.pipeline import Pipeline
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.engine.spans import Spans
from fineserve_sim.cluster.engine.tp_group import TpGroup
from fineserve_sim.cluster.fleet.exchange import Exchange
from fineserve_sim.cluster.host import TIMER, Cluster, Scope
from fineserve_sim.cluster.scenario import Left
from fineserve_sim.cluster.sharing.domain import MemoryDomain, PrivateDomain, connected
from fineserve_sim.policy.commands import DropLayers, RestoreLayers
from fineserve_sim.policy.events import EngineDrained, LayersDropped, LayersKept, LayersRestored
from fineserve_sim.policy.groups.drop_plan import pipeline_layout
from fineserve_sim.policy.memory.preemption import arrival_order

REMAP = order_of(Kind.TIMER, 1 << 18)

Layout = Mapping[int, range]
"""The layers of each instance of an engine, in the order of stages."""

EngineMaker = Callable[[int, tuple[TpGroup, ...], tuple[range, ...], bool], Engine]
"""By id, instances in the order of stages, their layers, and whether the instances may have another engine for a while."""


REMAP_S = 0.005
"""How long it takes to turn dropped layers into KV memory (KunServe, section 4.1)."""


class TransferRules(NamedTuple):
    """``coordinated``: transfers by priority, in chunks that take a link ``chunk_s``; else in one queue."""

    coordinated: bool
    chunk_s: float

    def chunk_bytes(self, link: Link) -> int | None:
        return max(1, round(link.bytes_per_s * self.chunk_s)) if self.coordinated else None

    def send(self, link: Link, bytes: int, priority: int, done: Done) -> Transfer:
        return link.send(bytes, priority if self.coordinated else ACTIVATION, self.chunk_bytes(link), done)

    def batches(
        self, parcels: Iterable[tuple[SequenceState, float]], token_bytes: float, link: Link
    ) -> Iterator[tuple[list[SequenceState], int]]:
        """Requests that travel together, in order, and their bytes. Each parcel is a request and its tokens. A batch has about
        a chunk; in bulk every request travels by itself."""
        limit = self.chunk_bytes(link) or 0
        batch: list[SequenceState] = []
        bytes = 0.0
        for sequence, tokens in parcels:
            batch.append(sequence)
            bytes += tokens * token_bytes
            if bytes >= limit:
                yield batch, round(bytes)
                batch, bytes = [], 0.0
        if batch:
            yield batch, round(bytes)


@dataclass(slots=True)
class Report:
    """What regrouping did. ``exchange_s`` has the seconds of each exchange from the remap to its last byte. ``drops`` and
    ``restores`` are times and instances. ``pipelined_*`` are stage seconds of pipelines while requests wait: computed, and
    passed."""

    exchange_s: list[float] = field(default_factory=list)
    exchange_bytes: int = 0
    weight_bytes: int = 0
    drops: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    restores: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    pipelined_busy_s: float = 0.0
    pipelined_s: float = 0.0

    def count(self, engine: Engine) -> None:
        """Take up the time of an engine that ends, if it is a pipeline."""
        executor = engine.executor
        if isinstance(executor, Pipeline) and len(executor.stages) > 1:
            self.pipelined_busy_s += executor.busy_s
            self.pipelined_s += executor.working_s * len(executor.stages)


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

    def create(self, layouts: Mapping[int, Layout]) -> list[Engine]:
        """New engines, by id, on instances where others may still be ending their requests."""
        made = []
        for id, layout in layouts.items():
            stages = tuple(self._instances[number] for number in layout)
            made.append(self._make(id, stages, tuple(layout.values()), bool(self.on(layout))))
        self._cluster.engines |= {engine.index: engine for engine in made}
        self._connect(layouts.keys())
        return made

    def remove(self, engine: Engine) -> None:
        """An engine that has ended."""
        self.report.count(engine)
        self._connect(self._cluster.disconnect(engine))

    def _connect(self, changed: Set[int]) -> None:
        """Form the domains of these engines anew: of engines on the same instances, directly or by way of others."""
        cluster = self._cluster
        for group in connected({id: engine.columns for id, engine in cluster.engines.items()}):
            if changed.isdisjoint(group):
                continue
            members = [cluster.engines[id] for id in group]
            alone = len(members) == 1 and isinstance(members[0].executor, Spans)
            domain = PrivateDomain(members[0], []) if alone else MemoryDomain(members)
            cluster.connect(members, [domain], [Scope((id,)) for id in group])
            cluster.touch(members[0])

    def on(self, instances: Iterable[int]) -> list[Engine]:
        """The engines on any of these instances."""
        wanted = set(instances)
        return [engine for engine in self._cluster.engines.values() if not wanted.isdisjoint(engine.columns)]

    def _layout_of(self, engine: Engine) -> Layout:
        return dict(zip(engine.columns, engine.layout or (range(self._layers),), strict=True))

    def _drop(self, command: DropLayers, now: float) -> None:
        """Merge these engines, once they have stopped."""
        sources = [self._cluster.engines[id] for id in command.engines]
        self._merges.append(_Merge(command.engine, sources, len(sources)))
        for engine in sources:
            self._cancel_restore(engine)
            self._cluster.settle_now(engine, now)
            engine.stop(now)

    def _stopped(self, engine: Engine, now: float) -> None:
        """The last batch of an engine that stops has left: when all of a merge have, remap."""
        (merge,) = (merge for merge in self._merges if engine in merge.sources)
        merge.running -= 1
        if not merge.running:
            self._cluster.at(now + REMAP_S, REMAP, partial(self._merge, merge))

    def _merge(self, merge: _Merge, now: float) -> None:
        cluster = self._cluster
        if merge not in self._merges:
            return  # an instance failed meanwhile
        self._merges.remove(merge)
        cluster.settle_all(now, TIMER)
        held = {number: own for engine in merge.sources for number, own in self._layout_of(engine).items()}
        layout = pipeline_layout(held, self._layers)
        self.report.drops.append((now, tuple(sorted(layout))))
        started = {sequence: engine.columns for engine in merge.sources for sequence in engine.dissolve()}
        waiting = [sequence for engine in merge.sources for sequence in engine.take_waiting()]
        for engine in merge.sources:
            self.remove(engine)
        missing = {number: frozenset(own) - self._instances[number].resident for number, own in layout.items()}
        (merged,) = self.create({merge.id: layout})
        self._settle_resident(merged)
        if any(missing.values()):  # ranges that round to whole layers: nothing runs until the layer is there
            merged.stopping = True
            self._fetch(missing, held, partial(self._complete, merged))
        self._carry_over(merged, started, held, now)
        for engine in cluster.engines.values():
            if not (engine.stopping or engine.closing):
                waiting += engine.take_waiting()
                cluster.touch(engine)
        if not merged.stopping:
            cluster.hear(now, LayersDropped(merged.index))
        cluster.returned(merged, sorted(waiting, key=arrival_order), now, Left.REGROUPED)

    def _complete(self, merged: Engine, now: float) -> None:
        """A merged engine has the last layer that it missed."""
        if not merged.gone:
            self._cluster.order = TIMER
            merged.go_on(now)
            self._cluster.hear(now, LayersDropped(merged.index))

    def _carry_over(
        self, merged: Engine, started: Mapping[SequenceState, tuple[int, ...]], held: Layout, now: float
    ) -> None:
        """Sequences that have ``started`` go on in the merged engine when all their KV is where it belongs. ``started`` has the
        instances of their KV, ``held`` the layers that each instance had."""
        moving: list[SequenceState] = []
        due = Counter[SequenceState]()  # transfers that a sequence waits for

        def arrived(batch: list[SequenceState], at_s: float) -> None:
            due.subtract(batch)
            complete = [sequence for sequence in batch if not due[sequence]]
            for sequence in complete:
                del due[sequence]
            if not due:
                self.report.exchange_s.append(at_s - now)
                self._transferred("KV exchange", merged, now, at_s)
            for sequence in complete:
                if sequence in merged.stalled and not merged.gone:
                    merged.adopt(sequence, at_s)

        came: dict[tuple[int, int], int] = {}
        for sequence in sorted(started, key=arrival_order):
            tokens = sequence.generated_tokens
            self._cluster.outcomes.move(sequence.index, merged.index, now, tokens, Left.REGROUPED)
            if merged.kv.hold(sequence, came):
                merged.stalled[sequence] = None
                moving.append(sequence)
            else:  # ranges that round to whole layers may leave a stage short
                sequence.lose_kv()
                merged.accept(sequence)
        exchange = Exchange(moving, started, held, merged.kv.block_tokens)
        for (sender, _), (receiver, own) in permutations(zip(merged.stages, merged.layout, strict=True), 2):
            had, link = held[sender.id], self._cluster.links.between(sender.gpus, receiver.gpus)
            layers = range(max(had.start, own.start), min(had.stop, own.stop))
            leaving = [sequence for sequence in moving if layers and sender.id in started[sequence]]
            sizes = [(sequence, exchange.tokens(sequence, receiver.id, layers)) for sequence in leaving]
            parcels = [parcel for parcel in sizes if parcel[1]]
            for batch, bytes in self._rules.batches(parcels, sender.sizes.token_layer_bytes * len(layers), link):
                exchange.sent(receiver.id, batch)
                due.update(batch)
                self.report.exchange_bytes += bytes
                self._rules.send(link, bytes, KV, partial(arrived, batch))
        for batch, sequence in exchange.followers():
            batch.append(sequence)
            due[sequence] += 1
        for sequence in moving:
            if sequence not in due:
                merged.adopt(sequence, now)

    def _restore(self, command: RestoreLayers, now: float) -> None:
        """Bring back the layers that the instances of an engine miss; the engine splits when all have arrived."""
        engine = self._cluster.engines[command.engine]
        everything = frozenset(range(self._layers))
        missing = {stage.id: everything - stage.resident for stage in engine.stages}
        engine.kv.forget()
        for stage in engine.stages:
            stage.load(everything)
        self._cluster.touch(engine)
        into = dict(zip(command.gpus, command.into, strict=True))
        split = partial(self._split, engine, into, now)
        self._pulls[engine.index] = self._fetch(missing, self._layout_of(engine), split)

    def _split(self, engine: Engine, into: Mapping[tuple[int, ...], int], began_s: float, now: float) -> None:
        """Its instances serve alone as the engines ``into``, by their GPUs."""
        cluster = self._cluster
        del self._pulls[engine.index]
        cluster.order = TIMER
        self._transferred("restore", engine, began_s, now)
        self.report.restores.append((now, tuple(sorted(engine.columns))))
        waiting = engine.take_waiting()
        engine.closing = True
        self.create({into[stage.gpus]: {stage.id: range(self._layers)} for stage in engine.stages})
        cluster.hear(now, LayersRestored(engine.index))
        cluster.returned(engine, waiting, now, Left.REGROUPED)
        self.end_drained([engine], now)

    def end_drained(self, engines: Iterable[Engine], now: float) -> None:
        """End each pipeline among ``engines`` whose instances serve alone again and whose last request is gone."""
        for engine in [each for each in engines if each.closing and not (each.running or each.busy)]:
            engine.dissolve()
            self.remove(engine)
            self._cluster.hear(now, EngineDrained(engine.index))
            self._settle_resident(engine)

    def _cancel_restore(self, engine: Engine) -> None:
        """The restore does not happen: layers on their way, or come since it began, do not count as resident."""
        if engine.index in self._pulls:
            for transfer in self._pulls.pop(engine.index):
                transfer.cancel()
            self._settle_resident(engine)

    def forget(self, hit: Sequence[Engine], now: float) -> list[LayersKept]:
        """These engines are lost. Their merges do not happen, and the other sources go on. Returns the events to tell once the
        engines are gone."""
        for engine in hit:
            self._cancel_restore(engine)
        lost = [merge for merge in self._merges if any(engine in hit for engine in merge.sources)]
        for merge in lost:
            self._merges.remove(merge)
            for engine in merge.sources:
                if engine not in hit:
                    engine.go_on(now)
        return [LayersKept(merge.id) for merge in lost]

    def _settle_resident(self, engine: Engine) -> None:
        """Its instances keep the layers that their engines run, or all layers while they come back, and drop the others."""
        for number in engine.columns:
            needed: set[int] = set()
            for other in self.on([number]):
                needed.update(range(self._layers) if other.index in self._pulls else self._layout_of(other)[number])
                self._cluster.touch(other)
            self._instances[number].load(frozenset(needed))

    def _fetch(
        self, missing: Mapping[int, frozenset[int]], holders: Layout, done: Callable[[float], None]
    ) -> list[Transfer]:
        """Pull what instances miss, each layer from the first of ``holders`` that has it; ``done`` when all have arrived."""
        pulls: list[tuple[Link, int]] = []
        for number, layers in missing.items():
            wanted, taker = layers, self._instances[number]
            for holder, held in holders.items():
                found = wanted & frozenset(held)
                if found and holder != number:
                    wanted -= found
                    link = self._cluster.links.between(self._instances[holder].gpus, taker.gpus)
                    pulls.append((link, len(found) * taker.sizes.layer_bytes))
        left = len(pulls)

        def arrived(now: float) -> None:
            nonlocal left
            left -= 1
            if not left:
                done(now)

        self.report.weight_bytes += sum(bytes for _, bytes in pulls)
        return [self._rules.send(link, bytes, WEIGHTS, arrived) for link, bytes in pulls]

    def _transferred(self, what: str, engine: Engine, began_s: float, now: float) -> None:
        if self._cluster.log is not None:
            self._cluster.log.transferred(what, engine.index, list(engine.columns), began_s, now)
