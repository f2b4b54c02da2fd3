"""What a plan is asked beside its search, and the page that tells it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fineserve_sim.planning.find import Budget
from fineserve_sim.planning.islands import Simulated, on_time
from fineserve_sim.planning.judge import on
from fineserve_sim.planning.make import Found, found
from fineserve_sim.planning.outlook import SITUATIONS, Elsewhere, Outlook, Reason, outlook
from fineserve_sim.planning.page import shown, verdict_of, why, write_page
from fineserve_sim.planning.problem import Home
from fineserve_sim.planning.question import Question
from fineserve_sim.planning.target import Target
from fineserve_sim.planning.wish import ModelWish, Wish, problem_of, unseen

MODELS = tuple(
    ModelWish(name, model, (("W16A16", 1),))
    for name, model in (("large", "qwen2.5-14b"), ("small", "llama-3.2-1b"), ("other", "llama-3.2-3b"))
)

PRICES = {"h100-sxm": 2.5}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Found:
    path = tmp_path_factory.mktemp("outlook") / "trace.csv"
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(1 / 40, 120))
    prompts, outputs = rng.integers(200, 4000, 120), rng.integers(2, 20, 120)
    rows = [f"{a:.4f},{p},{o}" for a, p, o in zip(arrival_s, prompts, outputs, strict=True)]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    wish = Wish(path, MODELS, gpus=2, ttft_slo_s=0.3, spread=True)
    return found(Question(wish, None, PRICES, ("h100-sxm",)), Budget(4))


@pytest.fixture(scope="module")
def seen(plan: Found) -> Outlook:
    return outlook(problem_of(plan.wish), unseen(plan.wish), plan.best.layout)


def test_the_plan_stands_first_as_it_was_judged(plan: Found, seen: Outlook) -> None:
    first, *others, alone = seen.beside
    assert (first.name, first.gpus, first.on_time[0]) == ("plan", 2, plan.judged[0].plan)
    assert (alone.name, alone.gpus) == ("one GPU a model", 3)
    assert {each.name for each in others} <= {"fineserve", "prism", "muxserve++", "s-partition", "static*"}
    assert all(row.on_time[1] <= row.on_time[0] and row.on_time[2] <= row.on_time[0] for row in seen.beside)


def test_neighbours_cost_what_a_model_keeps_alone(plan: Found, seen: Outlook) -> None:
    problem, rest = problem_of(plan.wish), unseen(plan.wish)
    for model, (home, reason) in enumerate(zip(plan.best.layout, seen.reasons, strict=True)):
        own = rest.model == rest.models.index(MODELS[model].id)
        empty = tuple(
            each if number == model else Home(each.option, ()) for number, each in enumerate(plan.best.layout)
        )
        assert reason.requests == own.sum()
        assert reason.alone == np.mean(on_time(on(problem, rest), 0, empty)[own])
        assert reason.alone >= reason.on_time
        assert reason.neighbours or reason.alone == reason.on_time
        assert home.groups and 0 < reason.prompts_busy < 2


def test_another_place_is_the_best_of_all_where_few_are(plan: Found, seen: Outlook) -> None:
    problem = problem_of(plan.wish)
    chosen = Simulated(on(problem, problem.parts[0].trace))
    layout = plan.best.layout
    for model, reason in enumerate(seen.reasons):
        (group,) = layout[model].groups[:1]
        other = (1 - group[0],)
        moved = (*layout[:model], layout[model]._replace(groups=(other,)), *layout[model + 1 :])
        if len(layout[model].groups) == 1:
            assert reason.elsewhere == Elsewhere(other, round(chosen.loss(moved) - chosen.loss(layout)))


def test_the_page_tells_it_and_is_the_same_again(plan: Found, tmp_path: Path) -> None:
    told = shown(plan, Path("out/plan.yaml"), PRICES)
    text = write_page(told, tmp_path / "plan.html").read_text(encoding="utf-8")
    assert verdict_of(plan) in ("good", "half")
    for words in (
        *SITUATIONS,
        "Why each model is where it is",
        "2 h100-sxm, $5.00 an hour",
        "fineserve-sim run out/plan.yaml",
    ):
        assert words in text
    assert f"{100 * plan.judged[0].plan:.1f} % of the requests that the search never saw are on time" in text
    assert write_page(told, tmp_path / "again.html").read_text(encoding="utf-8") == text
    assert verdict_of(replace(plan, target=Target(1.0))) == "bad"


def test_reasons_in_words() -> None:
    reason = Reason(("b",), 10, 0.5, 0.9, 0.1, 2**30, Elsewhere((3,), 7), True)
    assert why(reason, 1) == (
        "Beside b, which cost it 40.0 points: alone it would keep 90.0 %. On GPU 3, 7 more requests would be late."
    )
    assert why(replace(reason, neighbours=(), on_time=1.0, elsewhere=None), 1) == (
        "It has its GPUs to itself. No other place has room."
    )
    assert why(replace(reason, elsewhere=Elsewhere((0, 1), 0)), 2).endswith("GPU 0+1 would do as well.")
    assert why(replace(reason, alone=0.5, asked=False), 1) == "Beside b, which cost it nothing."
    assert why(reason, 0) == "No GPU has room for it."
