"""A group of instances: continuous batching on one instance, or a pipeline over several.

Each stage is an instance with a contiguous range of layers, each lane one microbatch in flight. A microbatch is formed
when its first stage begins it, and leaves stage s at ``max(stage free, arrival from stage s - 1) + its time`` (the
recurrence of ``experiment/analytic/pipeline_model.py``); between stages its activations cross a link. The time of a stage is
the device time of the whole model times its share of layers, plus the host's overhead; a host floor shrinks in the same
proportion.

KV memory is counted in blocks of the whole model. A block takes bytes on every instance of the group in proportion to
its layers, so the tightest instance bounds the group.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from fineserve_sim.cluster.groups.forming import Former, PromptChunk
from fineserve_sim.cluster.groups.instance import Instance, ModelBytes
from fineserve_sim.cluster.groups.passes import Microbatch, Pass
from fineserve_sim.cluster.groups.queue import Lane, Queue
from fineserve_sim.cluster.groups.relief import Relief
from fineserve_sim.cluster.groups.sequences import Sequence, by_arrival
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.groups.view import GroupView, Phase


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What all groups of a run have in common."""

    sizes: ModelBytes
    step: StepModel
    block_tokens: int
    max_sequences: int
    shared_queue: bool


class GroupHost(Protocol):
    """The cluster, as a group tells it what happens."""

    def first_token(self, sequence: Sequence, now: float) -> None: ...
    def finished(self, sequence: Sequence, group: Group, now: float) -> None: ...
    def preempted(self, sequence: Sequence) -> None: ...
    def requeue(self, sequences: Collection[Sequence], now: float) -> None: ...
    def freed(self, group: Group) -> None: ...
    def stopped(self, group: Group, now: float) -> None: ...
    def leave(self, group: Group, lane: Lane, sequence: Sequence, now: float) -> None: ...
    def computes(self, group: Group, stage: int, microbatch: Microbatch, now: float) -> None: ...


