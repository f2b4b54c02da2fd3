"""Speculative decoding: laws of its step times, its memory, and a cluster that speculates."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from fineserve_traces import Trace
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim import catalog
from fineserve_sim.catalog import CatalogError, ModelSpec, head_of, with_speculation
from fineserve_sim.cluster import Fate, Gpu, RunResult, Scenario, ServedModel, simulate
from fineserve_sim.experiment import ConfigError, load_experiment
from fineserve_sim.latency import StepModel, measured_on, step_model_of
from fineserve_sim.latency.speculative import NO_PROMPT, SpeculativeStepModel
from fineserve_sim.systems import load_systems

MODEL, FP16, GPU = catalog.model("llama-3.1-8b"), catalog.precision("W16A16"), catalog.gpu("h100-sxm")
HOST = catalog.deployment("vllm-cudagraph")


def steps_of(model: ModelSpec) -> StepModel:
    return step_model_of(model, FP16, 1, GPU, HOST, measured_on(GPU))


def speculating(acceptance: float | list[float]) -> SpeculativeStepModel:
    step = steps_of(with_speculation(MODEL, 3, acceptance))
    assert isinstance(step, SpeculativeStepModel)
    return step


PLAIN, SPECULATES = steps_of(MODEL), speculating([0.8, 0.6, 0.4])
BATCHES = st.tuples(st.integers(1, 64), st.integers(1, 4000))


def test_without_a_draft_model_steps_are_plain() -> None:
    assert type(PLAIN) is StepModel
    assert SPECULATES.round_tokens == pytest.approx(2.8)


@given(BATCHES)
def test_an_iteration_is_the_part_of_a_round_that_brings_a_token(batch: tuple[int, int]) -> None:
    decodes, context = batch[0], batch[0] * batch[1]
    round_s = SPECULATES.round_s(decodes, context, NO_PROMPT, decodes)
    assert SPECULATES.step_s(decodes, context, 0, 0, 0, decodes) == round_s / SPECULATES.round_tokens
    assert round_s > PLAIN.step_s(decodes, context, 0, 0, 0, decodes)


@given(BATCHES, st.integers(1, 2048))
def test_a_chunk_adds_what_it_adds_to_a_round(batch: tuple[int, int], chunk: int) -> None:
    decodes, context, pairs = batch[0], batch[0] * batch[1], chunk * (chunk + 1) / 2
    rest_s = SPECULATES.round_s(decodes, context, NO_PROMPT, decodes)
    whole_s = SPECULATES.round_s(decodes, context, (chunk, pairs, 0), decodes + 1)
    mixed_s = SPECULATES.step_s(decodes, context, chunk, pairs, 0, decodes + 1)
    assert mixed_s == pytest.approx(whole_s - rest_s + rest_s / SPECULATES.round_tokens, rel=1e-12)
    assert SPECULATES.step_s(0, 0, chunk, pairs, 0, 1) >= PLAIN.step_s(0, 0, chunk, pairs, 0, 1)


@given(BATCHES, st.integers(1, 80), st.floats(1.0, 2.0))
def test_spans_are_single_steps_bit_for_bit(batch: tuple[int, int], steps: int, slowdown: float) -> None:
    decodes, context = batch[0], batch[0] * batch[1]
    each = [SPECULATES.step_s(decodes, context + i * decodes, 0, 0, 0, decodes) for i in range(steps)]
    ends = list(accumulate([step_s * slowdown for step_s in each], initial=1.0))[1:]
    assert SPECULATES.decode_steps_s(decodes, context, steps).tolist() == each
    assert SPECULATES.decode_span_s(1.0, decodes, context, steps, slowdown) == (ends, each)
    assert SPECULATES.decode_ends_s(1.0, decodes, context, steps, slowdown) == ends


@given(BATCHES, st.floats(0, 1), st.floats(0, 1))
def test_more_accepted_is_never_slower(batch: tuple[int, int], one: float, other: float) -> None:
    low, high = sorted((one, other))
    decodes, context = batch[0], batch[0] * batch[1]
    slow_s, fast_s = (speculating(share).step_s(decodes, context, 0, 0, 0, decodes) for share in (low, high))
    assert fast_s <= slow_s


@given(BATCHES)
def test_nothing_accepted_costs_the_draft_and_the_check(batch: tuple[int, int]) -> None:
    decodes, context = batch[0], batch[0] * batch[1]
    lost = speculating(0.0)
    assert lost.step_s(decodes, context, 0, 0, 0, decodes) > PLAIN.step_s(decodes, context, 0, 0, 0, decodes)


@given(BATCHES, st.integers(0, 2048))
def test_demands_are_parts_of_a_round(batch: tuple[int, int], chunk: int) -> None:
    decodes, context, pairs = batch[0], batch[0] * batch[1], chunk * (chunk + 1) / 2
    need = SPECULATES.demand(decodes, context, chunk, pairs, 0, decodes + (chunk > 0))
    assert 0 < need.compute <= need.resident + 1e-12 <= 1 + 1e-12
    assert 0 < need.bandwidth <= need.resident + 1e-12
    assert need.step_s == SPECULATES.step_s(decodes, context, chunk, pairs, 0, decodes + (chunk > 0))


def test_slower_steps_are_slower_drafts_too() -> None:
    slowed = speculating(0.5)
    before_s = slowed.step_s(8, 8000, 0, 0, 0, 8)
    slowed.slow_down(1.5)
    assert slowed.step_s(8, 8000, 0, 0, 0, 8) == pytest.approx(1.5 * before_s, rel=1e-12)


def test_the_draft_has_weights_and_kv() -> None:
    behind_a_head, small = with_speculation(MODEL, 3, 0.5), catalog.model("llama-3.2-1b")
    behind_a_model = with_speculation(MODEL, 3, 0.5, small)
    assert catalog.kv_token_bytes(behind_a_head, FP16, 1) == catalog.kv_token_bytes(MODEL, FP16, 1) * 33 // 32
    assert catalog.kv_token_bytes(behind_a_model, FP16, 1) == sum(
        catalog.kv_token_bytes(one, FP16, 1) for one in (MODEL, small)
    )
    layer = (catalog.weight_bytes(MODEL, FP16, 1) - 2 * MODEL.vocab_size * MODEL.hidden_size * 2) / MODEL.layers
    head = catalog.weight_bytes(behind_a_head, FP16, 1) - catalog.weight_bytes(MODEL, FP16, 1)
    assert head == pytest.approx(layer, rel=1e-4)
    assert catalog.weight_bytes(behind_a_model, FP16, 1) == sum(
        catalog.weight_bytes(one, FP16, 1) for one in (MODEL, small)
    )
    assert catalog.parameters(behind_a_model) == catalog.parameters(MODEL)


def test_a_head_of_a_mixture_is_dense() -> None:
    mixture = catalog.model("gpt-oss-120b")
    head = head_of(mixture)
    assert mixture.experts is not None
    assert (head.layers, head.experts, head.window, head.sinks) == (1, None, None, False)
    assert head.intermediate_size == mixture.experts.active * mixture.experts.width


@pytest.mark.parametrize(
    ("acceptance", "words"),
    [([0.5], "1 shares"), ([0.5, 0.6, 0.1], "must not rise"), ([1.5, 0.6, 0.1], "between 0 and 1")],
)
def test_shares_that_cannot_be(acceptance: list[float], words: str) -> None:
    with pytest.raises(CatalogError, match=words):
        with_speculation(MODEL, 3, acceptance)


def run_of(model: ModelSpec, outputs: int = 50) -> RunResult:
    served = ServedModel("m", model, FP16, 1, 1.0, 2.0, 256, outputs)
    trace = Trace(
        arrival_s=np.arange(4, dtype=float) * 10,
        model=np.zeros(4, dtype=np.int32),
        prompt_tokens=np.full(4, 256),
        output_tokens=np.full(4, outputs),
        models=("m",),
        source="test",
    )
    return simulate(Scenario(load_systems()["fineserve"], (served,), (Gpu(0, 0, GPU),), trace))


def test_a_cluster_yields_all_tokens_at_the_pace_of_rounds() -> None:
    result = run_of(with_speculation(MODEL, 3, [0.8, 0.6, 0.4]))
    assert (result.fate == Fate.FINISHED).all()
    tpot_s = (result.finish_s - result.first_token_s) / 49
    middle_s = SPECULATES.step_s(1, 256 + 25, 0, 0, 0, 1)
    assert tpot_s == pytest.approx(middle_s, rel=1e-3)
    assert tpot_s[0] < ((run_of(MODEL).finish_s - run_of(MODEL).first_token_s) / 49)[0]


FILE = """
fineserve: 1
title: speculating
cluster: {gpu: h100-sxm, count: 1}
models:
  - {id: m, model: llama-3.1-8b, precision: fp16, rate_per_s: 1, speculative: {tokens: 2, acceptance: %s}}
workload: {lengths: {prompt_tokens: 100, output_tokens: 10}, requests: 10}
slo: {ttft_s: 1}
systems: [fineserve]
sweeps: [{name: one, at: {rate_scale: 1}}]
seeds: 1
"""


def test_files_say_what_is_wrong_with_a_draft(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    for acceptance, words in (("[0.5]", "1 shares of acceptance for 2"), ("0.5, draft: llama-9", "unknown model")):
        path.write_text(FILE % acceptance)
        with pytest.raises(ConfigError, match=words):
            load_experiment(path)
