"""Groups merge, split and fail: where weights and KV go (KunServe, sections 4.1 to 4.4).

Drop: the groups that merge stop after their microbatches, dropped layers are remapped to KV memory, and the queues
join. KV of layers that now belong to somebody else is sent there, all instances at once, each request as soon as its
own is complete, oldest first; it stalls until then, others run. *Coordinated*: in chunks of about one stage's time,
activations first. *Bulk*: one queue.

Restore: the memory that dropping gave is closed to KV, missing layers are pulled from the other instances of the group
at the lowest priority, while it serves. Then every instance takes requests alone, and the pipeline ends what it has.

Failure: KV of the whole group is lost. The instances that are left load missing layers from host copies over PCIe, then
serve alone.

KV that has to move is charged to its new holders as soon as the groups merge: the receiving side has dropped its layers
by then, and in sum as much leaves as comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from simpy.events import Event

from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.groups.group import Group
from fineserve_sim.cluster.groups.instance import Instance
from fineserve_sim.cluster.groups.passes import ACTIVATION, KV, WEIGHTS
from fineserve_sim.cluster.groups.sequences import Sequence, by_arrival
from fineserve_sim.cluster.links import Link, Transfer
from fineserve_sim.policy.groups.drop_plan import even_split, pipeline_layout
from fineserve_sim.policy.groups.view import Phase

REMAP = order_of(Kind.TIMER, 1 << 18)


@dataclass(slots=True)
class Report:
    """What regrouping did: seconds of each exchange from the remap to its last byte, its bytes, merges, splits, and
    stage seconds of pipelines while requests wait (computed, and passed)."""

    exchange_s: list[float] = field(default_factory=list)
    exchange_bytes: int = 0
    weight_bytes: int = 0
    drops: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    restores: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    pipelined_busy_s: float = 0.0
    pipelined_s: float = 0.0

    def count(self, group: Group) -> None:
        """Take up the time of a pipeline that ends."""
        if len(group.instances) > 1:
            self.pipelined_busy_s += group.busy_s
            self.pipelined_s += group.working_s * len(group.instances)


class TransferRules(NamedTuple):
    """``coordinated``: transfers by priority, in chunks that take a link ``chunk_s``; else in one queue. ``remap_s``:
    how long it takes to turn dropped layers into KV memory."""

    coordinated: bool
    chunk_s: float
    remap_s: float


@dataclass(slots=True)
class _Change:
    """A merge under way: ``sources`` still to stop."""

    target: tuple[int, ...]
    sources: list[Group]
    running: set[int]


class Regrouping:
    """Carries out what the policy decides about groups.

    ``groups`` is the cluster's table of live groups; ``create(instances, layout)`` adds a group to it, ``requeue``
    dispatches requests (again), ``transferred(what, group, began_s, now)`` hears of exchanges and restores that ended.
    """

    def __init__(
        self,
        clock: Clock,
        instances: list[Instance],
        groups: dict[int, Group],
        create: Callable[[tuple[Instance, ...], tuple[range, ...]], Group],
        requeue: Callable[[Iterable[Sequence], float], None],
        rules: TransferRules,
        transferred: Callable[[str, Group, float, float], None],
    ) -> None:
        self._clock, self._instances, self._groups = clock, instances, groups
        self._create, self._requeue, self._transferred = create, requeue, transferred
        self._rules = rules
        self._changes: list[_Change] = []
        self._restoring: dict[int, list[Transfer]] = {}
        self._loading: dict[int, Transfer] = {}
        self.report = Report()

    # --- drop ------------------------------------------------------------------------------------------------------

    def drop(self, target: tuple[int, ...], now: float) -> None:
        """Merge the groups whose instances make up ``target``, once they have stopped."""
        sources = [group for group in self._serving() if set(_ids(group)) <= set(target)]
        for group in sources:
            for transfer in self._restoring.pop(group.id, ()):
                transfer.cancel()
        change = _Change(target, sources, {group.id for group in sources})
        self._changes.append(change)
        for group in sources:
            group.stop(now)

    def stopped(self, group: Group, now: float) -> None:
        """The last microbatch of a group that stops has left: when all of a merge have, remap."""
        for change in self._changes:
            change.running.discard(group.id)
            if group in change.sources and not change.running:
                self._clock.at(now + self._rules.remap_s, REMAP, partial(self._merge, change))
                return

    def _merge(self, change: _Change, _: Event) -> None:
        now: float = self._clock.now
        if change not in self._changes:
            return  # an instance failed meanwhile
        self._changes.remove(change)
        held = {
            instance.id: layers
            for group in change.sources
            for instance, layers in zip(group.instances, group.layout, strict=True)
        }
        layout = pipeline_layout(held, self._instances[0].sizes.layers)
        started = [(sequence, group) for group in change.sources for sequence in self._end(group)]
        waiting = [sequence for group in change.sources for sequence in group.take_waiting()]
        members = tuple(self._instances[id] for id in layout)
        missing = {m: frozenset(layout[m.id]) - m.resident for m in members}
        merged = self._create(members, tuple(layout.values()))
        for member in members:
            self._settle_resident(member)
        self.report.drops.append((now, change.target))
        if any(missing.values()):  # ranges that round to whole layers: nothing runs until the layer is there
            merged.phase = Phase.CHANGING
            self._fetch(missing, held, partial(self._complete, merged))
        self._carry_over(merged, started, held, now)
        waiting += [sequence for group in self._serving() for sequence in group.take_waiting()]
        self._requeue(sorted(waiting, key=by_arrival), now)

    def _complete(self, merged: Group, now: float) -> None:
        """A merged group has the last layer that it missed."""
        if merged.alive:
            merged.phase = Phase.SERVING
            merged.wake()
            self._requeue((), now)

    def _end(self, group: Group) -> list[Sequence]:
        self.report.count(group)
        del self._groups[group.id]
        return group.dissolve()

    def _carry_over(
        self, merged: Group, started: list[tuple[Sequence, Group]], held: dict[int, range], now: float
    ) -> None:
        """Started sequences go on in the merged group, when it has all their KV."""
        moving: list[tuple[Sequence, Group]] = []
        for sequence, source in sorted(started, key=lambda pair: by_arrival(pair[0])):
            blocks = sequence.blocks
            if not merged.take(blocks):  # ranges that round to whole layers may leave a stage short
                sequence.blocks = 0
                sequence.lose_kv()
                merged.queues[0].append(sequence)
                continue
            merged.stalled[sequence] = None
            moving.append((sequence, source))
        self._exchange(merged, moving, held, now)

    def _exchange(
        self, merged: Group, moving: list[tuple[Sequence, Group]], held: dict[int, range], now: float
    ) -> None:
        """Send the KV of layers that changed hands: a queue of requests for each pair of instances, in chunks."""
        layout = dict(zip(_ids(merged), merged.layout, strict=True))
        pending: list[int] = [0]
        for sender in merged.instances:
            for receiver in merged.instances:
                shared = _common(held[sender.id], layout[receiver.id]) if sender is not receiver else 0
                own = [s for s, source in moving if shared and sender in source.instances]
                for batch, bytes in self._batches(own, shared, sender.link_to(receiver)):
                    pending[0] += 1
                    for sequence in batch:
                        sequence.due += 1
                    self.report.exchange_bytes += bytes
                    self._send(sender.link_to(receiver), bytes, KV, partial(self._arrived, merged, batch, pending, now))
        for sequence, _ in moving:
            if not sequence.due:
                merged.adopt(sequence)

    def _batches(self, sequences: list[Sequence], layers: int, link: Link) -> Iterator[tuple[list[Sequence], int]]:
        """Requests that travel together, in order, up to about a chunk, in bulk each by itself; and their bytes."""
        limit = self._chunk_bytes(link) if self._rules.coordinated else 0
        token_bytes = self._instances[0].sizes.token_layer_bytes * layers
        batch: list[Sequence] = []
        bytes = 0.0
        for sequence in sequences:
            batch.append(sequence)
            bytes += sequence.cached_tokens * token_bytes
            if bytes >= limit:
                yield batch, round(bytes)
                batch, bytes = [], 0.0
        if batch:
            yield batch, round(bytes)

    def _arrived(self, merged: Group, batch: list[Sequence], pending: list[int], began_s: float, now: float) -> None:
        pending[0] -= 1
        if not pending[0]:
            self.report.exchange_s.append(now - began_s)
            self._transferred("KV exchange", merged, began_s, now)
        if not merged.alive:
            return
        for sequence in batch:
            sequence.due -= 1
            if not sequence.due and sequence in merged.stalled:
                merged.adopt(sequence)

    # --- restore ---------------------------------------------------------------------------------------------------

    def restore(self, group: Group, now: float) -> None:
        """Bring back what the instances of ``group`` miss; the group splits when all has arrived."""
        base_bytes = group.settings.sizes.base_kv_bytes
        if group.phase is not Phase.SERVING or any(m.kv_used_bytes > base_bytes for m in group.instances):
            return
        layout = dict(zip(_ids(group), group.layout, strict=True))
        everything = frozenset(range(group.settings.sizes.layers))
        missing = {m: everything - m.resident for m in group.instances}
        group.phase = Phase.RESTORING
        for member in group.instances:
            member.resident = everything
        self._restoring[group.id] = self._fetch(missing, layout, partial(self._split, group, now))

    def _split(self, group: Group, began_s: float, now: float) -> None:
        if group.phase is not Phase.RESTORING:
            return
        self._transferred("restore", group, began_s, now)
        self._restoring.pop(group.id, None)
        self.report.restores.append((now, tuple(sorted(_ids(group)))))
        waiting = group.take_waiting()
        group.phase = Phase.DRAINING
        for member in group.instances:
            self._create((member,), even_split(member.sizes.layers, 1))
        self._requeue(waiting, now)
        self.drained(group)

    def drained(self, group: Group) -> None:
        """A pipeline whose instances serve alone again ends with its last request."""
        if group.phase is Phase.DRAINING and not group.running and group.idle and group.alive:
            self._end(group)
            for member in group.instances:
                self._settle_resident(member)

    def _fetch(
        self,
        missing: dict[Instance, frozenset[int]],
        holders: dict[int, range],
        done: Callable[[float], None],
    ) -> list[Transfer]:
        """Pull layers, each from the first of ``holders`` (layers by instance) that has it; ``done`` when all have arrived."""
        pulls: list[tuple[Link, int]] = []
        for taker, layers in missing.items():
            wanted = layers
            for holder, held in holders.items():
                found = wanted & frozenset(held)
                if found and holder != taker.id:
                    wanted -= found
                    link = self._instances[holder].link_to(taker)
                    pulls.append((link, len(found) * taker.sizes.layer_bytes))
        left = [len(pulls)]

        def arrived(now: float) -> None:
            left[0] -= 1
            if not left[0]:
                done(now)

        if not pulls:
            done(self._clock.now)
        self.report.weight_bytes += sum(bytes for _, bytes in pulls)
        return [self._send(link, bytes, WEIGHTS, arrived) for link, bytes in pulls]

    # --- failure ---------------------------------------------------------------------------------------------------

    def fail(self, instance: Instance, now: float) -> list[Sequence]:
        """An instance is lost. Returns the requests that have to start again somewhere; the others of its groups come
        back by themselves when they have loaded what they miss."""
        hit = [group for group in self._groups.values() if instance in group.instances]
        broken = [change for change in self._changes if any(group in hit for group in change.sources)]
        self._changes = [change for change in self._changes if change not in broken]
        abandoned = [group for change in broken for group in change.sources]
        lost: list[Sequence] = []
        for group in hit:
            for transfer in self._restoring.pop(group.id, ()):
                transfer.cancel()
            waiting = group.take_waiting()
            started = self._end(group)
            for sequence in started:
                sequence.blocks = 0
                sequence.lose_kv()
            lost += [*started, *waiting]
        survivors = {m for group in hit for m in group.instances if m is not instance}
        if instance.id in self._loading:  # it was on its way back
            self._loading.pop(instance.id).cancel()
        instance.fail()
        for group in self._groups.values():
            if group in abandoned:
                group.phase = Phase.SERVING
                group.wake()
        for member in sorted(survivors, key=lambda m: m.id):
            if not any(member in group.instances for group in self._groups.values()):
                self.load(member)
        return sorted(lost, key=by_arrival)

    def load(self, instance: Instance) -> None:
        """Load the layers that an instance misses from its host's copy; then it serves alone."""
        everything = frozenset(range(instance.sizes.layers))
        bytes = len(everything - instance.resident) * instance.sizes.layer_bytes
        self.report.weight_bytes += bytes
        self._loading[instance.id] = instance.links.from_host.send(
            bytes, WEIGHTS, None, partial(self._loaded, instance)
        )

    def _loaded(self, instance: Instance, now: float) -> None:
        del self._loading[instance.id]
        instance.resident = frozenset(range(instance.sizes.layers))
        self._create((instance,), even_split(instance.sizes.layers, 1))
        self._requeue((), now)

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _serving(self) -> list[Group]:
        return [group for group in self._groups.values() if group.phase in (Phase.SERVING, Phase.RESTORING)]

    def _settle_resident(self, instance: Instance) -> None:
        """An instance keeps the layers that its groups run; all others are dropped."""
        needed: set[int] = set()
        for group in self._groups.values():
            for member, layers in zip(group.instances, group.layout, strict=True):
                if member is instance:
                    needed |= set(range(instance.sizes.layers)) if group.phase is Phase.RESTORING else set(layers)
        instance.resident = frozenset(needed)

    def _chunk_bytes(self, link: Link) -> int:
        return max(1, round(link.bytes_per_s * self._rules.chunk_s))

    def _send(self, link: Link, bytes: int, priority: int, done: Callable[[float], None]) -> Transfer:
        if self._rules.coordinated:
            return link.send(bytes, priority, self._chunk_bytes(link), done)
        return link.send(bytes, ACTIVATION, None, done)


def _ids(group: Group) -> list[int]:
    """Instances in pipeline order."""
    return [instance.id for instance in group.instances]


def _common(first: range, second: range) -> int:
    """Layers in both ranges."""
    return max(0, min(first.stop, second.stop) - max(first.start, second.start))
