"""The search for a layout: descent by simulated moves, kicks where no move helps.

``Search`` tries given layouts one after the other, starts at the best of them, and draws moves in windows. The islands of a
window are simulated side by side, and the best layout of the window is taken if it costs less. When several windows in a row
bring nothing, the layout is kicked (some moves at once) and the descent goes on from there; the best layout of all is kept.

The order of moves depends on the seed and on losses alone, never on time or on the number of workers. So many windows give the
same answer on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from random import Random

from fineserve_sim.planning.islands import Island, Simulated, places_of
from fineserve_sim.planning.moves import Moves
from fineserve_sim.planning.problem import Home, Layout, Problem
from fineserve_sim.planning.target import Target
from fineserve_sim.policy.interfaces import Placement

WINDOW = 8
"""Moves that are tried side by side."""

PATIENCE = 30
"""Windows without a better layout, after which the layout is kicked."""

KICK = 3
"""Moves of a kick."""

STALE = 100
"""Windows without an island that is new, after which there is nothing left to try."""

DRAWS = 40
"""Moves that are drawn to fill a window: many change nothing or are known already."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best layout so far: its loss in weighted requests, in all and by model, and how many islands were simulated until
    then. ``stopped``: by the user, before its time."""

    layout: Layout
    late: tuple[float, ...]
    loss: float
    runs: int
    stopped: bool = False


def layout_of(problem: Problem, placement: Placement) -> Layout:
    """A placement of the models in their first options that fit, as a layout."""
    groups: dict[str, list[tuple[int, ...]]] = {served.id: [] for served in problem.models}
    for instance in placement.instances:
        groups[instance.model].append(instance.gpus)
    return tuple(
        Home(option, tuple(dict.fromkeys(groups[served.id])))
        for served, option in zip(problem.models, problem.first, strict=True)
    )


class Search:
    """Improves layouts of a problem. Where a target is asked of each model, what misses it comes before what is late in all.
    ``best``: so far."""

    def __init__(self, problem: Problem, simulated: Simulated, seed: int = 0, target: Target | None = None) -> None:
        self._problem, self._simulated, self._rng = problem, simulated, Random(seed)
        self._target = target or Target()
        self._moves = Moves(problem, self._rng)
        self.best: Best | None = None

    def improve(self, starts: Iterable[Layout]) -> Iterator[Best]:
        """Try these layouts, then search on from the best as long as there is something new to try: the best layout after each
        start and each window. Raises ValueError if no start keeps the rules and fits."""
        for layout in starts:
            if self._problem.allows(layout):
                self._start_at(layout)
            if self.best is not None:
                yield self.best
        if self.best is None:
            raise ValueError("no placement to start from keeps the rules and fits the GPUs")
        yield from self._descend(self.best)

    def _start_at(self, layout: Layout) -> None:
        """Take the layout if it is the best so far. It is not simulated further than to know that it is not."""
        simulated, most = self._simulated, inf if self.best is None else self.best.loss
        islands = {place.island for place in places_of(self._problem, layout)}
        simulated.ensure(dict.fromkeys(islands, most))
        whole = all(simulated.known[island].whole for island in islands) and simulated.loss(layout) < inf
        if whole and (self.best is None or self._cost(layout) < self._cost(self.best.layout)):
            self._keep(layout)

    def _descend(self, best: Best) -> Iterator[Best]:
        here, tries, stale = best.layout, 0, 0
        while stale < STALE:
            runs = self._simulated.runs
            found = self._window(here)
            stale = 0 if self._simulated.runs > runs else stale + 1
            if self._cost(found) < self._cost(here):
                here, tries = found, 0
            else:
                tries += 1
            if self._cost(here) < self._cost(best.layout):
                best = self._keep(here)
            if tries >= PATIENCE:
                here, tries = self._kicked(best.layout), 0
            yield best

    def _keep(self, layout: Layout) -> Best:
        late = tuple(self._simulated.by_model(layout))
        self.best = Best(layout, late, self._simulated.loss(layout), self._simulated.runs)
        return self.best

    def _cost(self, layout: Layout) -> tuple[float, float, int, int]:
        """What is compared: what single models miss of a target, the loss, then options further down, then instances."""
        return (
            self._target.too_late(self._simulated.by_model(layout), self._problem.lost) if self._target.each else 0.0,
            self._simulated.loss(layout),
            sum(home.option for home in layout),
            sum(len(home.groups) for home in layout),
        )

    def _window(self, layout: Layout) -> Layout:
        """The best of some layouts one move away; the layout itself if none costs less."""
        simulated, now = self._simulated, {place.island for place in places_of(self._problem, layout)}
        drawn = self._moves.draw(layout, simulated.by_gpu(layout), simulated.by_model(layout))
        window: list[Layout] = []
        wanted: dict[Island, float] = {}
        for found in dict.fromkeys(islice(drawn, DRAWS)):
            changed = {place.island for place in places_of(self._problem, found)}
            spared = (
                sum(simulated.of(island).sum for island in now - changed)
                + self._unserved(layout)
                - self._unserved(found)
            )
            fresh = {island: spared for island in changed - now if not simulated.is_known(island, spared)}
            if len(wanted) + len(fresh) <= 2 * WINDOW:
                window.append(found)
                wanted |= {island: max(limit, wanted.get(island, 0.0)) for island, limit in fresh.items()}
        simulated.ensure(wanted)
        able = [
            each
            for each in window
            if all(simulated.known[place.island].whole for place in places_of(self._problem, each))
        ]
        return min([layout, *able], key=self._cost)

    def _unserved(self, layout: Layout) -> float:
        return sum(self._problem.unserved(layout))

    def _kicked(self, layout: Layout) -> Layout:
        """Some moves at once; the layout itself if they do not fit."""
        kicked = layout
        for _ in range(KICK):
            drawn = self._moves.draw(kicked, {}, [0.0] * len(layout))
            kicked = next((found for found in islice(drawn, DRAWS) if found != kicked), kicked)
        return kicked if self._simulated.loss(kicked) < inf else layout
