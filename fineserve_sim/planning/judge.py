"""A plan judged on requests that its search never saw, beside the placements of the papers' systems.

A search finds what flatters its model. So a plan is also judged where the model is wrong: at other rates, with steps that take
longer, with other numbers of requests for each model. Steps that take 10 % longer are arrivals and limits in a time that passes
10 % faster: everything that a simulation without moves of models does is measured in steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from fineserve_traces import Trace

from fineserve_sim.experiment.results.stats import BATCHES, Estimate, over_runs
from fineserve_sim.planning.islands import Bools, Simulated, on_time
from fineserve_sim.planning.problem import Home, Layout, Limits, Part, Problem, another_mix, residents

SLOWER = 1.1
"""How many times longer steps take than the model says."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The share of requests on time in one situation that the search never saw: with the plan, and with the placement of the
    best system. That system is chosen by the same requests as the plan. ``half_width``: of the 95 % interval of the
    difference, by batches of consecutive requests. ``worst_model``: the one of which the plan keeps the least share, ``worst``.
    """

    situation: str
    plan: float
    best_system: float
    half_width: float
    worst_model: str
    worst: float

    @property
    def is_worse(self) -> bool:
        """Whether the plan is worse than the best system beyond the interval."""
        return self.plan - self.best_system < -self.half_width


def judged(problem: Problem, rest: Trace, anew: Trace | None, plan: Layout, best_system: Layout) -> list[Judged]:
    """Both layouts on the unseen ``rest`` of the requests, as it is and changed, and on those dealt out ``anew``."""
    layouts = (plan, best_system)
    found = [
        _compared(situation, changed.parts[0].trace, *(on_time(changed, 0, layout) for layout in layouts))
        for situation, changed in _situations(problem, rest, anew)
    ]
    if problem.rules.survives == "gpu":
        kept = (after_a_loss(on(problem, rest), layout) for layout in layouts)
        found.append(_compared("a GPU is lost", rest, *kept))
    return found


def _compared(situation: str, trace: Trace, plan: Bools, best_system: Bools) -> Judged:
    one, other = (float(np.mean(each)) for each in (plan, best_system))
    requests, kept = (np.bincount(trace.model[rows], minlength=len(trace.models)) for rows in (slice(None), plan))
    shares = {name: kept[at] / requests[at] for at, name in enumerate(trace.models) if requests[at]}
    worst = min(shares, key=shares.__getitem__)
    return Judged(situation, one, other, difference(plan, best_system).half_width, worst, float(shares[worst]))


def after_a_loss(problem: Problem, layout: Layout) -> Bools:
    """Which requests are on time without the GPU whose loss costs most. Other instances of its models take its requests."""
    simulated, lost = Simulated(problem), {}
    for gpu in sorted(residents(layout)):
        left = tuple(Home(home.option, tuple(group for group in home.groups if gpu not in group)) for home in layout)
        lost[left] = simulated.loss(left)
    return on_time(problem, 0, max(lost, key=lost.__getitem__))


def difference(one: Bools, other: Bools) -> Estimate:
    """By how much more requests are on time with the one than with the other, with its interval by batch means of pairs."""
    batches = np.array_split(one.astype(float) - other.astype(float), min(BATCHES, len(one)))
    return over_runs([float(batch.mean()) for batch in batches])


def _situations(problem: Problem, rest: Trace, anew: Trace | None) -> Iterator[tuple[str, Problem]]:
    yield "unseen requests", on(problem, rest)
    yield "20 % faster", on(problem, replace(rest, arrival_s=rest.arrival_s / 1.2))
    yield "20 % slower", on(problem, replace(rest, arrival_s=rest.arrival_s * 1.2))
    yield "steps 10 % longer", with_longer_steps(on(problem, rest), SLOWER)
    yield "another mix of models", on(problem, another_mix(rest, seed=1))
    if anew is not None:
        yield "dealt out anew", on(problem, anew)


def on(problem: Problem, trace: Trace) -> Problem:
    """The same problem with these requests alone."""
    return replace(problem, scenario=replace(problem.scenario, trace=trace), parts=(Part(trace),))


def with_longer_steps(problem: Problem, factor: float) -> Problem:
    """The same problem, seen in a time that passes ``factor`` times as fast."""
    limits = problem.limits
    models = tuple(
        replace(
            served,
            ttft_slo_s=served.ttft_slo_s / factor,
            tpot_slo_s=_over(served.tpot_slo_s, factor),
            rate_per_s=served.rate_per_s * factor,
        )
        for served in problem.models
    )
    parts = tuple(
        part._replace(trace=replace(part.trace, arrival_s=part.trace.arrival_s / factor)) for part in problem.parts
    )
    return replace(
        problem,
        scenario=replace(problem.scenario, models=models, trace=parts[0].trace),
        parts=parts,
        limits=Limits(
            tuple(limit_s / factor for limit_s in limits.ttft_s),
            _over(limits.tpot_s, factor),
            _over(limits.e2e_s, factor),
        ),
    )


def _over(limit_s: float | None, factor: float) -> float | None:
    return None if limit_s is None else limit_s / factor


def warnings(rows: Sequence[Judged], promised: float) -> list[str]:
    """Why the plan does not generalise, a line a reason. ``promised``: its share of the requests it is chosen by."""
    found = [
        f"The plan does not generalise: {row.situation}, it keeps {100 * row.plan:.1f} % on time, the best system's placement "
        f"{100 * row.best_system:.1f} %"
        for row in rows
        if row.is_worse
    ]
    unseen = rows[0].plan
    if unseen < promised - MUCH:
        found.append(
            f"The plan keeps {100 * unseen:.1f} % of the unseen requests on time, but {100 * promised:.1f} % of those by which "
            f"it is chosen: the trace changes, or more requests are needed"
        )
    return found


MUCH = 0.03
"""A plan that keeps so much less of what it never saw is told so."""
