"""Wishes that cannot be met: one line that names the constraint and by how much; and rules that can, whatever systems place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fineserve_sim.experiment import ConfigError
from fineserve_sim.planning.by_rules import layout_by_rules
from fineserve_sim.planning.find import Budget, search
from fineserve_sim.planning.problem import Rules
from fineserve_sim.planning.wish import ModelWish, Wish, problem_of

MODELS = tuple(
    ModelWish(name, model, (("W16A16", 1),))
    for name, model in (("large", "qwen2.5-14b"), ("middle", "llama-3.1-8b"), ("small", "llama-3.2-1b"))
)
PAIRS = frozenset({frozenset({"large", "middle"}), frozenset({"large", "small"}), frozenset({"middle", "small"})})


@pytest.fixture(scope="module")
def wish(tmp_path_factory: pytest.TempPathFactory) -> Wish:
    path = tmp_path_factory.mktemp("impossible") / "trace.csv"
    rows = [f"{0.2 * n},500,5" for n in range(30)]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return Wish(path, MODELS, gpus=2, ttft_slo_s=1.0, spread=True)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"rules": Rules(apart=PAIRS)},
            "large, middle, small share no GPU with each other and need 3 GPUs, there are 2",
        ),
        (
            {"rules": Rules(apart=frozenset([*PAIRS][:1]), survives="gpu"), "gpus": 3},
            r"\w+, \w+ share no GPU with each other and need 4 GPUs, there are 3",
        ),
        (
            {"rules": Rules(most_per_gpu=1, survives="gpu"), "gpus": 5},
            "6 engines do not stand on 5 GPUs with at most 1 on each; 6 GPUs would do",
        ),
        ({"rules": Rules(survives="gpu"), "gpus": 1}, "there is one GPU, whose loss nothing survives; 2 GPUs would do"),
        (
            {"rules": Rules(pinned={"large": frozenset({0})}, survives="gpu")},
            "large is pinned to GPU 0, and needs 2 GPUs to survive the loss of a gpu",
        ),
        (
            {
                "rules": Rules(
                    frozenset({frozenset({"large", "small"})}), dict.fromkeys(("large", "small"), frozenset({1}))
                )
            },
            "large and small share no GPU, and both are pinned to GPU 1",
        ),
        (
            {
                "models": tuple(replace(each, model="qwen3-32b") for each in MODELS),
                "rules": Rules(pinned=dict.fromkeys(("large", "small"), frozenset({0}))),
                "gpus": 4,
            },
            r"large, small take 12\d\.\d GiB beside KV on the GPUs that they are pinned to, which have 7\d\.\d GiB",
        ),
        ({"rules": Rules(pinned={"large": frozenset()})}, "large is pinned to GPUs that are none of these"),
    ],
)
def test_the_constraint_and_by_how_much(wish: Wish, changed: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=f"^no plan: {why}$"):
        problem_of(replace(wish, **changed))  # type: ignore[arg-type]


def test_models_stay_pinned_to_the_very_gpus_where_there_are_fewer(wish: Wish) -> None:
    pinned = {"large": frozenset({0, 3}), "small": frozenset({2, 3})}
    own = replace(wish, gpus={"h100-sxm": 2, "l40s": 2}, rules=Rules(pinned=pinned))
    assert own.on({"h100-sxm": 1, "l40s": 2}).rules.pinned == {"large": frozenset({0, 2}), "small": frozenset({1, 2})}
    assert own.on(1, "l40s").rules.pinned == {"large": frozenset(), "small": frozenset({0})}
    assert replace(wish, gpus=4, rules=Rules(pinned=pinned)).on(3).rules.pinned["large"] == frozenset({0})


@pytest.mark.parametrize(
    "rules",
    [
        Rules(apart=PAIRS),
        Rules(most_per_gpu=1),
        Rules(pinned={"large": frozenset({2}), "small": frozenset({2, 3})}, most_per_gpu=2, survives=None),
        Rules(survives="gpu", most_per_gpu=2),
    ],
)
def test_a_placement_that_keeps_the_rules_is_a_start(wish: Wish, rules: Rules) -> None:
    problem = problem_of(replace(wish, gpus=4, rules=rules))
    layout = layout_by_rules(problem)
    assert problem.allows(layout)
    assert all(home.groups for home in layout)
    assert problem.exposed(layout) == []
    assert problem.allows(search(problem, Budget(1)).layout)


def test_models_that_find_no_place_have_none(wish: Wish, tmp_path: Path) -> None:
    """Each is too large for the GPU of another."""
    models = tuple(replace(each, model="qwen3-32b") for each in MODELS[:2])
    problem = problem_of(replace(wish, models=models, gpus=2, rules=Rules(pinned={"large": frozenset({0})})))
    assert [home.groups for home in layout_by_rules(problem)] == [((0,),), ((1,),)]


def test_degrees_that_there_are_no_gpus_for_are_left_out(wish: Wish) -> None:
    both = replace(
        wish, models=(ModelWish("large", "qwen2.5-14b", (("W16A16", 2), ("W16A16", 1), ("fp8", 4))),), gpus=1
    )
    (home,) = search(problem_of(both), Budget(5)).layout
    assert (home.option, home.groups) == (1, ((0,),))
    with pytest.raises(ConfigError, match="must be at most the 1 GPUs of a node, not 2"):
        problem_of(replace(both, models=(ModelWish("large", "qwen2.5-14b", (("W16A16", 2),)),)))
