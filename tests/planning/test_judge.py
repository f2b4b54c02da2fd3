"""A plan is judged by requests that its search never saw, and by situations in which the model is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fineserve_traces import Trace

from fineserve_sim.planning.find import Budget, best_system, search
from fineserve_sim.planning.islands import Simulated, on_time
from fineserve_sim.planning.judge import Judged, difference, judged, on, warnings, with_longer_steps
from fineserve_sim.planning.problem import Problem, another_mix
from fineserve_sim.planning.wish import ModelWish, Wish, problem_of

MODELS = (ModelWish("large", "qwen2.5-14b", (("W16A16", 1),)), ModelWish("small", "llama-3.2-1b", (("W16A16", 1),)))


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    path = tmp_path_factory.mktemp("judge") / "trace.csv"
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(1 / 40, 90))
    prompts, outputs = rng.integers(200, 4000, 90), rng.integers(2, 20, 90)
    rows = [f"{a:.4f},{p},{o}" for a, p, o in zip(arrival_s, prompts, outputs, strict=True)]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return problem_of(Wish(path, MODELS, gpus=1, ttft_slo_s=0.3, spread=True))


def trace_of(problem: Problem) -> Trace:
    return problem.parts[0].trace


def test_requests_on_time_are_those_that_the_search_counts(problem: Problem) -> None:
    layout = search(problem, Budget(3)).layout
    alone = on(problem, trace_of(problem))
    kept = on_time(alone, 0, layout)
    assert 0 < kept.sum() < len(kept)
    assert Simulated(alone).loss(layout) == (~kept).sum()


def test_a_plan_is_judged_in_every_situation(problem: Problem) -> None:
    layout = search(problem, Budget(3)).layout
    name, theirs = best_system(problem)
    rows = judged(problem, trace_of(problem), None, layout, theirs)
    assert name in {"fineserve", "prism", "muxserve++", "s-partition", "static*", "dedicated"}
    by_situation = {row.situation: row.plan for row in rows}
    assert list(by_situation) == [
        "unseen requests",
        "20 % faster",
        "20 % slower",
        "steps 10 % longer",
        "another mix of models",
    ]
    assert by_situation["20 % faster"] < by_situation["unseen requests"] < by_situation["20 % slower"]
    assert by_situation["steps 10 % longer"] < by_situation["unseen requests"]


def test_longer_steps_are_a_faster_time(problem: Problem) -> None:
    """With all limits twice as long and half the requests a second, steps that take twice as long change nothing."""
    layout = search(problem, Budget(3)).layout
    trace = trace_of(problem)
    slow = on(problem, replace(trace, arrival_s=trace.arrival_s * 2))
    wide = replace(slow, limits=slow.limits._replace(ttft_s=(0.6, 0.6)))
    models = tuple(
        replace(served, ttft_slo_s=0.6, rate_per_s=served.rate_per_s / 2) for served in problem.scenario.models
    )
    wide = replace(wide, scenario=replace(wide.scenario, models=models))
    assert (on_time(with_longer_steps(wide, 2.0), 0, layout) == on_time(on(problem, trace), 0, layout)).all()


def test_another_mix_moves_a_part_of_the_requests(problem: Problem) -> None:
    before, after = trace_of(problem), another_mix(trace_of(problem), seed=1)
    assert 0 < np.mean(before.model != after.model) < 0.3
    assert (before.arrival_s == after.arrival_s).all()


def test_a_difference_has_the_interval_of_pairs() -> None:
    one = np.ones(100, dtype=np.bool_)
    same = difference(one, one)
    assert (same.mean, same.half_width) == (0.0, 0.0)
    other = one.copy()
    other[:10] = False
    assert difference(one, other).mean == pytest.approx(0.1)
    assert difference(one, other).half_width > 0.05


def test_a_plan_that_does_not_generalise_is_told_so() -> None:
    fine = Judged("unseen requests", 0.97, 0.95, 0.01, "a", 0.9)
    assert warnings([fine, Judged("20 % faster", 0.94, 0.945, 0.01, "a", 0.9)], 0.98) == []
    worse, changed = warnings([replace(fine, plan=0.91)], 0.98)
    assert worse.startswith("The plan does not generalise: unseen requests, it keeps 91.0 % on time")
    assert "91.0 % of the unseen requests on time, but 98.0 %" in changed


def test_rates_are_those_of_the_requests_that_are_seen(problem: Problem, tmp_path: Path) -> None:
    trace = trace_of(problem)
    for served in problem.models:
        own = np.count_nonzero(trace.model == trace.models.index(served.id))
        assert served.rate_per_s == pytest.approx(own / trace.arrival_s[-1])
