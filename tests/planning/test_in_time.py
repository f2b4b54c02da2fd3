"""Plans in time: windows, what a move must pay, and a timetable that the cluster follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fineserve_sim as fs
from fineserve_sim.experiment import load_experiment
from fineserve_sim.experiment.file.document import to_yaml
from fineserve_sim.planning.in_time import RIVALS, document, planned, settled, waiting, windows_of
from fineserve_sim.planning.problem import Home
from fineserve_sim.planning.wish import ModelWish, Wish, problem_on, whole_of

MODELS = tuple(ModelWish(name, "qwen3-32b", (("W16A16", 1),)) for name in "ab")
"""A GPU holds one engine."""


@pytest.fixture(scope="module")
def wish(tmp_path_factory: pytest.TempPathFactory) -> Wish:
    """Model a is busy first, b later: 30 seconds each, and three GPUs, of which the busy one needs two."""
    rng = np.random.default_rng(1)
    rows = []
    for start_s, busy, quiet in ((0, "a", "b"), (30, "b", "a"), (60, "b", "a")):
        for model, rate in ((busy, 6.0), (quiet, 0.5)):
            times = start_s + np.cumsum(rng.exponential(1 / rate, round(30 * rate)))
            rows += [(float(time), model, int(rng.integers(500, 3000)), int(rng.integers(2, 30))) for time in times]
    path = tmp_path_factory.mktemp("time") / "trace.csv"
    lines = [f"{time:.4f},{model},{prompt},{output}" for time, model, prompt, output in sorted(rows)]
    path.write_text("arrival_s,model,prompt_tokens,output_tokens\n" + "\n".join(lines) + "\n")
    return Wish(path, MODELS, gpus=3, ttft_slo_s=1.0)


def test_windows_hold_all_requests_but_a_short_rest(wish: Wish) -> None:
    trace = whole_of(wish).whole_trace
    found = windows_of(trace, 30.0)
    assert sum(map(len, found)) == np.sum(trace.arrival_s < 30.0 * len(found))
    assert all(window.arrival_s[0] >= 0 and window.arrival_s[-1] < 30.0 for window in found)
    with pytest.raises(ValueError, match="has no requests"):
        windows_of(trace, 0.001)


def test_what_waits_is_what_comes_while_new_engines_load(wish: Wish) -> None:
    one = settled(wish, (Home(0, ()), Home(0, ())))
    problem = problem_on(one, windows_of(whole_of(one).whole_trace, 30.0)[0])
    old, new = (Home(0, ((0,),)), Home(0, ((1,),))), (Home(0, ((0,), (2,))), Home(0, ((1,),)))
    demand = problem.demands[0][0]
    load_s = waiting(problem, old, new) / (problem.models[0].rate_per_s / 2)
    assert waiting(problem, old, old) == waiting(problem, new, old) == 0
    assert load_s == pytest.approx(demand.weight_bytes / 22.7e9, rel=0.15)  # and what starting it takes


def test_a_plan_in_time_follows_a_load_that_turns(wish: Wish, tmp_path: Path) -> None:
    found = planned(wish, 30.0, evaluations=40)
    first, *later = found.windows
    assert (first.came, first.moved_bytes) == (0, 0)
    assert sum(window.came for window in later) > 0
    assert all(window.moved_bytes > 0 for window in later if window.came)
    kept = dict(zip(RIVALS, (share for share, _ in found.rivals), strict=True))
    assert found.on_time > kept["the first plan kept"]
    assert all(len(model.options) == 1 for model in found.wish.models)
    path = tmp_path / "plan.yaml"
    path.write_text(to_yaml(document(found, 30.0)))
    (system,) = (system for system in load_experiment(path).file.systems if not isinstance(system, str))
    assert system.model_dump()["residency"]["policy"] == "timetable"


def test_fewer_than_two_windows_are_no_plan_in_time(wish: Wish) -> None:
    with pytest.raises(ValueError, match="less than two windows"):
        planned(wish, 1000.0, evaluations=4)


def test_a_share_to_keep_is_no_plan_in_time(wish: Wish) -> None:
    with pytest.raises(ValueError, match="leave out the target"):
        fs.plan(wish.trace, ["a=qwen3-32b", "b=qwen3-32b"], gpus=3, ttft_slo_s=1.0, every_s=30.0, target=0.9)


def test_python_has_a_row_a_window(wish: Wish, tmp_path: Path) -> None:
    plan = fs.plan(
        wish.trace, ["a=qwen3-32b", "b=qwen3-32b"], gpus=3, ttft_slo_s=1.0, every_s=30.0, evaluations=8, out=tmp_path
    )
    assert list(plan.judged.columns) == ["from_s", "came", "moved_bytes", "on_time", *RIVALS]
    assert len(plan.judged) == 3
    assert plan.answer.startswith("In 3 windows it moves ")
    assert (tmp_path / "plan.yaml").is_file()
