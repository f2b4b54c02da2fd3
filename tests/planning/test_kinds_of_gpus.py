"""Plans on GPUs of several kinds: islands know their kind, and the cheapest of all kinds and mixes is found."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fineserve_sim as fs
from fineserve_sim.cluster import Fate, simulate
from fineserve_sim.experiment import experiment_from
from fineserve_sim.planning.fewest import ask, cheapest
from fineserve_sim.planning.find import Budget, most_on_time, search
from fineserve_sim.planning.gpus import numbers_of
from fineserve_sim.planning.islands import Simulated, places_of
from fineserve_sim.planning.problem import Home, Layout, Problem, Rules
from fineserve_sim.planning.sure import MixBand, error_of, mix_band
from fineserve_sim.planning.target import Target
from fineserve_sim.planning.wish import ModelWish, Wish, plan_document, problem_of
from fineserve_sim.systems.spec import PinnedPlacementSpec

MODELS = (ModelWish("large", "qwen2.5-14b", (("W16A16", 1),)), ModelWish("small", "llama-3.2-1b", (("W16A16", 1),)))
PRICES = {"h100-sxm": 3.0, "l40s": 1.0}


@pytest.fixture(scope="module")
def wish(tmp_path_factory: pytest.TempPathFactory) -> Wish:
    """The large model has long prompts, which an L40S is too slow for; the small one does well there."""
    rng = np.random.default_rng(4)
    times = np.cumsum(rng.exponential(1 / 60, 90))
    rows = [f"{a:.4f},{'large,3500' if n % 10 == 0 else 'small,3000'},10" for n, a in enumerate(times)]
    path = tmp_path_factory.mktemp("kinds") / "trace.csv"
    path.write_text("arrival_s,model,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return Wish(path, MODELS, gpus={"h100-sxm": 2, "l40s": 2}, ttft_slo_s=0.4)


@pytest.fixture(scope="module")
def problem(wish: Wish) -> Problem:
    return problem_of(wish)


def late_in_the_whole(problem: Problem, layout: Layout) -> float:
    """The loss of a layout by one simulation of the whole cluster a part."""
    groups = {served.id: home.groups for served, home in zip(problem.models, layout, strict=True)}
    pinned = problem.scenario.system.model_copy(update={"placement": PinnedPlacementSpec(groups=groups)})
    total = 0.0
    for part in problem.parts:
        result = simulate(replace(problem.scenario, system=pinned, trace=part.trace, sample_s=0.0))
        on_time = result.first_token_s - part.trace.arrival_s <= problem.limits.ttft_s[0]
        total += part.weight * np.count_nonzero(~((result.fate == Fate.FINISHED) & on_time))
    return total


@pytest.mark.parametrize(
    "groups",
    [
        (((0,),), ((2,),)),
        (((0,), (2,)), ((3,),)),  # instances of a model on both kinds take turns by what each can serve
        (((0,), (1,), (3,)), ((0,), (2,))),
    ],
)
def test_the_loss_of_islands_of_several_kinds_is_that_of_the_whole_cluster(problem: Problem, groups: tuple) -> None:  # type: ignore[type-arg]
    layout = tuple(Home(0, each) for each in groups)
    assert Simulated(problem).loss(layout) == late_in_the_whole(problem, layout) > 0


def test_islands_of_two_kinds_differ(problem: Problem) -> None:
    one, other = ((Home(0, ((gpu,),)), Home(0, ())) for gpu in (0, 2))
    (fast,), (slow,) = (places_of(problem, layout) for layout in (one, other))
    assert fast.island != slow.island
    assert Simulated(problem).of(fast.island).sum < Simulated(problem).of(slow.island).sum


def test_the_best_plan_on_all_of_them_runs_as_an_experiment(wish: Wish, problem: Problem) -> None:
    best = search(problem, Budget(40))
    large, small = best.layout
    assert {gpu for group in large.groups for gpu in group} <= {0, 1}  # an L40S is too slow for it
    assert small.groups
    assert 1 - best.loss / problem.worth <= most_on_time(problem) / len(problem.parts[0].trace)
    cluster = experiment_from(plan_document(wish, best.layout)).setup
    assert [gpu.spec.name for gpu in cluster.gpus] == ["h100-sxm"] * 2 + ["l40s"] * 2


def test_the_cheapest_of_kinds_and_mixes_is_that_of_all_of_them(wish: Wish) -> None:
    target, budget = Target(0.99), Budget(400)
    asked, best = cheapest(wish, PRICES, target, budget)
    held = {}
    for first in range(3):
        for second in range(3):
            numbers = {gpu: count for gpu, count in (("h100-sxm", first), ("l40s", second)) if count}
            if numbers and ask(replace(wish, gpus=numbers), target, Budget(50)).holds:
                held[first, second] = 3.0 * first + 1.0 * second
    assert sum(PRICES[str(gpu)] * count for gpu, count in asked.kinds) == min(held.values())
    assert target.holds(best.late, problem_of(asked).lost)
    assert len(asked.kinds) == 2  # the case tells mixes apart


def test_the_cheapest_may_be_of_three_kinds(wish: Wish) -> None:
    """Each of these GPUs holds one large model alone, and none of the kinds is there twice."""
    models = tuple(ModelWish(name, "qwen3-32b", (("W16A16", 1),)) for name in "ab")
    own = replace(wish, models=(*models, MODELS[0]), spread=True, ttft_slo_s=5.0)
    numbers = {"h100-sxm": 1, "a100-80gb": 1, "l40s": 1}
    asked, best = cheapest(replace(own, gpus=numbers), PRICES | {"a100-80gb": 2.0}, Target(0.5), Budget(60))
    assert dict(asked.kinds) == numbers
    assert all(home.groups for home in best.layout)


def test_the_band_of_a_mix_is_of_its_parts_and_of_more(wish: Wish) -> None:
    target, budget = Target(0.99), Budget(400)
    asked, best = cheapest(wish, PRICES, target, budget)
    own = dict(asked.kinds)

    def band(low: float, high: float) -> MixBand:
        error = error_of(asked, best.layout).model_copy(update={"low": low, "high": high})
        found = mix_band(asked, best, target, budget, error, PRICES)
        assert found is not None
        return found

    assert (band(1.0, 1.0).fewest, band(1.0, 1.0).most) == (own, own)
    wide = band(0.2, 1.1)
    assert sum(wide.fewest.values()) < sum(own.values())
    assert wide.most is not None and all(wide.most[gpu] >= count for gpu, count in own.items())
    assert str(band(1.0, 50.0)) == "1 h100-sxm + 2 l40s to over 2 h100-sxm + 4 l40s"


def test_a_pinned_model_stays_on_its_kind_of_gpu(wish: Wish) -> None:
    """GPU 0 is the H100 also where fewer GPUs are asked."""
    pinned = replace(wish, gpus={"h100-sxm": 1, "l40s": 2}, rules=Rules(pinned={"small": frozenset({0})}))
    asked, best = cheapest(pinned, PRICES, Target(0.5), Budget(40))
    assert asked.kinds[0] == ("h100-sxm", 1)
    assert best.layout[1].groups == ((0,),)


def test_all_gpus_keep_what_those_of_a_kind_kept(wish: Wish) -> None:
    """However little is searched: on all of them the search goes on from there."""
    numbers = {"h100-sxm": 2, "l40s": 2}
    with pytest.raises(ValueError, match="no plan") as told:
        cheapest(replace(wish, gpus=numbers, rate_scale=20), PRICES, Target(0.99), Budget(4))
    *alone, together = map(float, re.findall(r"keeps (\d+\.\d) %", str(told.value)))
    assert alone and together >= max(alone)


def test_where_no_mix_holds_each_says_what_it_came_to(wish: Wish) -> None:
    with pytest.raises(ValueError, match=r"h100-sxm: no plan.*; l40s: no plan.*; h100-sxm \+ l40s: no plan"):
        cheapest(replace(wish, gpus={"h100-sxm": 1, "l40s": 1}, rate_scale=20), PRICES, Target(0.99), Budget(12))


def test_python_takes_numbers_by_kind(wish: Wish, tmp_path: Path) -> None:
    models = ["large=qwen2.5-14b", "small=llama-3.2-1b"]
    numbers = {"h100-sxm": 1, "l40s": 1}
    plan = fs.plan(wish.trace, models, gpus=numbers, ttft_slo_s=1.0, evaluations=10, jobs=1, out=tmp_path)
    assert plan.experiment["cluster"] == {"nodes": [{"gpu": gpu, "count": 1} for gpu in numbers]}
    assert plan.answer.startswith("On 1 h100-sxm + 1 l40s: large")
    assert "GPU 1, l40s" in (tmp_path / "plan.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["0", "h100-sxm", "h100-sxm:0", "h100-sxm:2,h100-sxm:1", ""])
def test_numbers_that_mean_nothing(text: str) -> None:
    with pytest.raises(ValueError):
        numbers_of(text)
