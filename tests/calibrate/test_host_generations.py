"""Host times by engine generation and readings by engine and version: readers on tiny files, fits that come out again, and the
limits on the rows that nothing was fitted on."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from constantskit import Profile, fit_eager, fit_floor, fit_prompt, fit_whole_batches
from fineserve_evidence.validate import aegaeon, authors, kvcached
from fineserve_evidence.validate.cases import Case, ClosedLoop, Label, MeasuredSet, OpenLoop, Serving, StaticBatch
from fineserve_evidence.validate.errors import relative
from fineserve_evidence.validate.layouts import read_set
from fineserve_evidence.validate.predict import Predicted, campaign, predict_set
from fineserve_evidence.validate.silicon import GENERATOR, READINGS, USUAL, reading_of

from fineserve_sim.catalog import Deployment, Quantity, deployment, gpu, model, precision
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.tables import shipped

E2E = Path(__file__).parents[3] / "shared" / "data" / "e2e"
needs_sets = pytest.mark.skipif(not E2E.is_dir(), reason="the shared/ folder with the measured sets is absent")
PROFILES = ("fineserve_authors_h100_8b.csv", "fineserve_authors_h100_8b_tp2.csv")
by_tables = partial(StepModel, tables=shipped())

AEGAEON = (
    "model,gpu,input_len,batch,prefill_s,decode_s\n"
    "qwen2_5_7b,H100,128,4,0.014,0.009\nqwen2_5_7b,H100,1024,4,0.09,0.009\nqwen2_5_7b,A100,4096,2,0.26,0.0003\n"
    "llama2_13b,H800,256,8,0.09,0.015\n"
)


def read(folder: Path, text: str, name: str = "some_set.csv") -> MeasuredSet:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_set(path, StepModel)


def static(load: StaticBatch, token_budget: int) -> Predicted:
    host = deployment("vllm-0.5")
    serving = Serving(model("qwen2.5-7b"), precision("fp16"), 1, gpu("h100-sxm"), host, token_budget, 256)
    one = Case(Label("s", "vllm", "m", "p", 1), serving, load, np.ones(1), np.ones(1))
    return predict_set(MeasuredSet("s", (one,)), StepModel)[0]


# --- static batches of vLLM 0.5 ----------------------------------------------------------------------------------------


def test_aegaeon(tmp_path: Path) -> None:
    found = read(tmp_path, AEGAEON)
    assert [(one.label.model, one.serving.token_budget) for one in found.cases] == [
        ("qwen2.5-7b", 4096),
        ("llama-2-13b", 8192),
    ]
    assert found.cases[0].load == StaticBatch(4, 128, 10, whole_prompts=True)
    assert [reason for _, _, reason in found.unsupported] == [
        "a prompt of 4096 tokens leaves no output within 4096 tokens of context"
    ]
    assert found.fitted  # the row of 1,024 tokens is neither


def test_whole_prompts_are_prefilled_in_groups_before_any_decode() -> None:
    """Hand-worked: a budget of two prompts serves three in two prefills; the first group waits for the second."""
    step = StepModel(model("qwen2.5-7b"), precision("fp16"), 1, gpu("h100-sxm"), deployment("vllm-0.5"))
    found = static(StaticBatch(3, 512, 10, whole_prompts=True), 1024)
    pairs = 512 * 513 / 2
    assert found.ttft_s[0] == pytest.approx(step.step_s(0, 0, 1024, 2 * pairs, 0, 2))
    decodes_s = float(step.decode_steps_s(3, 1536, 9).sum())
    assert found.tpot_s[0] == pytest.approx((step.step_s(0, 0, 512, pairs, 0, 1) + decodes_s) / 9)


# --- readings by engine and version ------------------------------------------------------------------------------------


def test_a_reading_belongs_to_an_engine_and_version() -> None:
    assert reading_of("vllm", "0.12.0", "qwen3-32b") is reading_of("vllm", "0.12.0", "llama-3.1-70b") is GENERATOR
    assert reading_of("sglang", "0.5.6.post2", "llama-3.1-8b") is USUAL
    assert reading_of("vllm", "0.99", "qwen3-32b").token_budget == 8192
    assert len({reading.name for reading in READINGS}) == len(READINGS)


def test_a_reading_changes_what_it_names(tmp_path: Path) -> None:
    header = (
        "backend,backend_version,model_path,system,precision,mode,isl,osl,gemm_quant_mode,tp_size,pp_size,attention_dp_size,"
        "silicon_ttft_ms,silicon_tpot_ms,concurrency,source_kind\n"
    )
    rows = (
        "vllm,0.12.0,Qwen/Qwen3-32B,h100_sxm,,agg,256,32,,4.0,1.0,,100,8,8,aic_auto_gap_run\n"
        "vllm,0.12.0,Qwen/Qwen3-32B,h100_sxm,,agg,256,32,,2.0,1.0,,100,8,8,aic_auto_gap_run\n"
        "trtllm,1.0.0rc3,meta-llama/Llama-3.1-8B,h100_sxm,,agg,256,32,,1.0,1.0,,100,8,8,aic_auto_gap_run\n"
        "vllm,,Qwen/Qwen3-32B,h100_sxm,fp8,agg,256,32,fp8,4.0,1.0,,100,8,8,inferencemax_daily_csv\n"
    )
    found = read(tmp_path, header + rows)
    chosen, other, trt, recorded = found.cases
    assert "reading chosen on these rows" in chosen.label.set
    assert "reading chosen" not in other.label.set
    assert (chosen.serving.token_budget, chosen.serving.deployment.name) == (8 + 256 + 1500, "vllm-v1")
    assert isinstance(trt.load, ClosedLoop) and trt.load.max_running == 7
    assert (recorded.reading, recorded.serving.token_budget, recorded.serving.deployment.name) == (
        "",
        8192,
        "vllm-cudagraph",
    )
    burst = next(reading for reading in found.readings if "one request a client" in reading.what)
    read_so = burst.change(chosen)
    assert isinstance(read_so.load, ClosedLoop) and read_so.load.requests == 8
    assert burst.change(recorded) is recorded  # nothing of it is unrecorded
    assert campaign(found, "vllm 0.12.0 qwen3-32b").cases == (chosen, other)


def test_clients_that_start_apart_meet_an_idle_engine() -> None:
    serving = Serving(
        model("llama-3.1-8b"), precision("fp16"), 1, gpu("h100-sxm"), deployment("vllm-cudagraph"), 8192, 256
    )
    label = Label("s", "vllm", "m", "p", 1)
    together, apart = (
        Case(label, serving, ClosedLoop(4, 4, 512, 8, start_gap_s=gap_s), np.ones(1), np.ones(1))
        for gap_s in (0.0, 1.0)
    )
    one, other = (found.ttft_s[0] for found in predict_set(MeasuredSet("s", (together, apart)), StepModel))
    step = StepModel(model("llama-3.1-8b"), precision("fp16"), 1, gpu("h100-sxm"), deployment("vllm-cudagraph"))
    assert other == pytest.approx(step.step_s(0, 0, 512, 512 * 513 // 2, 0, 1))
    assert one > 1.5 * other


# --- the host's parts --------------------------------------------------------------------------------------------------


def test_parts_of_the_host_add_up() -> None:
    """By hand: a sequence's seconds by batch, a doubling by ranks, two collectives a layer in the floor, prompts on groups."""
    eager = deployment("vllm-v1-eager")
    assert eager.sequence_s is not None and eager.group is not None and eager.group.collective_s is not None
    one, two = (StepModel(model("llama-3.1-8b"), precision("awq"), tp, gpu("h100-sxm"), eager) for tp in (1, 2))
    assert two.overhead_s - one.overhead_s == pytest.approx(eager.group.doubling_s.value)
    assert two.floor_s - one.floor_s == pytest.approx(64 * eager.group.collective_s[2].value)
    assert (one.prompt_s, two.prompt_s) == (0.0, eager.group.prompt_s.value)
    graphs = StepModel(model("llama-3.1-8b"), precision("fp16"), 1, gpu("h100-sxm"), deployment("vllm-v1"))
    bare = Deployment(name="bare", overhead_s=Quantity(value=0.0, kind="assumed", source="none"))
    device = StepModel(model("llama-3.1-8b"), precision("fp16"), 1, gpu("h100-sxm"), bare)
    batch = (64, 64 * 500, 0, 0, 0, 64)
    assert graphs.step_s(*batch) - device.step_s(*batch) == pytest.approx(0.0012 + 64 * 4e-5)


