"""Targets of a plan: of all requests, of those of each model, and how sure a plan that keeps them is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fineserve_sim.cli import app
from fineserve_sim.experiment.sizing import SizingError
from fineserve_sim.planning.find import Budget, search
from fineserve_sim.planning.islands import Simulated
from fineserve_sim.planning.make import Found, found
from fineserve_sim.planning.problem import Home
from fineserve_sim.planning.question import Question
from fineserve_sim.planning.search import Search
from fineserve_sim.planning.sure import with_steps
from fineserve_sim.planning.target import Target, target_of
from fineserve_sim.planning.wish import ModelWish, Wish, problem_of

MODELS = (ModelWish("large", "qwen2.5-14b", (("W16A16", 1),)), ModelWish("small", "llama-3.2-1b", (("W16A16", 1),)))


@pytest.fixture(scope="module")
def wish(tmp_path_factory: pytest.TempPathFactory) -> Wish:
    """One request in eight is of the large model, which is late where many come at once."""
    rng = np.random.default_rng(3)
    times, prompts = np.cumsum(rng.exponential(1 / 30, 96)), rng.integers(500, 4000, 96)
    rows = [
        f"{a:.4f},{'small' if n % 8 else 'large'},{p},10" for n, (a, p) in enumerate(zip(times, prompts, strict=True))
    ]
    path = tmp_path_factory.mktemp("targets") / "trace.csv"
    path.write_text("arrival_s,model,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return Wish(path, MODELS, gpus=3, ttft_slo_s=0.6)


@pytest.fixture(scope="module")
def plan(wish: Wish) -> Found:
    return found(Question(wish, Target(0.9, 0.8), {"h100-sxm": 2.0}, ("h100-sxm",)), Budget(60))


@pytest.mark.parametrize(
    ("given", "target"),
    [
        (0.9, Target(0.9)),
        (["0.9"], Target(0.9)),
        (["all:0.95,each:all:0.9"], Target(0.95, 0.9)),
        ({"each:all": 0.9}, Target(0.0, 0.9)),
        (None, None),
    ],
)
def test_targets_are_those_of_size(given: object, target: Target | None) -> None:
    assert target_of(given) == target  # type: ignore[arg-type]


def test_other_moments_are_told_what_a_plan_keeps() -> None:
    with pytest.raises(
        SizingError, match=r"--target each:ttft:0.9: a plan keeps all limits together; take all:SHARE or"
    ):
        target_of({"each:ttft": 0.9})


def test_a_target_of_each_model_counts_what_each_misses() -> None:
    each = Target(each=0.9)
    assert each.holds([1.0, 10.0], [10.0, 100.0])
    assert not each.holds([2.0, 0.0], [10.0, 100.0])
    assert each.too_late([2.0, 15.0], [10.0, 100.0]) == pytest.approx(6.0)
    assert Target(0.9).holds([11.0, 0.0], [10.0, 100.0]) and not Target(0.9, 0.9).holds([11.0, 0.0], [10.0, 100.0])
    assert Target(0.9, 0.8).told([2.0, 9.0], [10.0, 100.0]) == "90.0 %, 80.0 % of the worst model's"


def test_a_search_puts_models_below_the_target_first(wish: Wish) -> None:
    """The layout without the large model loses fewer requests than the one without the small one, but both lose a model."""
    problem = problem_of(replace(wish, gpus=1))
    searching = Search(problem, Simulated(problem), target=Target(each=0.5))
    both, nothing = (Home(0, ((0,),)), Home(0, ((0,),))), (Home(0, ()), Home(0, ((0,),)))
    assert searching._cost(both) < searching._cost(nothing)
    assert search(problem, Budget(20), Target(each=0.99)).late[0] <= search(problem, Budget(20)).late[0]


def test_the_fewest_gpus_keep_a_target_of_each_model_and_have_a_band(plan: Found) -> None:
    problem = problem_of(plan.wish)
    assert Target(0.9, 0.8).holds(plan.best.late, problem.lost)
    assert sum(plan.best.late) == plan.best.loss
    assert plan.sure.low <= plan.judged[0].plan <= plan.sure.high
    band = plan.sure.gpus
    assert band is not None and band.fewest <= plan.wish.count <= (band.most or band.tried)
    assert plan.sure.error.low < 1 < plan.sure.error.high
    assert plan.usd_per_hour == 2.0 * plan.wish.count


def test_the_worst_model_stands_beside_all(plan: Found) -> None:
    for row in plan.judged:
        assert row.worst_model in ("large", "small")
        assert row.worst <= row.plan


def test_steps_of_the_band_multiply_a_margin(wish: Wish) -> None:
    assert with_steps(replace(wish, margin=1.2), 1.1).margin == pytest.approx(1.32)
    kept = replace(wish, kept={"engine": {"step_time_factor": 2.0}})
    assert with_steps(kept, 1.1).settings["engine"]["step_time_factor"] == pytest.approx(2.2)


def test_the_command_says_how_sure_it_is(wish: Wish, tmp_path: Path) -> None:
    models = ["--model", "large=qwen2.5-14b", "--model", "small=llama-3.2-1b"]
    limits = ["--gpus", "3", "--ttft-slo", "0.6", "--target", "all:0.9,each:all:0.8", "--evaluations", "60", "-j", "1"]
    ran = CliRunner().invoke(app, ["plan", str(wish.trace), *models, *limits, "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "with the model's error), " in ran.output and "worst model" in ran.output
    assert "Model's error: steps " in ran.output
    assert "with the model's error" in (tmp_path / "plan.html").read_text(encoding="utf-8").replace("&#x27;", "'")
