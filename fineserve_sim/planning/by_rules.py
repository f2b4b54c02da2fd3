"""A first layout that keeps the rules of a plan, which the placements of systems do not know."""

from __future__ import annotations

from fineserve_sim.planning.problem import Group, Home, Layout, Problem
from fineserve_sim.policy.placement import tp_groups


def layout_by_rules(problem: Problem) -> Layout:
    """Place the models, the largest first, each on the allowed GPUs with most memory left. A model that must survive a loss
    gets two such places. A model may find no place."""
    layout = tuple(Home(option, ()) for option in problem.first)
    by_size = sorted(range(len(layout)), key=lambda model: -_bytes_of(problem, model))
    for model in by_size:
        layout = _with_an_engine(problem, layout, model)
        if problem.rules.survives and layout[model].groups:
            layout = _with_an_engine(problem, layout, model)
    return layout


def _bytes_of(problem: Problem, model: int) -> int:
    return problem.demands[model][problem.first[model]].engine_bytes


def _with_an_engine(problem: Problem, layout: Layout, model: int) -> Layout:
    """The layout with one more engine of the model, on its first option and the emptiest GPUs that allow it. A second engine
    is where the model outlives the loss of the first, if it can be."""
    ledger, home = problem.ledger(layout), layout[model]
    assert ledger is not None

    def emptiness(group: Group) -> int:
        return -min(ledger.left_bytes(gpu) for gpu in group)

    found = layout
    for group in sorted(tp_groups(problem.slots, problem.options[model][home.option].tp), key=emptiness):
        if any(set(group) & set(own) for own in home.groups):
            continue
        tried = (*layout[:model], Home(home.option, (*home.groups, group)), *layout[model + 1 :])
        if problem.allows(tried):
            if not home.groups or model not in problem.exposed(tried):
                return tried
            found = tried if found is layout else found
    return found
