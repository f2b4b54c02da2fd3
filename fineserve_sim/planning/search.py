"""The search for a layout: descent by simulated moves, kicks where no move helps.

``Search`` starts at the best of given layouts and draws moves in windows. The islands of a window are simulated side by side,
and the best layout of the window is taken if it costs less. When several windows in a row bring nothing, the layout is
kicked (some moves at once) and the descent goes on from there; the best layout of all is kept.

The order of moves depends on the seed and on losses alone, never on time or on the number of workers. So many windows give the
same answer on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from random import Random

from fineserve_sim.cluster.compose.memory import slots_of
from fineserve_sim.planning.islands import Island, Simulated, places_of
from fineserve_sim.planning.moves import Moves
from fineserve_sim.planning.problem import Home, Layout, Problem
from fineserve_sim.policy.interfaces import Placement
from fineserve_sim.policy.placement import tp_groups

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
    """The best layout so far: its loss in weighted requests, and how many islands were simulated until then. ``stopped``: by
    the user, before its time."""

    layout: Layout
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


def packed(problem: Problem, simulated: Simulated) -> Layout:
    """Models one after the other, those of the largest engines first, each on the GPUs where it costs least, by simulation. It
    fills GPUs before it takes empty ones, which other placements rarely do."""
    layout: Layout = tuple(Home(option, ()) for option in problem.first)
    first = [demands[option] for demands, option in zip(problem.demands, problem.first, strict=True)]
    largest = sorted(range(len(first)), key=lambda model: -first[model].engine_bytes * first[model].tp)
    for model in largest:
        groups = tp_groups(slots_of(problem.scenario), first[model].tp)
        option = problem.first[model]
        tried = [(*layout[:model], Home(option, (group,)), *layout[model + 1 :]) for group in groups]
        able = {
            tuple(sorted(place.island for place in places_of(each))): each for each in tried if problem.allows(each)
        }
        simulated.ensure({place.island: inf for each in able.values() for place in places_of(each)})
        layout = min(able.values(), key=simulated.loss, default=layout)
    return layout


class Search:
    """Improves layouts of a problem. ``best`` is there after the first ``begin``."""

    def __init__(self, problem: Problem, simulated: Simulated, seed: int = 0) -> None:
        self._problem, self._simulated, self._rng = problem, simulated, Random(seed)
        self._moves = Moves(problem, self._rng)
        self.best: Best

    def begin(self, starts: Sequence[Layout]) -> None:
        """Take the best of these layouts. Raises ValueError if none keeps the rules and fits."""
        allowed = [layout for layout in dict.fromkeys(starts) if self._problem.allows(layout)]
        self._simulated.ensure({place.island: inf for layout in allowed for place in places_of(layout)})
        costs = {layout: self._cost(layout) for layout in allowed}
        if not costs or min(costs.values())[0] == inf:
            raise ValueError("no placement to start from keeps the rules and fits the GPUs")
        self._layout = min(allowed, key=lambda layout: costs[layout])
        self._keep(self._layout)

    def improve(self) -> Iterator[Best]:
        """Search on as long as there is something new to try: the best layout after each window."""
        here, tries, stale = self._layout, 0, 0
        while stale < STALE:
            runs = self._simulated.runs
            found = self._window(here)
            stale = 0 if self._simulated.runs > runs else stale + 1
            if self._cost(found) < self._cost(here):
                here, tries = found, 0
            else:
                tries += 1
            if self._cost(here) < self._cost(self.best.layout):
                self._keep(here)
            if tries >= PATIENCE:
                here, tries = self._kicked(self.best.layout), 0
            yield self.best

    def _keep(self, layout: Layout) -> None:
        self.best = Best(layout, self._simulated.loss(layout), self._simulated.runs)

    def _cost(self, layout: Layout) -> tuple[float, int, int]:
        """What is compared: the loss, then options further down, then instances."""
        return (
            self._simulated.loss(layout),
            sum(home.option for home in layout),
            sum(len(home.groups) for home in layout),
        )

    def _window(self, layout: Layout) -> Layout:
        """The best of some layouts one move away; the layout itself if none costs less."""
        simulated, now = self._simulated, {place.island for place in places_of(layout)}
        drawn = self._moves.draw(layout, simulated.by_gpu(layout), simulated.by_model(layout))
        window: list[Layout] = []
        wanted: dict[Island, float] = {}
        for found in dict.fromkeys(islice(drawn, DRAWS)):
            changed = {place.island for place in places_of(found)}
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
        able = [each for each in window if all(simulated.known[place.island].whole for place in places_of(each))]
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
