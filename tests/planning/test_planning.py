"""Plans: islands lose what the whole cluster loses, and the search finds what brute force finds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fineserve_sim.cli import app
from fineserve_sim.cluster import Fate, simulate
from fineserve_sim.experiment import load_experiment
from fineserve_sim.experiment.run.executors import executor_of
from fineserve_sim.planning.fewest import cheapest, fewest
from fineserve_sim.planning.find import Budget, search
from fineserve_sim.planning.islands import Simulated, losses, places_of
from fineserve_sim.planning.problem import Home, Layout, Problem, Rules
from fineserve_sim.planning.reach import out_of_reach
from fineserve_sim.planning.target import Target
from fineserve_sim.planning.wish import ModelWish, Wish, plan_document, problem_of
from fineserve_sim.systems.spec import PinnedPlacementSpec

MODELS = (
    ModelWish("large", "qwen2.5-14b", (("W16A16", 1), ("fp8", 2))),
    ModelWish("middle", "llama-3.1-8b", (("W16A16", 1),)),
    ModelWish("small", "llama-3.2-1b", (("W16A16", 1),)),
)


@pytest.fixture(scope="module")
def wish(tmp_path_factory: pytest.TempPathFactory) -> Wish:
    """Three models on two GPUs, with requests that come too fast for some placements."""
    path = tmp_path_factory.mktemp("plan") / "trace.csv"
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(1 / 40, 90))
    prompts, outputs = rng.integers(200, 4000, 90), rng.integers(2, 20, 90)
    rows = [f"{a:.4f},{p},{o}" for a, p, o in zip(arrival_s, prompts, outputs, strict=True)]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return Wish(path, MODELS, gpus=2, ttft_slo_s=0.3, spread=True)


@pytest.fixture(scope="module")
def problem(wish: Wish) -> Problem:
    return problem_of(wish)


def every_layout(problem: Problem) -> list[Layout]:
    """All layouts with each model on one GPU or both, at its first option."""
    homes = [Home(0, groups) for groups in (((0,),), ((1,),), ((0,), (1,)))]
    return [layout for layout in product(homes, repeat=3) if problem.allows(layout)]


def late_in_the_whole(problem: Problem, layout: Layout) -> float:
    """The loss of a layout by one simulation of the whole cluster a part."""
    groups = {served.id: home.groups for served, home in zip(problem.models, layout, strict=True)}
    pinned = problem.scenario.system.model_copy(update={"placement": PinnedPlacementSpec(groups=groups)})
    total = 0.0
    for part in problem.parts:
        models = tuple(problem.served(model, home.option) for model, home in enumerate(layout))
        result = simulate(replace(problem.scenario, models=models, system=pinned, trace=part.trace, sample_s=0.0))
        on_time = result.first_token_s - part.trace.arrival_s <= problem.limits.ttft_s[0]
        total += part.weight * np.count_nonzero(~((result.fate == Fate.FINISHED) & on_time))
    return total


def test_the_loss_of_islands_is_the_loss_of_the_whole_cluster(problem: Problem) -> None:
    simulated = Simulated(problem)
    layouts = every_layout(problem)
    found = [simulated.loss(layout) for layout in layouts]
    assert found == [late_in_the_whole(problem, layout) for layout in layouts]
    assert len(set(found)) > 3  # the load tells layouts apart


@pytest.mark.slow
def test_the_search_finds_what_brute_force_finds(problem: Problem) -> None:
    own = replace(problem, options=tuple(options[:1] for options in problem.options))
    least = min(Simulated(own).loss(layout) for layout in every_layout(own))
    assert search(own, Budget(60)).loss == least


@pytest.mark.slow
def test_so_many_evaluations_give_the_same_plan_with_any_number_of_processes(problem: Problem) -> None:
    alone = search(problem, Budget(40, seed=3))
    with executor_of("local", 2) as two:
        assert search(problem, Budget(40, seed=3, executor=two)) == alone


@pytest.mark.slow
def test_a_limit_stops_early_and_never_says_too_much(problem: Problem) -> None:
    for layout in every_layout(problem):
        for island, _ in places_of(problem, layout):
            whole, cut = losses(problem, island), losses(problem, island, limit=1.0)
            assert cut == whole if cut.whole else 1.0 <= cut.sum <= whole.sum


def test_islands_are_the_same_on_any_gpus(problem: Problem) -> None:
    one, other = (Home(0, ((0,),)), Home(0, ((1,),)))
    mirrored = [places_of(problem, (a, b, b)) for a, b in ((one, other), (other, one))]
    assert {place.island for place in mirrored[0]} == {place.island for place in mirrored[1]}


def test_rules_hold_at_every_plan(problem: Problem) -> None:
    rules = Rules(apart=frozenset({frozenset({"large", "middle"})}), pinned={"small": frozenset({1})}, most_per_gpu=2)
    layout = search(replace(problem, rules=rules), Budget(40)).layout
    large, middle, small = ({gpu for group in home.groups for gpu in group} for home in layout)
    assert not large & middle
    assert small <= {1}


def test_each_model_outlives_the_loss_of_a_gpu(wish: Wish) -> None:
    problem = problem_of(replace(wish, rules=Rules(survives="gpu")))
    layout = search(problem, Budget(60)).layout
    assert problem.exposed(layout) == []
    for gpu in range(wish.gpus):
        assert all(any(gpu not in group for group in home.groups) for home in layout)
    alone = Home(0, ((0,),))
    assert problem.exposed((alone, Home(0, ((0,), (1,))), Home(0, ()))) == [0]
    assert problem.unserved((alone, alone, Home(0, ()))) == [*problem.lost]


def test_losses_that_nothing_survives_are_told_before_the_search(wish: Wish) -> None:
    with pytest.raises(ValueError, match="no plan: 2 GPUs are one node, whose loss nothing survives"):
        problem_of(replace(wish, rules=Rules(survives="node")))
    with pytest.raises(
        ValueError, match=r"no plan: two engines of each model, .*, take \d+ GiB beside KV, 2 GPUs have"
    ):
        large = ModelWish("large", "qwen3-32b", (("W16A16", 1),))
        problem_of(replace(wish, models=(large, replace(large, id="other")), rules=Rules(survives="gpu")))


def test_the_cheapest_type_of_gpu_is_found(wish: Wish) -> None:
    """Whichever the prices, no other type keeps the target for less."""
    small = replace(wish, models=MODELS[1:], gpus=3, ttft_slo_s=2.0)
    counts = {gpu: fewest(replace(small, gpu=gpu), Target(0.9), Budget(20))[0].gpus for gpu in ("h100-sxm", "l40s")}
    for prices in ({"h100-sxm": 3.0, "l40s": 1.0}, {"l40s": 9.0, "h100-sxm": 3.0}):
        asked, best = cheapest(small, prices, Target(0.9), Budget(40), list(prices))
        assert prices[asked.gpu] * asked.gpus == min(prices[gpu] * counts[gpu] for gpu in prices)
        assert best.loss <= 0.1 * problem_of(asked).worth
    with pytest.raises(ValueError, match=r"h100-sxm: .*; l40s: "):
        cheapest(
            replace(small, ttft_slo_s=0.02, gpus=1),
            {"h100-sxm": 3.0, "l40s": 1.0},
            Target(0.99),
            Budget(4),
            ["h100-sxm", "l40s"],
        )


def test_several_types_of_gpu_need_a_target_and_prices(wish: Wish) -> None:
    asked = [
        "--model",
        "large=qwen2.5-14b",
        "--gpus",
        "1",
        "--ttft-slo",
        "1",
        "--spread",
        "--gpu",
        "h100-sxm",
        "--gpu",
        "a10",
    ]
    ran = CliRunner().invoke(app, ["plan", str(wish.trace), *asked])
    assert "--gpu: of several types of GPU the cheapest is chosen, which needs --target" in str(ran.exception)


def test_impossible_wishes_say_what_is_missing(wish: Wish) -> None:
    with pytest.raises(ValueError, match="3 engines do not stand on 2 GPUs with at most 1 on each; 3 GPUs would do"):
        problem_of(replace(wish, rules=Rules(most_per_gpu=1)))
    with pytest.raises(ValueError, match=r"model huge fits on no GPU: 131.4 GiB of weights"):
        problem_of(replace(wish, models=(ModelWish("huge", "llama-3.1-70b", (("W16A16", 1),)),)))


def test_more_gpus_are_never_worse_where_the_smaller_plan_is_a_start(wish: Wish, problem: Problem) -> None:
    more = problem_of(replace(wish, gpus=3))
    two = search(problem, Budget(30))
    assert Simulated(more).loss(two.layout) == two.loss


def test_the_document_of_a_plan_runs_and_keeps_what_was_promised(wish: Wish, problem: Problem) -> None:
    from fineserve_sim.experiment import experiment_from

    layout = search(problem, Budget(30)).layout
    experiment = experiment_from(json.loads(json.dumps(plan_document(wish, layout))))
    placement = experiment.setup.systems["plan"].placement
    assert isinstance(placement, PinnedPlacementSpec)
    assert {id: len(groups) for id, groups in placement.groups.items()} == {
        each.id: len(home.groups) for each, home in zip(MODELS, layout, strict=True) if home.groups
    }


def test_the_command_prints_a_plan_and_writes_what_run_takes(wish: Wish, tmp_path: Path) -> None:
    models = ["large=qwen2.5-14b:W16A16|fp8", "middle=llama-3.1-8b", "small=llama-3.2-1b"]
    options = [word for model in models for word in ("--model", model)]
    limits = ["--gpus", "2", "--ttft-slo", "0.3", "--spread", "--evaluations", "20", "--jobs", "1"]
    ran = CliRunner().invoke(app, ["plan", str(wish.trace), *options, *limits, "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "unseen requests" in ran.output
    assert "small (W16A16)" in ran.output
    assert load_experiment(tmp_path / "plan.yaml", [], False).setup.systems["plan"].placement.policy == "pinned"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--apart", "large,tiny"], "--apart large,tiny: expected two of the models, as in large,large"),
        (["--pin", "large=7"], "--pin large=7: expected a model and GPUs from 0 to 0, as in large=0,1"),
        (["--model", "b=llama-3.1-8b:fp8:0"], "--model b=llama-3.1-8b:fp8:0: expected NAME=MODEL:PRECISIONS:DEGREES"),
    ],
)
def test_a_mistake_is_one_line(wish: Wish, option: list[str], message: str) -> None:
    asked = ["--model", "large=qwen2.5-14b", "--gpus", "1", "--ttft-slo", "1", "--spread", *option]
    ran = CliRunner().invoke(app, ["plan", str(wish.trace), *asked])
    assert isinstance(ran.exception, ValueError)
    assert message in str(ran.exception)


def test_what_is_out_of_reach_is_not_searched(wish: Wish) -> None:
    """Alone on idle GPUs, in whichever option, too many prompts take longer than the limit."""
    tight = replace(wish, models=MODELS[:1], ttft_slo_s=0.03)
    problem = problem_of(tight)
    why = out_of_reach(problem, Target(0.9))
    assert why is not None and re.fullmatch(
        r"[\d.]+ % of the requests at most are on time on idle GPUs\. large \(TP \d\): [\d.]+ % of its requests cannot have a "
        r"first token within 0\.03 s \(prompts above [\d,]+ tokens\)",
        why,
    )
    with pytest.raises(ValueError, match="no plan on any number of GPUs: "):
        fewest(tight, Target(0.9), Budget(10_000))
    within = float(why.split()[0]) / 100
    assert out_of_reach(problem, Target(within - 0.01)) is None
    assert search(problem, Budget(20)).loss >= (1 - within - 0.001) * problem.worth


def test_python_finds_the_fewest_gpus(wish: Wish) -> None:
    import fineserve_sim as fs

    models = ["middle=llama-3.1-8b", "small=llama-3.2-1b"]
    found = fs.plan(wish.trace, models, gpus=3, ttft_slo_s=5.0, spread=True, target=0.9, evaluations=30, jobs=1)
    assert found.experiment["cluster"]["count"] == 1
    assert found.judged["plan"].min() > 0.9
    with pytest.raises(ValueError, match=r"no plan on 1 h100-sxm keeps 100 % .*: the best found keeps \d+"):
        fs.plan(
            wish.trace, models, gpus=1, ttft_slo_s=0.3, rate_scale=20, spread=True, target=1.0, evaluations=5, jobs=1
        )


def test_a_model_of_the_trace_that_is_not_named_is_asked_for(tmp_path: Path) -> None:
    rows = "".join(f"{n},{'ab'[n % 2]},10,2\n" for n in range(6))
    (tmp_path / "trace.csv").write_text("arrival_s,model,prompt_tokens,output_tokens\n" + rows, encoding="utf-8")
    words = ["plan", str(tmp_path / "trace.csv"), "-m", "a=llama-3.2-1b", "--gpus", "1", "--ttft-slo", "1"]
    result = CliRunner().invoke(app, [*words, "-j", "1", "--out", str(tmp_path)])
    assert "trace.csv: --model is missing for b; name them, or give --spread" in str(result.exception)
