"""Data-parallel ranks of a mixture of experts, which step together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lawkit import as_text, judge
from simkit import Row, gpus, pinned, served, system, trace_of, with_kv_blocks

from fineserve_sim.catalog import (
    CatalogError,
    check_tp,
    deployment,
    gpu,
    model,
    precision,
    weight_bytes,
    with_experts,
    with_ranks,
    with_speculation,
)
from fineserve_sim.cluster import EngineSettings, Fate, RunResult, Scenario, ScenarioError, ServedModel, simulate
from fineserve_sim.latency import measured_on, step_model_of
from fineserve_sim.latency.ranks import DUMMY, RanksStepModel
from fineserve_sim.systems import load_systems

MIXTURE = with_experts(model("qwen3-30b-a3b"), "whole")
HALF = precision("fp16")
DECODES = (64, 64 * 900, 0, 0, 0, 64)
CHUNK = (3, 1200, 1500, 1500 * 1501 // 2, 0, 4)


def _served(ranks: int, id: str = "m") -> ServedModel:
    return replace(served(id), model=with_ranks(MIXTURE, ranks), precision=HALF)


def _step(ranks: int, gpu_name: str = "h100-sxm") -> RanksStepModel:
    device = gpu(gpu_name)
    step = step_model_of(with_ranks(MIXTURE, ranks), HALF, 1, device, deployment("vllm-cudagraph"), measured_on(device))
    assert isinstance(step, RanksStepModel)
    return step


def _run(ranks: int, rows: list[Row], *, engine: EngineSettings | None = None, cards: int = 0) -> RunResult:
    scenario = Scenario(
        system("dedicated"),
        (_served(ranks),),
        gpus(cards or ranks),
        trace_of(rows),
        engine or EngineSettings(),
        check=True,
    )
    return simulate(scenario)


def test_experts_are_there_once_a_group_and_attention_in_each_rank() -> None:
    bytes_of = {ranks: weight_bytes(with_ranks(MIXTURE, ranks), HALF, 1) for ranks in (1, 2, 4)}
    found = MIXTURE.experts
    assert found is not None
    experts = MIXTURE.layers * found.count * 3 * MIXTURE.hidden_size * found.width * 2
    assert bytes_of[1] == weight_bytes(MIXTURE, HALF, 1)
    assert {ranks: bytes_of[1] - of for ranks, of in bytes_of.items()} == {1: 0, 2: experts // 2, 4: experts * 3 // 4}


def test_experts_split_over_the_gpus_of_all_ranks() -> None:
    check_tp(with_ranks(MIXTURE, 4), 4)
    with pytest.raises(CatalogError, match="TP 4 in 64 data-parallel ranks: 128 whole experts"):
        check_tp(with_ranks(MIXTURE, 64), 4)
    with pytest.raises(CatalogError, match=r"llama-3\.1-8b has no experts"):
        with_ranks(model("llama-3.1-8b"), 2)


@pytest.mark.parametrize("batch", [DECODES, CHUNK])
@pytest.mark.parametrize("name", ["h100-sxm", "rtx-pro-6000-server", "a100-80gb"])
def test_ranks_with_equal_batches_take_as_long_as_each(name: str, batch: tuple[int, int, int, int, int, int]) -> None:
    for ranks in (2, 4):
        step = _step(ranks, name)
        assert step.group_s([batch] * ranks) == pytest.approx(step.step_s(*batch), rel=1e-12)


def test_linear_attention_beside_prompts_takes_as_long_in_ranks() -> None:
    """Decodes beside prompts cost more there than apart (``beside_prompts_s``)."""
    hybrid = with_ranks(with_experts(model("qwen3.5-35b-a3b"), "whole"), 2)
    device = gpu("h100-sxm")
    step = step_model_of(hybrid, HALF, 1, device, deployment("vllm-cudagraph"), measured_on(device))
    assert isinstance(step, RanksStepModel)
    assert step.attention.beside_prompts_s(64, 1500) > 0
    mixed = (64, 64 * 900, 1500, 1500 * 1501 // 2, 0, 65)
    assert step.group_s([mixed] * 2) == pytest.approx(step.step_s(*mixed), rel=1e-12)


def test_a_step_lasts_as_long_as_the_slowest_rank_needs() -> None:
    step = _step(2)
    alone_s, both_s = step.group_s([CHUNK, DUMMY]), step.group_s([CHUNK, DECODES])
    assert both_s == step.group_s([DECODES, CHUNK])
    assert step.group_s([DECODES, DUMMY]) < alone_s < both_s < step.group_s([CHUNK, CHUNK])


def test_experts_and_exchange_have_the_tokens_of_all_ranks() -> None:
    one, two = step_model_of(MIXTURE, HALF, 1, gpu("h100-sxm"), deployment("vllm-cudagraph")), _step(2)
    costs = two.operators.by_tokens(np.array([64.0]))
    assert "exchange" in costs and "exchange" not in one.operators.by_tokens(np.array([64.0]))
    assert costs["exchange"].seconds > two.operators.by_tokens(np.array([32.0]))["exchange"].seconds
    assert any(row.quantity == "exchange.all_reduce.bytes_per_s" for row in two.provenance())
    two.slow_down(2.0)
    assert two.group_s([DECODES] * 2) == pytest.approx(2 * _step(2).group_s([DECODES] * 2))


def test_one_rank_is_no_ranks() -> None:
    rows: list[Row] = [(0.03 * i, 300 + i, 40) for i in range(60)]
    plain = Scenario(system("dedicated"), (replace(_served(1), model=MIXTURE),), gpus(1), trace_of(rows))
    one = replace(plain, models=(_served(1),))
    assert with_ranks(MIXTURE, 1) == MIXTURE
    for name in ("first_token_s", "finish_s", "engine"):
        assert np.array_equal(getattr(simulate(plain), name), getattr(simulate(one), name))


def test_two_ranks_take_turns_and_end_their_steps_together() -> None:
    """Two equal requests at once, one a rank: as one on each of two halves, token by token."""
    result = _run(2, [(0.0, 500, 30), (0.0, 500, 30)])
    assert result.engine.tolist() == [0, 1]
    assert result.first_token_s[0] == result.first_token_s[1] and result.finish_s[0] == result.finish_s[1]
    assert result.first_token_s[0] == pytest.approx(_step(2).step_s(0, 0, 500, 500 * 501 // 2, 0, 1))
    assert [instance.gpus for instance in result.placement.instances] == [(0,), (1,)]


def test_a_rank_waits_for_the_prompt_of_another() -> None:
    """The decodes of rank 0 stand still while rank 1 computes a long prompt."""
    alone, beside = _run(2, [(0.0, 100, 60)]), _run(2, [(0.0, 100, 60), (0.1, 8000, 2)])
    assert beside.finish_s[0] > alone.finish_s[0] + 0.05
    assert beside.first_token_s[0] == alone.first_token_s[0]


def test_a_request_that_comes_within_a_step_begins_with_the_next() -> None:
    result = _run(2, [(0.0, 4000, 50), (0.01, 100, 2)], engine=EngineSettings(token_budget=4000))
    first_s, second_s = result.first_token_s
    assert first_s > 0.01
    next_s = _step(2).group_s([(1, 4000, 0, 0, 0, 1), (0, 0, 100, 100 * 101 // 2, 0, 1)])
    assert second_s - first_s == pytest.approx(next_s)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 900), st.integers(1, 120)), min_size=1, max_size=40),
    st.sampled_from([2, 4]),
    st.integers(12, 200),
)
def test_no_request_is_lost(rows: list[tuple[float, int, int]], ranks: int, blocks: int) -> None:
    """Under scarce memory too: each rank preempts by itself, and every request ends."""
    model_ = _served(ranks)
    engine = replace(with_kv_blocks([model_], blocks), max_sequences=8, token_budget=512)
    in_order: list[Row] = [(at_s, prompt, output) for at_s, prompt, output in sorted(rows)]
    result = _run(ranks, in_order, engine=engine)
    assert set(result.fate.tolist()) <= {Fate.FINISHED, Fate.CUT, Fate.REJECTED}
    done = result.fate == Fate.FINISHED
    assert (result.generated_tokens[done] == np.array([row[2] for row in in_order])[done]).all()
    assert (result.first_token_s[done] <= result.finish_s[done]).all()


@pytest.mark.parametrize("blocks", [40, 4000])
def test_the_laws_hold_and_the_decision_log_replays(blocks: int) -> None:
    """As every cluster: the same merged and one by one, nothing leaks, and a fresh controller decides the same."""
    models = (_served(2),)
    engine = replace(with_kv_blocks(models, blocks), max_sequences=8, token_budget=512)
    rows: list[Row] = [(0.02 * i, 50 + 37 * i % 400, 5 + 11 * i % 60) for i in range(60)]
    broken = judge(Scenario(system("dedicated"), models, gpus(4), trace_of(rows), engine)).broken
    assert not broken, as_text(broken)


def test_groups_of_ranks_step_apart() -> None:
    """Two replicas of two ranks: a prompt in one group holds up its own group alone."""
    placement = pinned({"m": [[0, 1], [2, 3]]})
    rows: list[Row] = [(0.0, 100, 60), (0.0, 100, 60), (0.0, 100, 60), (0.0, 100, 60), (0.1, 8000, 2)]
    scenario = Scenario(system(placement), (_served(2),), gpus(4), trace_of(rows))
    result = simulate(scenario)
    group = result.engine // 2
    late = result.finish_s[:4] > result.finish_s[:4].min() + 0.05
    assert late.sum() == 2 and set(group[:4][late]) == {group[4]}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("prism", "has residency"), ("vllm-dp", "has dispatch"), ("fineserve", "placement dedicated or pinned")],
)
def test_other_systems_are_refused_by_name(name: str, reason: str) -> None:
    scenario = Scenario(load_systems()[name], (_served(2),), gpus(2), trace_of([(0.0, 10, 2)]))
    with pytest.raises(ScenarioError, match=f"model m: dp .*{reason}"):
        simulate(scenario)


def test_ranks_share_no_gpu() -> None:
    placement = pinned({"m": [[0, 1]], "n": [[1]]})
    models = (_served(2), served("n"))
    scenario = Scenario(system(placement), models, gpus(2), trace_of([(0.0, 10, 2)], ("m", "n")))
    with pytest.raises(ScenarioError, match="share no GPU"):
        simulate(scenario)


def test_a_draft_model_has_no_ranks() -> None:
    drafted = with_speculation(with_ranks(MIXTURE, 2), 3, 0.6, None)
    with pytest.raises(ValueError, match="have none yet"):
        step_model_of(drafted, HALF, 1, gpu("h100-sxm"), deployment("vllm-cudagraph"))
