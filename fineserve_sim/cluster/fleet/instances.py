"""Instances of one model that serve alone or as stages of a pipeline, and are lost and come back: who carries out what
``policy/groups`` decides about them. Merging and splitting is ``regroup``'s part, moving requests that of ``migrate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from simpy.events import Event as ClockEvent

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.links import Transfer
from fineserve_sim.cluster.engine.pipeline import WEIGHTS, PipelineEngine
from fineserve_sim.cluster.engine.queue import Lane
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.engine.spans import SpanEngine
from fineserve_sim.cluster.engine.tp_group import TpGroup
from fineserve_sim.cluster.fleet.base import Fleet
from fineserve_sim.cluster.fleet.exchange import TransferRules
from fineserve_sim.cluster.fleet.migrate import Migrations
from fineserve_sim.cluster.fleet.regroup import Regrouping
from fineserve_sim.cluster.host import TIMER, Cluster, Scope
from fineserve_sim.cluster.sharing.domain import MemoryDomain, PrivateDomain, connected
from fineserve_sim.policy.commands import Activate, DropLayers, Migrate, RestoreLayers
from fineserve_sim.policy.events import EngineDrained, EngineFailed, EngineReady, GpusRepaired, Tick
from fineserve_sim.policy.groups.drop_plan import even_split

TICK = order_of(Kind.TIMER, (1 << 18) + 1)

EngineMaker = Callable[[int, tuple[TpGroup, ...], tuple[range, ...], bool], Engine]
"""By id, instances in the order of stages, their layers, and whether the instances may have another engine for a while."""


class Instances(Fleet):
    """The fleet of a cluster of one model. ``spares`` serve ``start_s`` after they are asked for; where requests move
    (``migrates``), looks say which one of an engine would."""

    lends = True

    def __init__(
        self,
        cluster: Cluster,
        instances: Sequence[TpGroup],
        make: EngineMaker,
        rules: TransferRules,
        *,
        spares: int = 0,
        start_s: float = 0.0,
        migrates: bool = False,
    ) -> None:
        self.cluster = cluster
        self.instances = tuple(instances)
        self.regrouping = Regrouping(self, rules)
        self.migrations = Migrations(self)
        self._make = make
        self._spares = set(self.instances[len(instances) - spares :])
        self._start_s, self._migrates = start_s, migrates
        self._by_gpus = {instance.gpus: instance for instance in instances}
        self._stages: dict[int, tuple[TpGroup, ...]] = {}
        self._loading: dict[int, tuple[TpGroup, Transfer | None]] = {}  # by engine to be
        cluster.fleet = self
        cluster.actions |= {
            Activate: self._activate,
            DropLayers: self.regrouping.drop,
            RestoreLayers: self.regrouping.restore,
            Migrate: self.migrations.start,
        }

    def begin(self, stages: int) -> None:
        """The instances that are no spares serve from the start, so many as the stages of an engine."""
        serving = len(self.instances) - len(self._spares)
        layout = even_split(self.instances[0].sizes.layers, stages)
        for id, first in enumerate(range(0, serving, stages)):
            members = self.instances[first : first + stages]
            for member, layers in zip(members, layout, strict=True):
                member.load(frozenset(layers))
            self.create(id, members, layout)
        self._set_tick()

    # --- engines ---------------------------------------------------------------------------------------------------

    def create(
        self, id: int, members: tuple[TpGroup, ...], layout: tuple[range, ...], *, shared: bool = False
    ) -> Engine:
        """A new engine on these instances; ``shared``: another may still be ending its requests there."""
        engine = self._make(id, members, layout, shared)
        self._stages[id] = members
        self._connect([engine, *self.on(members)])
        return engine

    def remove(self, engine: Engine) -> None:
        """An engine that has ended."""
        left = self.cluster.disconnect(engine)
        del self._stages[engine.index]
        if isinstance(engine, PipelineEngine):
            self.regrouping.report.count(engine)
        self._connect(left)

    def _connect(self, engines: Iterable[Engine]) -> None:
        """Form domains anew: of engines on the same instances, directly or by way of others."""
        near = {engine.index: engine for engine in engines}
        for engine in list(near.values()):
            near |= {other.index: other for other in self.cluster.companions(engine)}
        for group in connected({id: self._stages[id] for id in near}):
            members = [near[id] for id in group]
            only = members[0] if len(members) == 1 else None
            domain = PrivateDomain(only, []) if isinstance(only, SpanEngine) else MemoryDomain(members)
            self.cluster.connect(members, [domain], [Scope((engine.index,)) for engine in members])
            for engine in members:
                self.cluster.touch(engine)

    def on(self, instances: Iterable[TpGroup]) -> list[Engine]:
        """The engines on any of these instances."""
        wanted = set(instances)
        return [engine for engine in self.cluster.engines.values() if wanted & set(self._stages[engine.index])]

    def stages_of(self, engine: Engine) -> tuple[TpGroup, ...]:
        """Its instances, in the order of stages."""
        return self._stages[engine.index]

    # --- what the cluster tells ------------------------------------------------------------------------------------

    def stopped(self, engine: Engine, now: float) -> None:
        self.regrouping.stopped(engine, now)

    def leaves(self, engine: Engine, lane: Lane, sequence: SequenceState, now: float) -> None:
        self.migrations.leave(engine, lane, sequence, now)

    def check(self) -> None:
        for instance in self.instances:
            instance.check()
            pools = [pool for id in self._stages for pool in self.cluster.engines[id].kv.pools]
            held = sum(pool.used_bytes for pool in pools if pool.memory is instance.kv)
            assert instance.kv.used_bytes == held, f"instance {instance.id}: KV bytes that no engine has"

    # --- looks at everything ---------------------------------------------------------------------------------------

    def _set_tick(self) -> None:
        at_s = self.cluster.controller.next_tick_s
        if at_s < float("inf"):
            self.cluster.clock.at(at_s, TICK, self._on_tick)

    def _on_tick(self, _: ClockEvent) -> None:
        cluster = self.cluster
        now: float = cluster.clock.now
        cluster.settle_all(now, TICK)
        self.regrouping.end_drained(now)
        loads = {id: engine.load(shortest=self._migrates) for id, engine in cluster.engines.items()}
        cluster.carry_out(cluster.tell(now, Tick({}, {}, loads)), now)
        if cluster.outcomes.open:
            self._set_tick()

    # --- instances that come, are lost and come back -----------------------------------------------------------------

    def _activate(self, command: Activate, now: float) -> None:
        """A spare starts; any other loads the layers that it misses from its host's copy. Then it serves alone."""
        instance = self._by_gpus[command.gpus]
        if instance in self._spares:
            self._spares.remove(instance)
            order = order_of(Kind.TIMER, (1 << 18) + 2 + instance.id)
            self._loading[command.engine] = (instance, None)
            self.cluster.clock.at(
                now + self._start_s, order, lambda _: self._ready(command.engine, now + self._start_s)
            )
            return
        everything = frozenset(range(instance.sizes.layers))
        missing_bytes = len(everything - instance.resident) * instance.sizes.layer_bytes
        self.regrouping.report.weight_bytes += missing_bytes
        transfer = instance.links.from_host.send(missing_bytes, WEIGHTS, None, partial(self._ready, command.engine))
        self._loading[command.engine] = (instance, transfer)

    def _ready(self, id: int, now: float) -> None:
        if id not in self._loading:
            return
        self.cluster.order = TIMER
        instance, _ = self._loading.pop(id)
        layers = instance.sizes.layers
        instance.load(frozenset(range(layers)))
        self.create(id, (instance,), even_split(layers, 1))
        self.cluster.hear(now, EngineReady(id))

    def fail(self, number: int) -> None:
        cluster, instance = self.cluster, self.instances[number]
        now: float = cluster.clock.now
        cluster.settle_all(now, TIMER)
        hit = self.on([instance])
        kept = self.regrouping.forget(hit, now)
        lost: list[SequenceState] = []
        for engine in hit:
            self.migrations.forget(engine, now)
            lost += engine.abandon()
            self.remove(engine)
        loading = [id for id, (other, _) in self._loading.items() if other is instance]
        for id in loading:  # it was on its way back
            transfer = self._loading.pop(id)[1]
            if transfer is not None:
                transfer.cancel()
        instance.fail()
        for id in [*(engine.index for engine in hit), *loading]:
            self.cluster.hear(now, EngineFailed(id, instance.gpus))
        for event in kept:
            self.cluster.hear(now, event)
        if hit:
            lost.sort(key=lambda sequence: (sequence.arrival_s, sequence.index))
            cluster.returned(hit[0], lost, now)

    def repair(self, number: int) -> None:
        instance = self.instances[number]
        instance.alive = True
        self.cluster.hear(self.cluster.clock.now, GpusRepaired(instance.gpus))

    def drained(self, engine: Engine, now: float) -> None:
        """A pipeline whose instances serve alone again has ended its last request."""
        engine.dissolve()
        self.remove(engine)
        self.cluster.hear(now, EngineDrained(engine.index))
