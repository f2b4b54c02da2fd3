"""Instances of one model: they serve alone or as stages of a pipeline, start late, fail and come back.

This module carries out what ``policy/groups`` decides about them. ``regroup`` merges and splits engines, ``migrate`` moves
requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.links import WEIGHTS, Transfer
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.engine.tp_group import TpGroup
from fineserve_sim.cluster.fleet.migrate import Home, Migrations
from fineserve_sim.cluster.fleet.regroup import EngineMaker, Layout, Regrouping, TransferRules
from fineserve_sim.cluster.host import TIMER, Cluster, Fleet
from fineserve_sim.cluster.scenario import Left
from fineserve_sim.policy.commands import Activate
from fineserve_sim.policy.events import EngineFailed, EngineReady, GpusRepaired, Tick
from fineserve_sim.policy.groups.drop_plan import even_split
from fineserve_sim.policy.memory.preemption import arrival_order

TICK = order_of(Kind.TIMER, (1 << 18) + 1)


class Instances(Fleet):
    """The fleet of a cluster of one model. ``spares`` serve ``start_s`` after a command asks for them. Where requests move
    (``migrates``), looks say which request of an engine would. ``setup_s``: of each transfer of prefilled requests."""

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
        setup_s: float = 0.0,
    ) -> None:
        self.cluster = cluster
        self.regrouping = Regrouping(cluster, instances, make, rules)
        self.migrations = Migrations(cluster, self._home_of, setup_s)
        self._instances = instances
        self._spares = set(instances[len(instances) - spares :])
        self._start_s, self._migrates = start_s, migrates
        self._loading: dict[int, tuple[TpGroup, list[Transfer]]] = {}  # by engine to be
        cluster.fleet = self
        cluster.actions[Activate] = self._activate

    def begin(self, stages: int) -> None:
        """Build the first engines, of so many ``stages`` each, on all instances that are no spares."""
        layers = even_split(self._instances[0].sizes.layers, stages)
        firsts = range(0, len(self._instances) - len(self._spares), stages)
        self._serve({id: dict(enumerate(layers, first)) for id, first in enumerate(firsts)})
        self.cluster.tick(TICK, self._look)

    def _serve(self, layouts: Mapping[int, Layout]) -> None:
        """New engines, whose instances hold their layers and no others."""
        for layout in layouts.values():
            for number, layers in layout.items():
                self._instances[number].load(frozenset(layers))
        self.regrouping.create(layouts)

    def _home_of(self, engine: Engine) -> Home:
        instance = self._instances[engine.columns[0]]
        return Home(instance.gpus, instance.sizes.layers * instance.sizes.token_layer_bytes)

    def freed(self, engine: Engine, now: float) -> None:
        self.migrations.take_in(engine, now)

    def check(self) -> None:
        pools = [pool for engine in self.cluster.engines.values() for pool in engine.kv.pools]
        for instance in self._instances:
            instance.check()
            held = sum(pool.used_bytes for pool in pools if pool.memory is instance.kv)
            assert instance.kv.used_bytes == held, f"instance {instance.id}: KV bytes that no engine has"

    def _look(self, now: float) -> None:
        """Tell the controller how everything stands."""
        cluster = self.cluster
        cluster.settle_all(now, TICK)
        self.regrouping.end_drained(cluster.engines.values(), now)
        loads = {id: engine.load(shortest=self._migrates) for id, engine in cluster.engines.items()}
        cluster.carry_out(cluster.tell(now, Tick({}, {}, loads)), now)

    def _activate(self, command: Activate, now: float) -> None:
        """A spare starts. Any other instance loads the layers that it misses from its host's copy. Then it serves alone."""
        instance = next(instance for instance in self._instances if instance.gpus == command.gpus)
        ready, transfers = partial(self._ready, command.engine), list[Transfer]()
        if instance in self._spares:
            self._spares.remove(instance)
            self.cluster.at(now + self._start_s, order_of(Kind.TIMER, (1 << 18) + 2 + instance.id), ready)
        else:
            missing_bytes = (instance.sizes.layers - len(instance.resident)) * instance.sizes.layer_bytes
            self.regrouping.report.weight_bytes += missing_bytes
            transfers.append(self.cluster.links.of(instance.gpus).from_host.send(missing_bytes, WEIGHTS, None, ready))
        self._loading[command.engine] = (instance, transfers)

    def _ready(self, id: int, now: float) -> None:
        if id in self._loading:
            self.cluster.order = TIMER
            instance, _ = self._loading.pop(id)
            self._serve({id: {instance.id: range(instance.sizes.layers)}})
            self.cluster.hear(now, EngineReady(id))

    def fail(self, number: int, now: float) -> None:
        cluster, instance = self.cluster, self._instances[number]
        cluster.settle_all(now, TIMER)
        hit = self.regrouping.on([number])
        kept = self.regrouping.forget(hit, now)
        lost: list[SequenceState] = []
        left: list[tuple[Engine, SequenceState]] = []  # prefilled, and were to go to an engine that is lost
        for engine in hit:
            left += self.migrations.forget(engine, now)
            lost += engine.abandon()
            self.regrouping.remove(engine)
        loading = [id for id, (other, _) in self._loading.items() if other is instance]
        for id in loading:  # it was on its way back
            for transfer in self._loading.pop(id)[1]:
                transfer.cancel()
        instance.fail()
        for id in [*(engine.index for engine in hit), *loading]:
            cluster.hear(now, EngineFailed(id, instance.gpus))
        for event in kept:
            cluster.hear(now, event)
        for source, sequence in left:
            cluster.prefilled(source, sequence, now)
        if hit:
            cluster.returned(hit[0], sorted(lost, key=arrival_order), now, Left.FAILED)

    def repair(self, number: int, now: float) -> None:
        instance = self._instances[number]
        instance.alive = True
        self.cluster.hear(now, GpusRepaired(instance.gpus))