def test_fused_quantisation_shortens_the_products_of_8_bit_activations_alone() -> None:
    fused = deployment("trtllm-1.0")
    assert fused.fused_quantisation_s is not None
    batch = (16, 16 * 1000, 0, 0, 0, 16)
    for fmt, products in (("fp8", 4 * 32), ("fp16", 0), ("awq", 0)):
        plain, less = (
            StepModel(model("llama-3.1-8b"), precision(fmt), 1, gpu("h100-sxm"), deployment(name))
            for name in ("trtllm", "trtllm-1.0")
        )
        saved_s = plain.step_s(*batch) - less.step_s(*batch)
        assert saved_s == pytest.approx(products * fused.fused_quantisation_s.value, abs=1e-9)


@pytest.mark.parametrize("name", ["vllm-v1", "vllm-v1-eager", "vllm-0.5"])
@pytest.mark.parametrize("steps", [5, 60])
def test_merged_steps_keep_the_bits_of_single_ones(name: str, steps: int) -> None:
    step = StepModel(model("llama-3.1-8b"), precision("fp16"), 2, gpu("h100-sxm"), deployment(name))
    ends, alone_s = step.decode_span_s(1.0, 7, 900, steps, 1.25)
    now, single = 1.0, []
    for index in range(steps):
        single.append(step.step_s(7, 900 + 7 * index, 0, 0, 0, 7))
        now += single[-1] * 1.25
    assert alone_s == single
    assert ends[-1] == now


