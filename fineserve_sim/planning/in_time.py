"""A plan in time: a placement for each window of a long trace, chosen by the window before.

The first window is looked at and not judged. At the start of each later one the search goes on from the placement that is
there, on the requests of the window that has passed. The new placement is taken if it pays:

    late requests that it would have spared > requests that come while the weights of its new engines load

Models keep the precision and degree of the first plan. The result is a timetable of placements. The cluster follows it
with all that its moves cost: weights cross links, and requests wait where an engine had to leave first. It stands beside the
first plan kept for all of the trace, the plan that knows all of the trace beforehand, the first plan under ``drifting``
residency, and Prism's residency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from fineserve_traces import Trace

from fineserve_sim.cluster import simulate
from fineserve_sim.cluster.compose.policies import build_activation_cost
from fineserve_sim.planning.find import Budget, search
from fineserve_sim.planning.impossible import check_survives
from fineserve_sim.planning.islands import Bools, kept_of
from fineserve_sim.planning.judge import difference
from fineserve_sim.planning.problem import Home, Layout, Limits, Problem
from fineserve_sim.planning.target import Target
from fineserve_sim.planning.wish import Wish, plan_document, problem_on, whole_of
from fineserve_sim.systems import SystemSpec
from fineserve_sim.systems.spec import TimetableResidencySpec

RIVALS = ("the first plan kept", "one plan that knows all", "the first plan, drifting", "prism")
MEMORY: Mapping[str, Any] = {"policy": "kvcached"}
"""KV of engines that come and go: pages."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the trace: when it begins, its layout, and the engines that came for it with their bytes. ``on_time``: the
    share of its requests under the timetable, ``rivals`` under each of ``RIVALS``."""

    from_s: float
    layout: Layout
    came: int
    moved_bytes: int
    on_time: float
    rivals: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Timetable:
    """The layouts that the searches found, one a window. ``wish``: with the options of the first plan. ``knows_all``: the
    layout of the one plan for all of the trace; None where the user stopped the searches. Then the last layout stays."""

    wish: Wish
    every_s: float
    layouts: tuple[Layout, ...]
    knows_all: Layout | None

    @property
    def stopped(self) -> bool:
        return self.knows_all is None


@dataclass(frozen=True, slots=True)
class InTime:
    """``on_time``: share over all judged windows; ``rivals``: of each of ``RIVALS``, with the half-width of the 95 % interval
    of the difference."""

    windows: tuple[Window, ...]
    on_time: float
    rivals: tuple[tuple[float, float], ...]


def check(wish: Wish, target: Target | None) -> None:
    """Raises ValueError for a share to keep, as a plan in time takes all GPUs."""
    if target is not None:
        raise ValueError("a plan in time (--every) is on all GPUs: leave out the target")


def planned(wish: Wish, every_s: float, budget: Budget) -> Timetable:
    """Plan each window. The budget is for all searches together. Ctrl-C ends all of them, with the layouts so far. Raises
    ValueError for a trace of fewer than two windows, and as ``problem_of`` and ``check_survives``."""
    trace = whole_of(wish).whole_trace
    windows = windows_of(trace, every_s)
    if len(windows) < 2:
        raise ValueError(
            f"--every {every_s:g}: the requests come within {trace.arrival_s[-1]:.0f} s, less than two windows"
        )
    each = budget.part(len(windows) + 1)
    problem = problem_on(wish, windows[0])
    first = search(problem, each)
    check_survives(problem, first.layout)
    own = settled(wish, first.layout)
    layouts = [_as_only_options(first.layout)]
    if not first.stopped:
        layouts += _followed(own, layouts[0], windows[:-1], each)
    there = len(layouts) == len(windows)
    best = search(problem_on(own, trace), each) if there else None
    layouts += [layouts[-1]] * (len(windows) - len(layouts))
    return Timetable(own, every_s, tuple(layouts), None if best is None or best.stopped else best.layout)


def windows_of(trace: Trace, every_s: float) -> list[Trace]:
    """The requests of each window, their times from its start on; a last one that is less than half as long is left out."""
    number = (trace.arrival_s // every_s).astype(int)
    whole = int(number[-1]) + (trace.arrival_s[-1] % every_s >= every_s / 2)
    rows = [np.flatnonzero(number == window) for window in range(whole)]
    if not all(map(len, rows)):
        raise ValueError(f"--every {every_s:g}: window {[*map(len, rows)].index(0)} has no requests; take longer ones")
    found = [trace.take(each) for each in rows]
    return [replace(each, arrival_s=each.arrival_s - window * every_s) for window, each in enumerate(found)]


def settled(wish: Wish, layout: Layout) -> Wish:
    """The wish with each model in the option of a layout alone."""
    models = [
        replace(each, options=(each.options[home.option],)) for each, home in zip(wish.models, layout, strict=True)
    ]
    return replace(wish, models=tuple(models))


def _as_only_options(layout: Layout) -> Layout:
    return tuple(Home(0, home.groups) for home in layout)


def _followed(wish: Wish, first: Layout, windows: Sequence[Trace], budget: Budget) -> Iterator[Layout]:
    """The layout of each next window: a search's on the requests so far, if its moves pay. None any
    more once a search is stopped."""
    now = first
    for window in windows:
        problem = problem_on(wish, window)
        best, simulated = search(problem, budget, known=[now]), budget.simulated(problem)
        if best.stopped:
            return
        spared = simulated.loss(now) - simulated.loss(best.layout)
        if spared > problem.worth / len(window) * waiting(problem, now, best.layout):
            now = best.layout
        yield now


def waiting(problem: Problem, old: Layout, new: Layout) -> float:
    """The requests that come to new engines while their weights load."""
    cost = build_activation_cost(TimetableResidencySpec.model_validate({"entries": [{"from_s": 0, "groups": {}}]}))
    total = 0.0
    for served, before, after, demands in zip(problem.models, old, new, problem.demands, strict=True):
        for group in set(after.groups) - set(before.groups):
            load_s = cost.alone_s(demands[after.option].weight_bytes, len(group))
            total += served.rate_per_s / len(after.groups) * load_s
    return total


def system_of(wish: Wish, layouts: Sequence[Layout], every_s: float) -> dict[str, Any]:
    """The system that follows these layouts, one a window, as a file has it."""
    entries: list[dict[str, Any]] = []
    for window, layout in enumerate(layouts):
        if not window or layout != layouts[window - 1]:
            entries.append({"from_s": window * every_s, "groups": _groups(wish, layout)})
    return {
        "name": "plan",
        "title": "Plan in time",
        "base": "prism",
        "placement": {"policy": "pinned", "groups": _groups(wish, layouts[0])},
        "scheduler": {"policy": "adaptive"},
        "memory": dict(MEMORY),
        "residency": {"policy": "timetable", "entries": entries},
    }


def _groups(wish: Wish, layout: Layout) -> dict[str, list[list[int]]]:
    return {
        each.id: [list(group) for group in home.groups]
        for each, home in zip(wish.models, layout, strict=True)
        if home.groups
    }


def table(found: InTime) -> pd.DataFrame:
    """A row a window: when it begins, what came and what that weighs, and the shares of its requests on time."""
    return pd.DataFrame(
        {
            "from_s": window.from_s,
            "came": window.came,
            "moved_bytes": window.moved_bytes,
            "on_time": window.on_time,
            **dict(zip(RIVALS, window.rivals, strict=True)),
        }
        for window in found.windows
    )


def document(found: Timetable) -> dict[str, Any]:
    """The plan as the text of an experiment: what ``run`` and ``compare`` take."""
    system = system_of(found.wish, found.layouts, found.every_s)
    return plan_document(found.wish, found.layouts[0]) | {"systems": [system]}


def _kept(wish: Wish, system: Mapping[str, Any] | None = None) -> Bools:
    """Which requests of the whole trace are on time under a system of a file, or under Prism."""
    whole = whole_of(wish, "prism")
    if system is not None:
        said = {name: value for name, value in system.items() if name != "base"}
        whole = replace(whole, system=SystemSpec.model_validate(whole.system.model_dump() | said))
    trace, limits = whole.whole_trace, Limits((wish.ttft_slo_s,), wish.tpot_slo_s, wish.e2e_slo_s)
    return kept_of(trace, simulate(whole), np.full(len(trace), wish.ttft_slo_s), limits)


def judged(found: Timetable) -> InTime:
    """Shares on time of the timetable and of its rivals. Raises ValueError where the searches were stopped."""
    wish, every_s, layouts, best = found.wish, found.every_s, found.layouts, found.knows_all
    if best is None:
        raise ValueError("the searches were stopped: the plan so far is not judged")
    trace = whole_of(wish).whole_trace
    kept = _kept(wish, system_of(wish, layouts, every_s))
    first, known = (system_of(wish, [layout], every_s) for layout in (layouts[0], best))
    drifting = first | {"residency": {"policy": "drifting"}}
    others = [_kept(wish, system) for system in (first, known, drifting, None)]
    number = (trace.arrival_s // every_s).astype(int)
    demands = problem_on(wish, trace).demands
    windows = []
    for window, layout in enumerate(layouts):
        rows = number == window
        came = [
            (demands[model][home.option].weight_bytes, group)
            for model, home in enumerate(layout if window else ())
            for group in set(home.groups) - set(layouts[window - 1][model].groups)
        ]
        shares = [float(np.mean(each[rows])) for each in (kept, *others)]
        moved_bytes = sum(size * len(group) for size, group in came)
        windows.append(Window(window * every_s, layout, len(came), moved_bytes, shares[0], tuple(shares[1:])))
    judged = (number >= 1) & (number < len(layouts))
    rivals = [(float(np.mean(each[judged])), difference(kept[judged], each[judged]).half_width) for each in others]
    return InTime(tuple(windows), float(np.mean(kept[judged])), tuple(rivals))
