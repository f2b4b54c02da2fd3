"""The cluster of one model: takes requests in, dispatches them to groups, looks at everything now and then, and carries
out what the policies decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from simpy.events import Event

from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.groups.forming import Former
from fineserve_sim.cluster.groups.group import Group, GroupSettings
from fineserve_sim.cluster.groups.instance import Instance
from fineserve_sim.cluster.groups.migrate import Migrations
from fineserve_sim.cluster.groups.passes import Microbatch
from fineserve_sim.cluster.groups.queue import Lane
from fineserve_sim.cluster.groups.regroup import Regrouping, TransferRules
from fineserve_sim.cluster.groups.relief import Relief
from fineserve_sim.cluster.groups.sequences import Sequence
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.cluster.scenario import Fate
from fineserve_sim.policy.commands import Dispatch, Drop, Reject
from fineserve_sim.policy.groups.dispatch import DispatchPolicy
from fineserve_sim.policy.groups.drop_plan import even_split
from fineserve_sim.policy.groups.migration import LlumnixMigration, Migrate
from fineserve_sim.policy.groups.throttle import DropLayers, KunServeDrop, RestoreLayers, ScaleOut, ThrottleCommand
from fineserve_sim.policy.groups.view import GroupView, Phase
from fineserve_sim.policy.interfaces import Request

TICK_S = 0.1
"""The monitor looks ten times a second (Llumnix, and KunServe's artifact)."""

TICK = order_of(Kind.TIMER, (1 << 18) + 1)


@dataclass(frozen=True, slots=True)
class Policies:
    """The decisions of a system. ``start_s``: how long a spare instance takes to serve."""

    dispatch: DispatchPolicy
    drop: KunServeDrop | None = None
    migration: LlumnixMigration | None = None
    scale_out: ScaleOut | None = None
    start_s: float = 0.0

    @property
    def watch(self) -> bool:
        return bool(self.drop or self.migration or self.scale_out)


@dataclass(frozen=True, slots=True)
class Makers:
    """How the groups of a run are made: the former by the number of stages, the relief by the first instance."""

    settings: GroupSettings
    former: Callable[[int], Former]
    relief: Callable[[Instance], Relief]


class GroupCluster:
    """Owns the table of groups. ``max_tokens`` bounds prompt and output of a request together; ``spares`` are instances
    that serve only when asked for."""

    def __init__(
        self,
        clock: Clock,
        outcomes: Outcomes,
        instances: list[Instance],
        spares: list[Instance],
        makers: Makers,
        policies: Policies,
        max_tokens: int,
        rules: TransferRules,
        *,
        check: bool,
        log: Callable[[dict[str, object]], None] | None,
    ) -> None:
        self.clock, self.outcomes = clock, outcomes
        self.instances = instances
        self.groups: dict[int, Group] = {}
        self.max_tokens = max_tokens
        self._spares = spares
        self._makers, self._policies = makers, policies
        self._check, self._log = check, log
        self._held: list[Sequence] = []
        self._made: list[Group] = []
        self._ticks = 0
        self.regrouping = Regrouping(clock, instances, self.groups, self.create, self.requeue, rules, self._transferred)
        self.migrations = Migrations(self.groups)
        if policies.watch:
            clock.at(0.0, TICK, self._on_tick)

    def create(self, members: tuple[Instance, ...], layout: tuple[range, ...]) -> Group:
        """A new group, in the table."""
        makers = self._makers
        group = Group(
            len(self._made),
            members,
            layout,
            makers.settings,
            makers.former(len(members)),
            makers.relief(members[0]),
            self,
        )
        self._made.append(group)
        self.groups[group.id] = group
        return group

    # --- requests --------------------------------------------------------------------------------------------------

    def arrive(self, request: Request, output_tokens: int, now: float) -> None:
        """A request comes in. ``output_tokens`` is what it would generate if nothing cut it off (the oracle)."""
        self._write(now, event="RequestArrived", request={name: getattr(request, name) for name in Request.__slots__})
        if request.prompt_tokens >= self.max_tokens:
            reason = f"prompt of {request.prompt_tokens} tokens; the longest that fits has {self.max_tokens - 1}"
            self._write(now, **_command(Reject(request.id, reason)))
            self.outcomes.end(request.id, now, Fate.REJECTED)
            return
        output = min(output_tokens, self.max_tokens - request.prompt_tokens)
        self._dispatch(Sequence(request.id, request.arrival_s, request.prompt_tokens, output), now)

    def requeue(self, sequences: Iterable[Sequence], now: float) -> None:
        """Dispatch requests that were queued before, and those that nobody could take."""
        held, self._held = self._held, []
        for sequence in (*held, *sequences):
            self._dispatch(sequence, now)

    def _dispatch(self, sequence: Sequence, now: float) -> None:
        views = [group.view() for group in self.groups.values() if group.phase in (Phase.SERVING, Phase.RESTORING)]
        if not views:
            self._held.append(sequence)
            return
        group = self.groups[self._policies.dispatch.choose(views)]
        longest = (group.used_blocks + group.free_blocks) * group.settings.block_tokens
        if sequence.prompt_tokens + sequence.output_tokens - 1 > longest:
            self._write(now, **_command(Drop(sequence.index, "no instance that is left can hold it")))
            self.outcomes.end(sequence.index, now, Fate.DROPPED)
            return
        first = group.instances[0].id
        self._write(now, **_command(Dispatch(sequence.index, first)))
        self.outcomes.engine[sequence.index] = first
        group.accept(sequence)

    def first_token(self, sequence: Sequence, now: float) -> None:
        self.outcomes.first_token(sequence.index, now)

    def finished(self, sequence: Sequence, group: Group, now: float) -> None:
        self.outcomes.engine[sequence.index] = group.instances[0].id
        self.outcomes.end(sequence.index, now, Fate.FINISHED)

    def preempted(self, sequence: Sequence) -> None:
        self.outcomes.preemptions[sequence.index] += 1

    def leave(self, group: Group, lane: Lane, sequence: Sequence, now: float) -> None:
        self.migrations.leave(lane, sequence)

    def freed(self, group: Group) -> None:
        """Memory came back: others on the same instances may go on."""
        if self._check:
            self.check()
        for other in self.groups.values():
            if other is not group and set(other.instances) & set(group.instances):
                other.wake()

    def _transferred(self, what: str, group: Group, began_s: float, now: float) -> None:
        engines = [instance.id for instance in group.instances]
        self._write(now, span="Transferred", what=what, engines=engines, seconds=now - began_s)

    def stopped(self, group: Group, now: float) -> None:
        self.regrouping.stopped(group, now)

    def computes(self, group: Group, stage: int, microbatch: Microbatch, now: float) -> None:
        """Write down what an instance computes, and with the first stage what its group looks like then."""
        if self._log is None:
            return
        chunk_tokens = sum(tokens for _, _, tokens in microbatch.chunks)
        entry: dict[str, object] = {
            "engine": group.instances[stage].id,
            "seconds": microbatch.stage_s[stage],
            "decodes": microbatch.tokens - chunk_tokens,
            "prefill_tokens": chunk_tokens,
        }
        if stage == 0:
            entry |= {
                "engines": [instance.id for instance in group.instances],
                "free_slots": max(0, group.settings.max_sequences * len(group.lanes) - group.running),
                "free_kv_tokens": group.free_blocks * group.settings.block_tokens,
                "waiting": group.queued,
                "starts": [sequence.index for sequence, prefix, _ in microbatch.chunks if not prefix],
            }
        self._write(now, span="GroupStepped", **entry)

    @property
    def iterations(self) -> int:
        """Microbatches that went through, over all groups that ever were."""
        return sum(group.iterations for group in self._made)

    # --- the monitor -----------------------------------------------------------------------------------------------

    def views(self, shortest: bool = False) -> list[GroupView]:
        return [group.view(shortest) for group in self.groups.values()]

    def _on_tick(self, _: Event) -> None:
        now: float = self.clock.now
        for group in list(self.groups.values()):
            self.regrouping.drained(group)
        if self._check:
            self.check()
        policies = self._policies
        if policies.migration is not None:
            self._migrate(policies.migration, now)
        if policies.drop is not None:
            self._regroup(policies.drop, now)
        if policies.scale_out is not None:
            self._scale(policies.scale_out, now)
        if self.outcomes.open:
            self._ticks += 1
            self.clock.at(self._ticks * TICK_S, TICK, self._on_tick)

    def _migrate(self, policy: LlumnixMigration, now: float) -> None:
        busy = self.migrations.busy
        for move in policy.tick([view for view in self.views(shortest=True) if view.group not in busy]):
            self._write(now, **_command(move))
            self.migrations.start(move)

    def _regroup(self, policy: KunServeDrop, now: float) -> None:
        for command in policy.tick(self.views()):
            self._write(now, **_command(command))
            if isinstance(command, DropLayers):
                for target in command.groups:
                    self.regrouping.drop(target, now)
            elif isinstance(command, RestoreLayers):
                self.regrouping.restore(self.groups[command.group], now)

    def _scale(self, policy: ScaleOut, now: float) -> None:
        for command in policy.tick(now, self.views()) if self._spares else []:
            spare = self._spares.pop(0)
            self._write(now, **_command(command))
            order = order_of(Kind.TIMER, (1 << 18) + 2 + spare.id)
            self.clock.at(now + self._policies.start_s, order, partial(self._join, spare))

    def _join(self, instance: Instance, _: Event) -> None:
        if instance.alive:
            self.create((instance,), even_split(instance.sizes.layers, 1))
            self.requeue((), self.clock.now)

    # --- failure ---------------------------------------------------------------------------------------------------

    def fail(self, instance_id: int) -> None:
        """An instance is lost, with all KV of its group; lost requests start again elsewhere."""
        now: float = self.clock.now
        self._write(now, event="InstanceFailed", instance=instance_id)
        lost = self.regrouping.fail(self.instances[instance_id], now)
        for sequence in lost:
            if sequence.preempted:
                self.preempted(sequence)
        self.requeue(lost, now)

    def repair(self, instance_id: int) -> None:
        """A lost instance is back: it loads the weights, then serves."""
        self._write(self.clock.now, event="InstanceRepaired", instance=instance_id)
        self.instances[instance_id].revive()
        self.regrouping.load(self.instances[instance_id])

    # --- checks and log --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless every group and instance adds up, and bytes agree between them."""
        held = dict.fromkeys(range(len(self.instances)), 0)
        for group in self.groups.values():
            group.check()
            for instance, layers in zip(group.instances, group.layout, strict=True):
                held[instance.id] += group.used_blocks * len(layers) * instance.sizes.block_layer_bytes
        for instance in self.instances:
            instance.check()
            assert instance.kv_used_bytes == held[instance.id], f"instance {instance.id}: KV bytes that no group has"

    def _write(self, now: float, **entry: object) -> None:
        if self._log is not None:
            self._log({"now_s": now, **entry})


def _command(command: Dispatch | Drop | Reject | Migrate | ThrottleCommand) -> dict[str, object]:
    return {"command": type(command).__name__, **command._asdict()}