# --- the measured sets -------------------------------------------------------------------------------------------------


@cache
def predicted(name: str) -> tuple[Predicted, ...]:
    return tuple(predict_set(read_set(E2E / name, by_tables), by_tables))


def medians(found: list[Predicted]) -> tuple[float, float]:
    """Median absolute errors of TPOT and TTFT over all rows."""
    tpot, ttft = (
        float(np.median(np.abs(np.concatenate([relative(getattr(p, c), getattr(p.case, c)) for p in found]))))
        for c in ("tpot_s", "ttft_s")
    )
    return tpot, ttft


@needs_sets
def test_the_eager_generation_is_what_its_rows_give() -> None:
    frame = pd.concat([pd.read_csv(E2E / name) for name in PROFILES])
    profile = Profile(frame[authors.fitted_on(frame)], by_tables)
    host, found = deployment("vllm-v1-eager"), fit_eager(profile)
    assert host.sequence_s is not None and host.group is not None and host.host_floors is not None
    assert host.overhead_s.value == pytest.approx(found.overhead_s, rel=0.02)
    assert host.sequence_s.value == pytest.approx(found.sequence_s, rel=0.02)
    assert host.group.doubling_s.value == pytest.approx(found.doubling_s, rel=0.02)
    assert {name: host.host_floors[name].value for name in found.floors} == pytest.approx(found.floors, rel=0.02)
    assert host.group.prompt_s.value == pytest.approx(fit_prompt(profile), rel=0.02)
    omniserve_s = fit_floor(profile, "W4A8KV4", host.overhead_s.value, host.sequence_s.value)
    assert host.host_floors["W4A8KV4"].value == pytest.approx(omniserve_s, rel=0.02)


@needs_sets
def test_the_first_generation_is_what_its_rows_give() -> None:
    frame = pd.read_csv(E2E / "aegaeon_static_qwen2.5_7b.csv")
    overhead_s, sequence_s = fit_whole_batches(frame[aegaeon.fitted_on(frame)], by_tables)
    host = deployment("vllm-0.5")
    assert host.sequence_s is not None
    assert (host.overhead_s.value, host.sequence_s.value) == pytest.approx((overhead_s, sequence_s), rel=0.02)


@needs_sets
@pytest.mark.parametrize("fmt", ["W16A16", "W8A8KV8", "W4A16"])
def test_authors_at_tp2(fmt: str) -> None:
    """Input 512, all SM shares: the project's limit."""
    found = [one for one in predicted(PROFILES[1]) if one.case.label.precision == fmt]
    tpot, ttft = medians(found)
    assert len(found) == 36
    assert tpot < 0.08
    assert ttft < 0.13


@needs_sets
@pytest.mark.parametrize("on", ["a100-80gb", "h100-sxm", "h800"])
def test_static_batches_of_vllm_0_5(on: str) -> None:
    found = [one for one in predicted("aegaeon_static_qwen2.5_7b.csv") if one.case.serving.gpu.name == on]
    tpot, ttft = medians(found)
    assert tpot < 0.12
    assert ttft < 0.12


@needs_sets
@pytest.mark.parametrize(
    ("backend", "tpot", "ttft"), [("vllm", 0.07, 0.18), ("trtllm", 0.07, 0.20), ("sglang", 0.08, 0.10)]
)
def test_closed_loops_at_tp4(backend: str, tpot: float, ttft: float) -> None:
    """Readings and, but for TensorRT-LLM, host times were chosen on these rows."""
    found = [one for one in predicted("aic_silicon_qwen3_32b_tp4.csv.gz") if one.case.label.backend == backend]
    assert medians(found)[0] < tpot
    assert medians(found)[1] < ttft


@pytest.mark.slow
@needs_sets
def test_two_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sixth of the runs that kvcached's host time and the cost of a switch were fitted on."""
    monkeypatch.setattr(kvcached, "FITTED_MODELS", 0)
    every = read_set(E2E / "kvcached_multi_llm_summary.csv.gz", by_tables).cases
    some = [case for case in every if isinstance(case.load, OpenLoop) and case.load.models == 2][::6]
    tpot, ttft = medians(predict_set(MeasuredSet("two models", tuple(some)), by_tables))
    assert tpot < 0.08
    assert ttft < 0.12
