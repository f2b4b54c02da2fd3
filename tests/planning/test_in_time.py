"""Plans in time: windows, what a move must pay, and a timetable that the cluster follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from searchkit import stopping_after
from typer.testing import CliRunner

import fineserve_sim as fs
from fineserve_sim.cli import app, plan
from fineserve_sim.cluster import simulate
from fineserve_sim.experiment import load_experiment
from fineserve_sim.experiment.file.document import to_yaml
from fineserve_sim.planning import islands
from fineserve_sim.planning.find import Budget
from fineserve_sim.planning.in_time import RIVALS, document, judged, planned, settled, system_of, waiting, windows_of
from fineserve_sim.planning.problem import Home, Rules
from fineserve_sim.planning.wish import ModelWish, Wish, problem_on, whole_of
from fineserve_sim.systems import SystemSpec

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
    timetable = planned(wish, 30.0, Budget(40))
    found = judged(timetable)
    first, *later = found.windows
    assert (first.came, first.moved_bytes) == (0, 0)
    assert sum(window.came for window in later) > 0
    assert all(window.moved_bytes > 0 for window in later if window.came)
    kept = dict(zip(RIVALS, (share for share, _ in found.rivals), strict=True))
    assert found.on_time > kept["the first plan kept"]
    assert all(len(model.options) == 1 for model in timetable.wish.models)
    path = tmp_path / "plan.yaml"
    path.write_text(to_yaml(document(timetable)))
    (system,) = (system for system in load_experiment(path).file.systems if not isinstance(system, str))
    assert system.model_dump()["residency"]["policy"] == "timetable"


def test_fewer_than_two_windows_are_no_plan_in_time(wish: Wish) -> None:
    with pytest.raises(ValueError, match="less than two windows"):
        planned(wish, 1000.0, Budget(4))


def test_a_share_to_keep_is_no_plan_in_time(wish: Wish) -> None:
    with pytest.raises(ValueError, match="leave out the target"):
        fs.plan(wish.trace, ["a=qwen3-32b", "b=qwen3-32b"], gpus=3, ttft_slo_s=1.0, every_s=30.0, target=0.9)


def test_a_plan_in_time_survives_a_loss_or_is_none(wish: Wish) -> None:
    """Two models that share no GPU both need one and the same for their second engine."""
    pinned = {"a": frozenset({0, 1}), "b": frozenset({1, 2})}
    rules = Rules(apart=frozenset({frozenset("ab")}), pinned=pinned, survives="gpu")
    with pytest.raises(
        ValueError, match="no plan survives the loss of a gpu, as far as was searched: one takes all of"
    ):
        planned(replace(wish, rules=rules, gpus=4, gpu="b200"), 30.0, Budget(4))


def test_python_has_a_row_a_window(wish: Wish, tmp_path: Path) -> None:
    plan = fs.plan(
        wish.trace, ["a=qwen3-32b", "b=qwen3-32b"], gpus=3, ttft_slo_s=1.0, every_s=30.0, evaluations=8, out=tmp_path
    )
    assert list(plan.judged.columns) == ["from_s", "came", "moved_bytes", "on_time", *RIVALS]
    assert len(plan.judged) == 3
    assert plan.answer.startswith("In 3 windows it moves ")
    assert (tmp_path / "plan.yaml").is_file()


def test_ctrl_c_ends_all_searches_and_the_same_again_goes_on(
    wish: Wish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "searched.jsonl", [0]
    whole = planned(wish, 30.0, Budget(40, path=path, tell=lambda told: calls.append(1)))
    assert not whole.stopped
    for last in range(1, len(calls)):
        stopped = planned(wish, 30.0, Budget(40, path=path, tell=stopping_after(last)))
        assert stopped.stopped and len(stopped.layouts) == len(whole.layouts)
        with pytest.raises(ValueError, match="not judged"):
            judged(stopped)
    monkeypatch.setattr(islands, "losses", None)  # nothing is left to simulate
    assert planned(wish, 30.0, Budget(40, path=path)) == whole


def test_a_stopped_plan_in_time_is_written_and_says_so(
    wish: Wish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_tell", stopping_after(2))
    words = [
        "plan",
        str(wish.trace),
        "--model",
        "a=qwen3-32b",
        "--model",
        "b=qwen3-32b",
        "--gpus",
        "3",
        "--every",
        "30",
    ]
    ran = CliRunner().invoke(app, [*words, "--ttft-slo", "1", "--evaluations", "40", "-j", "1", "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "Stopped: this is the best so far. The same command goes on from here." in ran.output
    assert "with the model's error" not in ran.output
    assert load_experiment(tmp_path / "plan.yaml").file.systems


def test_a_plan_in_time_is_on_gpus_of_several_kinds_as_well(wish: Wish) -> None:
    """The large model stands on the H100 alone, which is the GPU that holds it."""
    models = ["a=qwen3-32b", "b=llama-3.2-1b"]
    gpus = {"l40s": 1, "h100-sxm": 1}
    plan = fs.plan(wish.trace, models, gpus=gpus, ttft_slo_s=1.0, every_s=30.0, evaluations=8, jobs=1)
    assert plan.experiment["cluster"] == {"nodes": [{"gpu": gpu, "count": 1} for gpu in gpus]}
    (system,) = plan.experiment["systems"]
    assert {tuple(map(tuple, each["groups"]["a"])) for each in system["residency"]["entries"]} == {((1,),)}
    assert len(plan.judged) == 3


def test_an_engine_that_moves_to_another_kind_has_its_steps(wish: Wish) -> None:
    """From an L40S to an H100: later tokens come as fast as where the engine is on the H100 from the start."""
    model = ModelWish("a", "qwen3-4b", (("W16A16", 1),))
    own = replace(wish, gpus={"l40s": 1, "h100-sxm": 1}, models=(model,), spread=True)

    def token_s(*gpus: int) -> float:
        layouts = [(Home(0, ((gpu,),)),) for gpu in gpus]
        whole = whole_of(own, "prism")
        said = system_of(own, layouts, 30.0) | {"base": None}
        system = SystemSpec.model_validate(whole.system.model_dump() | {k: v for k, v in said.items() if v is not None})
        result, trace = simulate(replace(whole, system=system)), whole.whole_trace
        later_s = (result.finish_s - result.first_token_s) / np.maximum(1, trace.output_tokens - 1)
        return float(later_s[trace.arrival_s > 60].mean())

    assert token_s(0, 1) == token_s(1, 1) < token_s(0, 0) / 2
