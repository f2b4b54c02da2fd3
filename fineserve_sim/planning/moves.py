"""How a search changes a layout: one move at a time, aimed at what costs most.

A move is drawn in three steps: an engine to change, what to do with it, and where. Engines on islands that lose many requests
come first, and so do engines that lose them themselves; GPUs that lose few take what moves. Every move has a chance, so that no
layout is out of reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random

from fineserve_sim.planning.problem import Group, Home, Layout, Problem, residents
from fineserve_sim.policy.placement import tp_groups


class Moves:
    """Draws moves for the layouts of a problem."""

    def __init__(self, problem: Problem, rng: Random) -> None:
        self._problem, self._rng = problem, rng
        degrees = {option.tp for options in problem.options for option in options}
        self._groups: Mapping[int, Sequence[Group]] = {tp: tp_groups(problem.slots, tp) for tp in degrees}

    def draw(self, layout: Layout, by_gpu: Mapping[int, float], by_model: Sequence[float]) -> Iterator[Layout]:
        """Layouts one move away that keep the rules, without end; where no move is possible, the layout itself."""
        kinds = [self._elsewhere, self._exchanged, self._added, self._fewer, self._taken_over]
        if any(len(options) > 1 for options in self._problem.options):
            kinds.append(self._otherwise)
        while True:
            model = self._model(layout, by_gpu, by_model)
            move = self._rng.choice(kinds)
            changed = move(layout, model, by_gpu)
            yield changed if changed == layout or self._problem.allows(changed) else layout

    def _model(self, layout: Layout, by_gpu: Mapping[int, float], by_model: Sequence[float]) -> int:
        """A model that loses requests, or whose neighbours do."""
        weights = []
        for home, own in zip(layout, by_model, strict=True):
            beside = sum(by_gpu.get(gpu, 0.0) for group in home.groups for gpu in group)
            weights.append(own + beside + 1.0)
        return self._rng.choices(range(len(layout)), weights)[0]

    def _target(self, tp: int, taken: Sequence[Group], by_gpu: Mapping[int, float]) -> Group | None:
        """A group beside those ``taken``, rather one that loses little."""
        used = {gpu for group in taken for gpu in group}
        free = [group for group in self._groups[tp] if used.isdisjoint(group)]
        if not free:
            return None
        weights = [1 / (1 + max(by_gpu.get(gpu, 0.0) for gpu in group)) for group in free]
        return self._rng.choices(free, weights)[0]

    def _elsewhere(self, layout: Layout, model: int, by_gpu: Mapping[int, float]) -> Layout:
        """One instance moves; a model without any gets one."""
        option, groups = layout[model]
        target = self._target(self._problem.options[model][option].tp, groups, by_gpu)
        if target is None:
            return layout
        if not groups:
            return _with(layout, model, Home(option, (target,)))
        gone = self._rng.choices(groups, [1 + max(by_gpu.get(gpu, 0.0) for gpu in group) for group in groups])[0]
        return _with(layout, model, Home(option, tuple(target if group == gone else group for group in groups)))

    def _exchanged(self, layout: Layout, model: int, by_gpu: Mapping[int, float]) -> Layout:
        """An instance changes places with one of another model of its degree."""
        option, groups = layout[model]
        tp = self._problem.options[model][option].tp
        if not groups:
            return layout
        own = self._rng.choice(groups)
        target = self._target(tp, groups, by_gpu)
        here = [other for other in residents(layout).get(target[0] if target else -1, ()) if other != model]
        others = [other for other in here if target in layout[other].groups and own not in layout[other].groups]
        if target is None or not others:
            return layout
        other = self._rng.choice(others)
        swapped = _with(layout, model, Home(option, tuple(target if group == own else group for group in groups)))
        theirs = layout[other]
        return _with(
            swapped, other, Home(theirs.option, tuple(own if group == target else group for group in theirs.groups))
        )

    def _added(self, layout: Layout, model: int, by_gpu: Mapping[int, float]) -> Layout:
        option, groups = layout[model]
        target = self._target(self._problem.options[model][option].tp, groups, by_gpu)
        return layout if target is None else _with(layout, model, Home(option, (*groups, target)))

    def _fewer(self, layout: Layout, model: int, by_gpu: Mapping[int, float]) -> Layout:
        """A model with several instances gives one up."""
        option, groups = layout[model]
        if len(groups) < 2:
            return self._elsewhere(layout, model, by_gpu)
        gone = self._rng.choice(groups)
        return _with(layout, model, Home(option, tuple(group for group in groups if group != gone)))

    def _taken_over(self, layout: Layout, model: int, by_gpu: Mapping[int, float]) -> Layout:
        """A new instance on the GPUs of one that another model can spare, since it has several."""
        option, groups = layout[model]
        tp = self._problem.options[model][option].tp
        spare = [
            (other, group)
            for other, home in enumerate(layout)
            if other != model and len(home.groups) > 1 and self._problem.options[other][home.option].tp == tp
            for group in home.groups
            if group not in groups
        ]
        if not spare:
            return self._elsewhere(layout, model, by_gpu)
        other, target = self._rng.choice(spare)
        left = Home(layout[other].option, tuple(group for group in layout[other].groups if group != target))
        return _with(_with(layout, other, left), model, Home(option, (*groups, target)))

    def _otherwise(self, layout: Layout, model: int, by_gpu: Mapping[int, float]) -> Layout:
        """Another option; at another degree, on other groups."""
        home, options = layout[model], self._problem.options[model]
        if len(options) < 2:
            return self._exchanged(layout, model, by_gpu)
        option = self._rng.choice([number for number in range(len(options)) if number != home.option])
        if options[option].tp == options[home.option].tp:
            return _with(layout, model, Home(option, home.groups))
        groups: list[Group] = []
        for _ in home.groups or ((),):
            if (target := self._target(options[option].tp, groups, by_gpu)) is not None:
                groups.append(target)
        return _with(layout, model, Home(option, tuple(groups))) if groups else layout


def _with(layout: Layout, model: int, home: Home) -> Layout:
    return (*layout[:model], home, *layout[model + 1 :])