class Group:
    """``instances`` in pipeline order with their ``layout`` of layers. ``busy_s`` and ``working_s`` (stage seconds
    computed and seconds passed, both while requests wait) tell the bubbles; ``stalled`` sequences wait for KV from
    elsewhere, ``reserved_blocks`` for sequences that are still there."""

    def __init__(
        self,
        id: int,
        instances: tuple[Instance, ...],
        layout: tuple[range, ...],
        settings: GroupSettings,
        former: Former,
        relief: Relief,
        host: GroupHost,
    ) -> None:
        self.id = id
        self.instances = instances
        self.layout = layout
        self.settings = settings
        self.phase = Phase.SERVING
        self.alive = True
        self.iterations = 0
        self.used_blocks = 0
        self.reserved_blocks = 0
        self.busy_s = 0.0
        self.working_s = 0.0
        self.stalled: dict[Sequence, None] = {}
        self._block_bytes = [len(layers) * settings.sizes.block_layer_bytes for layers in layout]
        self._former, self._relief, self._host = former, relief, host
        first = Queue(settings.block_tokens)
        self.lanes = [
            Lane(first if settings.shared_queue or not i else Queue(settings.block_tokens), settings.block_tokens)
            for i in range(len(instances))
        ]
        self.queues = [first] if settings.shared_queue else [lane.queue for lane in self.lanes]
        self._in_flight = 0
        self._pending = False
        self._computed_s = self._since_s = 0.0
        self._preempted = False

    # --- what others see -------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        if len(self.instances) == 1:
            return self.instances[0].kv_free_bytes // self._block_bytes[0]
        return min(
            instance.kv_free_bytes // size for instance, size in zip(self.instances, self._block_bytes, strict=True)
        )

    @property
    def most_blocks(self) -> int:
        """Blocks of the group if no other group shared its instances' memory."""
        sizes = zip(self.instances, self._block_bytes, strict=True)
        return min(instance.kv_capacity_bytes // size for instance, size in sizes)

    @property
    def running(self) -> int:
        """Sequences with a slot: decoding, in prefill, swapped, or waiting for their KV."""
        prefilling = sum(len(queue.prefilling) for queue in self.queues)
        return sum(lane.size for lane in self.lanes) + prefilling + len(self.stalled) + self._relief.held

    @property
    def queued(self) -> int:
        return sum(len(queue.waiting) for queue in self.queues)

    @property
    def idle(self) -> bool:
        """No microbatch is in flight."""
        return self._in_flight == 0

    def view(self, shortest: bool = False) -> GroupView:
        """``shortest`` names the running request that a migration would move."""
        capacity_blocks = self.used_blocks + self.free_blocks
        candidate = self._shortest() if shortest else None
        sizes = self.settings.sizes
        return GroupView(
            group=self.id,
            instances=tuple(sorted(instance.id for instance in self.instances)),
            phase=self.phase,
            capacity_blocks=capacity_blocks,
            used_blocks=self.used_blocks,
            queued_blocks=sum(queue.queued_blocks for queue in self.queues),
            head_blocks=max(queue.head_blocks for queue in self.queues),
            running=self.running,
            used_bytes=self.used_blocks * sizes.block_bytes,
            base_bytes=len(self.instances) * sizes.base_kv_bytes,
            stalled=len(self.stalled),
            shortest=None if candidate is None else candidate.index,
            shortest_blocks=0 if candidate is None else candidate.blocks,
        )

    def _shortest(self) -> Sequence | None:
        decoding = (sequence for lane in self.lanes for sequence in lane.decodes if sequence not in lane.leaving)
        return min(decoding, key=lambda sequence: (sequence.blocks, sequence.index), default=None)

    def check(self) -> None:
        """Raise AssertionError unless blocks add up over the sequences."""
        held = sum(sequence.blocks for sequence in self.members()) + self._relief.extra_blocks + self.reserved_blocks
        assert held == self.used_blocks, f"group {self.id}: sequences hold {held} blocks of {self.used_blocks}"

    def members(self) -> list[Sequence]:
        """All sequences that hold memory here or are about to."""
        found = [sequence for lane in self.lanes for sequence in (*lane.decodes, *lane.joining)]
        found += [sequence for queue in self.queues for sequence in queue.prefilling]
        return found + list(self.stalled) + self._relief.members()

    # --- memory ----------------------------------------------------------------------------------------------------

    def take(self, blocks: int) -> bool:
        """Take so many blocks; False, and nothing taken, when they do not fit."""
        if blocks > self.free_blocks:
            return False
        self.used_blocks += blocks
        for instance, size in zip(self.instances, self._block_bytes, strict=True):
            instance.kv_used_bytes += blocks * size
        return True

    def give_back(self, blocks: int) -> None:
        self.used_blocks -= blocks
        for instance, size in zip(self.instances, self._block_bytes, strict=True):
            instance.kv_used_bytes -= blocks * size

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give ``sequence`` the blocks that hold ``tokens`` in all; False, and nothing taken, when they do not fit."""
        needed = -(-tokens // self.settings.block_tokens) - sequence.blocks
        if needed > 0:
            if not self.take(needed):
                return False
            sequence.blocks += needed
        return True

    def release(self, sequence: Sequence) -> None:
        self.give_back(sequence.blocks)
        sequence.blocks = 0

    def may_start(self, sequence: Sequence) -> bool:
        """A slot, nobody with an older claim, and for one that lost its KV room for all of it (else two could evict
        each other for ever)."""
        if self._preempted or not self._relief.admits or self.running >= self.settings.max_sequences * len(self.lanes):
            return False
        return not sequence.preempted or self.free_blocks >= min(self.queues[0].demand(sequence), self.most_blocks)

    # --- requests --------------------------------------------------------------------------------------------------

    def accept(self, sequence: Sequence) -> None:
        """A request comes in: to the lane with the fewest, if lanes have queues of their own."""
        lane = min(self.lanes, key=lambda lane: lane.size + len(lane.queue.waiting) + len(lane.queue.prefilling))
        lane.queue.append(sequence)
        self.wake()

    def adopt(self, sequence: Sequence) -> None:
        """A sequence with its KV in place (``blocks`` taken) goes on: to decode, or with its prefill."""
        self.stalled.pop(sequence, None)
        lane = min(self.lanes, key=lambda lane: lane.size)
        if sequence.decodes:
            lane.joining.append(sequence)
        else:
            lane.queue.prefilling.append(sequence)
            lane.queue.prefilling.sort(key=by_arrival)
            self._former.forget()
        self.wake()

    def wake(self) -> None:
        """Idle lanes with work ask for a turn."""
        if self.phase is Phase.CHANGING or not self.alive:
            return
        for lane in self.lanes:
            if not lane.asked and (lane.has_work or self._relief.held):
                self._ask(lane)

    def take_waiting(self) -> list[Sequence]:
        """Remove and return the requests that have not started (again)."""
        self._former.forget()
        return [sequence for queue in self.queues for sequence in queue.take_waiting()]

    def preempt(self, sequence: Sequence, lane: Lane, now: float) -> None:
        """Its KV is dropped, to be recomputed: it goes to the front of the queue, or elsewhere if the group takes
        nobody."""
        if sequence in lane.decodes:
            lane.decodes.remove(sequence)
        else:
            lane.queue.prefilling.remove(sequence)
            self._former.forget()
        self.release(sequence)
        sequence.lose_kv()
        self._preempted = True
        self._host.preempted(sequence)
        if self.phase is Phase.DRAINING:
            self._host.requeue([sequence], now)
        else:
            lane.queue.put_back(sequence)

    def stop(self, now: float) -> None:
        """Begin no more microbatches; the host is told (``stopped``) when the last one has left."""
        self.phase = Phase.CHANGING
        if self.idle:
            self._host.stopped(self, now)

    def dissolve(self) -> list[Sequence]:
        """End the group: its memory is free, its sequences that had started are returned, in order of arrival."""
        for lane in self.lanes:
            for sequence in list(lane.decodes):
                lane.decodes.remove(sequence)
                lane.joining.append(sequence)
        members = sorted(self.members(), key=by_arrival)
        self.give_back(self.used_blocks)
        self.alive = False
        return members

    # --- one microbatch --------------------------------------------------------------------------------------------

    def _ask(self, lane: Lane) -> None:
        lane.asked = True
        self.instances[0].request(Pass(self, lane))

    def launch(self, lane: Lane, now: float) -> Microbatch | None:
        """The lane's next microbatch, or None: nothing can run."""
        lane.asked = False
        if self.phase is Phase.CHANGING:
            return None
        lane.let_join()
        while lane.leaving:
            self._host.leave(self, lane, lane.leaving.pop(), now)
        self._preempted = False
        self._relief.before(self, lane, now)
        self._grow_decodes(lane, now)
        chunks = self._former.form(lane, self)
        if not lane.decodes.size and not chunks:
            chunks = self._unblock(lane, now)
        if not lane.decodes.size and not chunks:
            return None
        lane.asked = True
        microbatch = self._microbatch(lane, chunks)
        self._in_flight += 1
        self._account(now)
        return microbatch

    def begin_stage(self, stage: int, microbatch: Microbatch, now: float) -> float:
        """A microbatch has its turn on one of the instances. Returns the seconds that it takes there."""
        self._host.computes(self, stage, microbatch, now)
        return microbatch.stage_s[stage]

    def _account(self, now: float) -> None:
        """Take up the time since the last microbatch began, if requests waited then."""
        computed_s = sum(instance.busy_s for instance in self.instances)
        if self._pending:
            self.busy_s += computed_s - self._computed_s
            self.working_s += now - self._since_s
        self._pending = self.queued > 0
        self._computed_s, self._since_s = computed_s, now

    def _grow_decodes(self, lane: Lane, now: float) -> None:
        """A KV slot for the next token of each decode; while there is none, somebody gives way (``Relief``)."""
        growing = lane.decodes.needing_block()
        if not growing:
            return
        if self.take(len(growing)):
            for sequence in growing:
                sequence.blocks += 1
            return
        for sequence in sorted(growing, key=by_arrival):
            while sequence in lane.decodes:
                if self.take(1):
                    sequence.blocks += 1
                    break
                self._relief.relieve(self, lane, sequence, now)

    def _unblock(self, lane: Lane, now: float) -> list[PromptChunk]:
        """Partial prefills that hold the memory between them, and nothing under way that would free some: the latest
        gives way. In a group that drains even the last one does, for others compete for the memory."""
        least = 1 if self.phase is Phase.DRAINING else 2
        chunks: list[PromptChunk] = []
        while not chunks and self._stuck:
            partial = {s: owner for owner in self.lanes for s in owner.queue.prefilling if s.blocks}
            if len(partial) < least:
                break
            latest = max(partial, key=by_arrival)
            self.preempt(latest, partial[latest], now)
            self._preempted = False
            chunks = self._former.form(lane, self)
        return chunks

    @property
    def _stuck(self) -> bool:
        return self.idle and not self.stalled and not self._relief.held and not any(lane.size for lane in self.lanes)

    def _microbatch(self, lane: Lane, chunks: list[PromptChunk]) -> Microbatch:
        decodes = lane.decodes.size
        tokens = pairs = context = ending = 0
        for sequence, prefix, size in chunks:
            tokens += size
            pairs += size * prefix + size * (size + 1) // 2
            context += prefix
            ending += prefix + size == sequence.target_tokens
        step = self.settings.step
        whole_s = step.step_s(decodes, lane.decodes.context_tokens, tokens, pairs, context, decodes + ending)
        return Microbatch(decodes + tokens, self._stage_s(whole_s), chunks)

    def _stage_s(self, whole_s: float) -> tuple[float, ...]:
        if len(self.layout) == 1:
            return (whole_s,)  # the same bits as an engine alone
        overhead_s, layers = self.settings.step.deployment.overhead_s.value, self.settings.sizes.layers
        return tuple(overhead_s + (whole_s - overhead_s) * len(own) / layers for own in self.layout)

    def complete(self, lane: Lane, microbatch: Microbatch, now: float) -> None:
        """A microbatch has left the last stage: tokens come out, sequences finish or go on to decode."""
        self.iterations += 1
        self._in_flight -= 1
        lane.asked = False
        lane.decodes.advance()
        finished = lane.decodes.pop_finished()
        for sequence, prefix, size in microbatch.chunks:
            sequence.in_flight -= 1
            if prefix + size == sequence.target_tokens:
                self._end_prefill(lane, sequence, finished, now)
        for sequence in finished:
            self.release(sequence)
            self._host.finished(sequence, self, now)
        if self.phase is Phase.CHANGING:
            if self.idle:
                self._host.stopped(self, now)
            return
        self.wake()
        if finished:
            self._host.freed(self)

    def _end_prefill(self, lane: Lane, sequence: Sequence, finished: list[Sequence], now: float) -> None:
        """A prefill yields a token (the first one, or the next after a loss of KV), and its sequence decodes."""
        lane.queue.prefilling.remove(sequence)
        sequence.generated_tokens += 1
        self._host.first_token(sequence, now)
        if sequence.generated_tokens == sequence.output_tokens:
            finished.append(sequence)
        elif self.settings.shared_queue:
            min(self.lanes, key=lambda lane: lane.size).joining.append(sequence)
        else:
            lane.joining.append(sequence)
