"""Settings of InferenceX's runs that its results leave out."""

from __future__ import annotations

import numpy as np
import pytest
from fineserve_evidence.validate.cases import Case, ClosedLoop, Label, Serving
from fineserve_evidence.validate.front_end import SGLANG
from fineserve_evidence.validate.recipes import RECIPES, recipe_of

from fineserve_sim.catalog import deployment, gpu, gpus, model, models, precision


def case(served: str, on: str, clients: int) -> Case:
    serving = Serving(
        model(served), precision("W8A8"), 8, gpu(on), deployment("sglang-0.5"), 8192, clients, front_end=SGLANG
    )
    return Case(
        Label("s", "sglang", served, "W8A8", 8),
        serving,
        ClosedLoop(clients, 10 * clients, 1024, 1024, max_running=clients),
        np.array([0.1]),
        np.array([0.01]),
    )


def test_names_are_of_the_catalog() -> None:
    assert {name for one in RECIPES for name in one.models} <= models().keys()
    assert {name for one in RECIPES for name in one.gpus} <= gpus().keys()


def test_a_script_changes_what_it_sets_and_no_more() -> None:
    before = case("qwen3.5-397b-a17b", "h200-sxm", 4)
    after = recipe_of("sglang", "qwen3.5-397b-a17b", "h200-sxm").of(before)
    assert (after.serving.token_budget, after.serving.memory_utilization) == (16384, 0.8)
    assert after.serving.precision.name == "W8A8KV8"
    assert after.serving.front_end and after.serving.front_end.token_s == pytest.approx(SGLANG.token_s / 50)
    assert after.load == ClosedLoop(4, 40, 1024, 1024, 0.8, 4)
    assert (after.serving.max_sequences, after.serving.tp) == (before.serving.max_sequences, before.serving.tp)


def test_other_configurations_are_read_as_usual() -> None:
    before = case("qwen3-32b", "h200-sxm", 4)
    after = recipe_of("sglang", "qwen3-32b", "h200-sxm").of(before)
    assert after.serving == before.serving
    assert after.load == ClosedLoop(4, 40, 1024, 1024, 0.8, 4)


@pytest.mark.parametrize(("prompt_tokens", "budget"), [(1024, 8192), (8192, 8192 + 64 + 64)])
def test_tensorrt_llm_holds_a_prompt_beside_all_clients(prompt_tokens: int, budget: int) -> None:
    before = case("deepseek-r1", "h200-sxm", 64)
    before = Case(before.label, before.serving, ClosedLoop(64, 640, prompt_tokens, 1024), before.ttft_s, before.tpot_s)
    assert recipe_of("trtllm", "deepseek-r1", "h200-sxm").of(before).serving.token_budget == budget
