"""The executor of data-parallel ranks, which step together (``latency/ranks.py`` has the parts of a step).

Each rank is an engine with a queue, KV and a batch of its own. All form their batches at one moment. The step lasts as long as
the slowest of them, and all end it together. A rank without requests takes part in it with a dummy token. When no rank has a
batch, all rest until a request comes. Each step is an event: none are merged.
"""

from __future__ import annotations

from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.engine.loop import Engine, Executor
from fineserve_sim.cluster.engine.sequence import Lane
from fineserve_sim.latency.ranks import DUMMY, RanksStepModel


class Together:
    """The ranks of one group. ``waits``: an event will come at which they form batches."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ranks: list[Rank] = []
        self._since_s = 0.0
        self.waits = False

    @property
    def size(self) -> int:
        return len(self._ranks)

    def join(self, rank: Rank) -> None:
        """Add a rank; the id of its engine is higher than all earlier ones."""
        self._ranks.append(rank)

    def start(self, now: float) -> None:
        """Form batches at this moment, after everything else that happens in it; under way, at the end of the step."""
        if not self.waits:
            self.waits = True
            self._clock.at(now, self._ranks[0].start_order, self._form)

    def _form(self, now: float) -> None:
        """Every rank stands between two steps."""
        for rank in self._ranks:
            rank.engine.host.settle(rank.engine, now, rank.order)
            rank.engine.turn(rank.lane, now)
        if any(rank.lane.launched for rank in self._ranks):
            batches = [rank.engine.batch_of(rank.lane) if rank.lane.launched else DUMMY for rank in self._ranks]
            self._since_s = now
            self._clock.at(now + self._ranks[0].step.group_s(batches), self._ranks[0].order, self._end)
            return
        self.waits = False
        if any(rank.lane.asked for rank in self._ranks):  # one gave memory back
            self.start(now)

    def _end(self, now: float) -> None:
        """The step ends in all ranks, and the next one begins."""
        for rank in self._ranks:
            if rank.lane.launched:
                rank.finish(self._since_s, now)
        self._form(now)


class Rank(Executor):
    """One engine of ``together``. Its step takes as long as the step of the group."""

    def __init__(self, engine: Engine, together: Together) -> None:
        super().__init__(engine)
        assert isinstance(engine.step, RanksStepModel)
        self.step = engine.step
        (self.lane,) = engine.lanes
        self.start_order = order_of(Kind.START, engine.index)
        self._together = together
        together.join(self)

    def start(self, now: float) -> None:
        if not self.lane.launched:
            self.lane.asked = True
            self._together.start(now)

    def launch(self, lane: Lane, now: float) -> None:
        engine = self.engine
        engine.composition_changed = False
        lane.launched = True
        engine.host.launched(engine, lane, now, sure=True)

    def finish(self, since_s: float, now: float) -> None:
        """The rank's batch, which began then, is done."""
        engine, host = self.engine, self.engine.host
        host.settle(engine, now, self.order)
        if host.logs:
            host.computed(engine, self.lane, since_s, now, 1, 0)
        if engine.complete(self.lane, now):
            host.memory_freed(engine, now)

    def rest(self, lane: Lane, now: float) -> None:
        """No request, or none that has memory."""
        engine, host = self.engine, self.engine.host
        host.touch(engine)
        engine.composition_changed = False
        if lane.has_work:
            host.stalled(engine, now)
        else:
            host.rested(engine, now)
