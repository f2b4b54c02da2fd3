"""Which work a list of runs is: a run each, or, where they are fewer than the workers, components of large ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fineserve_sim.cluster import simulate
from fineserve_sim.cluster.components import Apart, Piece, taken_apart, why_whole
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.run import scenario
from fineserve_sim.experiment.run.store import Store
from fineserve_sim.experiment.run.work import Cell, Part, TellShare, named

WORTH_REQUESTS = 100_000
"""A run of fewer requests is done in about the time that other processes need to start."""

WORTH_WHEN_READY = 5_000
"""Where they have started, a run of fewer requests is done in about the time that its components need to travel."""


@dataclass(slots=True)
class _Pieces:
    """A run that is out in components, and what has come back of it."""

    cell: Cell
    apart: Apart
    found: dict[int, Piece] = field(default_factory=dict)

    def share_of(self, part: Part) -> float:
        """Its share of the run's requests."""
        return len(part.component.requests) / len(self.apart.scenario.whole_trace)

    def store(self, out: Path) -> None:
        """The run as its components make it, in their order; all are back."""
        pieces = [self.found[number] for number in range(len(self.apart.components))]
        Store(out).write(self.cell.key, self.apart.scenario, self.cell.run.warmup, self.apart.merged(pieces))


class Spread:
    """Gives an executor its work, and stores what comes back in components. ``tell`` hears how much of the cells that are not
    stored yet is done, in cells."""

    def __init__(self, cells: Sequence[Cell], executor: Executor, out: Path, tell: TellShare) -> None:
        self._cells = cells
        self._executor = executor
        self._out = out
        self._tell = tell
        self._apart: dict[str, _Pieces] = {}
        self._shares: dict[str, dict[int, float]] = {}

    def stored(self) -> Iterator[Cell]:
        """Do all cells; each when it is stored, in order of completion."""
        for work, found in self._executor.each(self._works(), self._out, self._note):
            if isinstance(work, Part):
                pieces = self._apart[work.key]
                pieces.found[work.number] = found
                self._note(work, 1.0)
                if len(pieces.found) < len(pieces.apart.components):
                    continue
                del self._apart[work.key]
                pieces.store(self._out)
            self._shares.pop(work.key, None)
            yield work if isinstance(work, Cell) else pieces.cell

    def _note(self, work: Cell | Part, share: float) -> None:
        of_key = self._shares.setdefault(work.key, {})
        if isinstance(work, Part):
            of_key[work.number] = share * self._apart[work.key].share_of(work)
        else:
            of_key[0] = share
        self._tell(sum(share for of_key in self._shares.values() for share in of_key.values()))

    def _works(self) -> Iterator[Cell | Part]:
        """Runs that stay whole first: they take longest."""
        few = len(self._cells) < self._executor.workers
        divisible = {cell.key: cell for cell in self._cells if few and _may_divide(cell, self._executor.ready)}
        yield from (cell for cell in self._cells if cell.key not in divisible)
        for key, cell in divisible.items():
            with named(str(cell.run)):
                apart = taken_apart(scenario(cell.run))
            if apart is None:
                yield cell
                continue
            self._apart[key] = _Pieces(cell, apart)
            for number, component in enumerate(apart.components):
                yield Part(key, str(cell.run), number, component)


def _may_divide(cell: Cell, ready: bool) -> bool:
    if cell.decisions or cell.summed is not None or cell.simulate is not simulate:
        return False
    described, worth = scenario(cell.run), WORTH_WHEN_READY if ready else WORTH_REQUESTS
    return why_whole(described) is None and len(described.whole_trace) >= worth
