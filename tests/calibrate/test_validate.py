"""``fineserve-calibrate validate``: readers on tiny files, the closed loop against closed forms, statistics by hand, and the
measured sets where they are at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_calibrate.validate import (
    KNOWN_FILES,
    Case,
    ClosedLoop,
    ErrorRow,
    LayoutError,
    MeasuredSet,
    OpenLoop,
    Predicted,
    Serving,
    StaticBatch,
    error_rows,
    predict_set,
    read_set,
    sensitivity,
)
from fineserve_calibrate.validate.cases import Label
from fineserve_calibrate.validate.sm_share import SmShare
from fineserve_calibrate.validate_cli import validate

from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency import StepModel

E2E = Path(__file__).parents[3] / "shared" / "data" / "e2e"
needs_sets = pytest.mark.skipif(not E2E.is_dir(), reason="the shared/ folder with the measured sets is absent")

SILICON = (
    "backend,model_path,system,precision,mode,isl,osl,gemm_quant_mode,tp_size,pp_size,attention_dp_size,silicon_ttft_ms,"
    "silicon_tpot_ms,concurrency,source_kind\n"
    "vllm,meta-llama/Llama-3.1-70B,h100_sxm,fp8,agg,1024,64,fp8,4.0,1.0,1.0,81,12,4,inferencemax_daily_csv\n"
    "trtllm,meta-llama/Llama-3.1-8B-Instruct,h100_sxm,,agg,256,32,,1.0,1.0,,100,8,8,aic_auto_gap_run\n"
    "vllm,openai/gpt-oss-120b,h100_sxm,fp4,agg,1024,64,nvfp4,2.0,1.0,1.0,81,12,,inferencemax_daily_csv\n"
    "vllm,meta-llama/Llama-3.1-70B,h100_sxm,fp8,disagg,1024,64,fp8,,,,81,12,,inferencemax_daily_csv\n"
)
BLIS = (
    "model,tp,gt_requests,gt_ttft_ms,gt_e2e_ms,gt_arrival_rate_rps,gt_input_mean,gt_output_mean\n"
    "llama-2-7b,1,40,27,207,6,785.84,11\nmixtral-8x7b-v0-1,2,40,58,400,6,500,20\n"
)
LMBENCH = (
    "config,gpu,scenario,qps,launch_s,prompt_tokens,generation_tokens,ttft_s,generation_s\n"
    "exp3-vllm-70b-2replicas,H100,short_input,1.0,0.5,75,5,0.04,0.06\n"
    "exp3-vllm-70b-2replicas,H100,short_input,1.0,0.0,75,1,0.04,0.0\n"
    "exp4-vllm-llama4-scout-tp4,H100,short_input,1.0,0.0,75,5,0.04,0.06\n"
)
DISTSERVE = (
    "system,rate,run_requests,issue_s,prompt_len,output_len,ttft_ms,tpot_ms\n"
    "vllm,1.0,2,0.0,55,4,83,33\nvllm,1.0,2,1.4,829,17,90,23\ndistserve,1.0,1,0.0,55,4,83,33\n"
)
KVCACHED = (
    "set,file,hardware,kvcached,model_id,completed,request_rate,burstiness,total_input_tokens,total_output_tokens,"
    "mean_ttft_ms,mean_tpot_ms\n"
    "m,x-1-delay-30-model-num-2.json,A100-80G,False,meta-llama/Llama-3.1-8B-Instruct,5,10.0,1.0,500,50,60,30\n"
    "m,x-2-delay-30-model-num-2.json,A100-80G,False,meta-llama/Llama-3.1-8B-Instruct,4,10.0,1.0,400,40,70,31\n"
    "m,y-1-delay-30-model-num-1.json,A100-80G,False,meta-llama/Llama-3.1-8B-Instruct,4,inf,1.0,400,40,70,31\n"
)


def authors_rows() -> str:
    """Host floor 8 ms at batch 1; 20 % of the SMs make prefills four times as long."""
    header = "model,qformat,tp,mps_percentage,batch_size,input_len,output_len,ttft,tpot\n"
    rows = [
        f"llama-3.1-8b,org,1,{share},{batch},{tokens},8,{0.012 * batch * tokens / 256 * (1 if share == 100 else 4)},0.008\n"
        for share in (20, 100)
        for batch in (1, 16)
        for tokens in (256, 512)
    ]
    return header + "".join(rows)


def written(folder: Path, text: str, name: str = "some_set.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str) -> MeasuredSet:
    return read_set(written(folder, text), StepModel)


def serving(**changes: object) -> Serving:
    whole = Serving(
        model("llama-3.1-8b"), precision("fp16"), 1, gpu("h100-sxm"), deployment("vllm-cudagraph"), 8192, 256
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def case(load: StaticBatch | ClosedLoop | OpenLoop, rows: int = 1, **changes: object) -> Case:
    return Case(Label("s", "vllm", "m", "p", 1), serving(**changes), load, np.ones(rows), np.ones(rows))


def predict(one: Case) -> Predicted:
    return predict_set(MeasuredSet("s", (one,)), StepModel)[0]


# --- readers -----------------------------------------------------------------------------------------------------------


def test_silicon(tmp_path: Path) -> None:
    found = read(tmp_path, SILICON)
    vllm, trt = found.cases
    assert vllm.label == Label("some_set, h100-sxm", "vllm", "meta-llama/Llama-3.1-70B", "W8A8", 4)
    assert vllm.load == ClosedLoop(4, 40, 1024, 64, 0.8, 4)
    assert (vllm.ttft_s[0], vllm.tpot_s[0]) == pytest.approx((0.081, 0.012))
    assert trt.load == ClosedLoop(8, 80, 256, 32, 1.0, 7)
    assert (trt.serving.precision.name, trt.serving.token_budget) == ("W16A16", 8 + 256 + 1500)
    assert dict(found.unsupported) == {
        ("vllm", "openai/gpt-oss-120b", "mixture of experts"): 1,
        ("vllm", "meta-llama/Llama-3.1-70B", "prefill and decode on different engines"): 1,
    }
    assert len(predict_set(found, StepModel)) == 2


def test_blis(tmp_path: Path) -> None:
    found = read(tmp_path, BLIS)
    (one,) = found.cases
    assert found.shares_prefixes
    assert one.tpot_s[0] == pytest.approx(0.018)  # (207 - 27) / (11 - 1) ms
    assert isinstance(one.load, OpenLoop)
    assert (len(one.load.arrival_s), one.load.prompt_tokens[0], one.load.each) == (40, 786, False)
    assert found.unsupported.total() == 1


def test_lmbench(tmp_path: Path) -> None:
    found = read(tmp_path, LMBENCH)
    (one,) = found.cases
    assert isinstance(one.load, OpenLoop)
    assert one.load.arrival_s.tolist() == [0.0, 0.5]
    assert one.load.replicas == 2
    assert np.isnan(one.tpot_s[0])  # one token has no time per token
    assert one.tpot_s[1] == pytest.approx(0.015)
    (row,) = error_rows(predict_set(found, StepModel))
    assert row.n == 2
    assert found.unsupported["vllm", "exp4-vllm-llama4-scout-tp4", "mixture of experts"] == 1


def test_distserve(tmp_path: Path) -> None:
    found = read(tmp_path, DISTSERVE)
    (one,) = found.cases
    assert one.tpot_s.tolist() == pytest.approx([0.033, 0.023])
    assert found.unsupported.total() == 1


def test_kvcached(tmp_path: Path) -> None:
    found = read(tmp_path, KVCACHED)
    (one,) = found.cases
    assert isinstance(one.load, OpenLoop)
    assert (one.load.models, one.load.shared_kv) == (2, False)
    assert np.bincount(one.load.model).tolist() == [5, 4]
    assert one.load.arrival_s[one.load.model == 1].min() >= 30
    assert one.serving.memory_utilization == pytest.approx(0.45)
    assert predict(one).ttft_s.shape == (2,)
    assert list(found.unsupported) == [
        ("vllm", "meta-llama/Llama-3.1-8B-Instruct", "arrivals of a ramp are not recorded")
    ]


def test_authors_fit_on_256_and_report_512(tmp_path: Path) -> None:
    text = authors_rows()
    found = read(tmp_path, text)
    assert found.kind == "fitted on part of the set"
    assert {one.load.prompt_tokens for one in found.cases if isinstance(one.load, StaticBatch)} == {512}
    assert found.cases[0].serving.deployment.host_floors is not None
    assert found.cases[0].serving.deployment.host_floors["W16A16"].value == pytest.approx(0.008)
    lines = text.splitlines(keepends=True)
    wrong = [line if ",256," in line or line.startswith("model") else line.replace("0.008", "0.5") for line in lines]
    changed = read(tmp_path, "".join(wrong))
    assert [one.serving for one in changed.cases] == [one.serving for one in found.cases]  # reported rows teach nothing
    with pytest.raises(LayoutError, match="no rows with input_len 256"):
        read(tmp_path, "".join(line for line in lines if ",256," not in line))


def test_unknown_layout_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="unknown column layout") as caught:
        read(tmp_path, "a,b\n1,2\n")
    text = str(caught.value)
    assert "\n" not in text
    assert all(name in text for name in ("FineServe profile", "silicon", "BLIS", "LMBench", "kvcached", "DistServe"))


def test_bad_values_name_row_and_column(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="row 1, column gt_ttft_ms: -27"):
        read(tmp_path, BLIS.replace(",27,", ",-27,"))


# --- predictions -------------------------------------------------------------------------------------------------------


def test_one_client_is_the_engine_alone() -> None:
    """A closed loop of one client: every request meets an idle engine, so TTFT and TPOT are the step model's own sums."""
    step = StepModel(model("llama-3.1-8b"), precision("fp16"), 1, gpu("h100-sxm"), deployment("vllm-cudagraph"))
    found = predict(case(ClosedLoop(1, 7, 512, 32)))
    assert found.ttft_s[0] == pytest.approx(step.step_s(0, 0, 512, 512 * 513 // 2, 0, 1))
    assert found.tpot_s[0] == pytest.approx(float(step.decode_steps_s(1, 512, 31).mean()))


def test_clients_never_exceed_their_number() -> None:
    """Little's law: with c clients always served, requests in flight are c until the last round."""
    clients, requests = 6, 60
    found = predict(case(ClosedLoop(clients, requests, 256, 64)))
    alone = predict(case(ClosedLoop(1, 10, 256, 64)))
    assert found.ttft_s[0] > alone.ttft_s[0]
    assert found.tpot_s[0] > alone.tpot_s[0]


def test_a_missing_slot_costs_a_generation_divided_by_the_clients() -> None:
    """c clients, c - 1 slots: one request waits at any time, so by Little's law the mean wait is a stay / (c - 1)."""
    clients = 8
    load = ClosedLoop(clients, 40 * clients, 64, 256)
    full, short = predict(case(load)), predict(case(replace(load, max_running=clients - 1)))
    stay_s = short.tpot_s[0] * 255
    assert short.ttft_s[0] - full.ttft_s[0] == pytest.approx(stay_s / (clients - 1), rel=0.15)


def test_two_engines_of_one_gpu_slow_each_other() -> None:
    n = 40
    arrival_s = np.arange(n) * 0.02
    one = OpenLoop(arrival_s, np.zeros(n, dtype=np.int64), np.full(n, 1024), np.full(n, 64), each=False)
    both = OpenLoop(
        np.repeat(arrival_s, 2), np.tile([0, 1], n), np.full(2 * n, 1024), np.full(2 * n, 64), models=2, each=False
    )
    alone = predict(case(one, memory_utilization=0.45))
    beside = predict(case(both, rows=2, memory_utilization=0.45))
    assert (beside.tpot_s > alone.tpot_s[0]).all()
    elastic = predict(case(replace(both, shared_kv=True), rows=2, memory_utilization=0.45))
    assert elastic.tpot_s == pytest.approx(beside.tpot_s)  # memory is not short: sharing it changes nothing


def test_a_slice_of_a_gpu() -> None:
    whole = gpu("h100-sxm")
    half = SmShare(1.0, 0.25).slice_of(whole, 0.5)
    assert half.bf16_flops_per_s == pytest.approx(0.5 * whole.bf16_flops_per_s)
    assert half.memory_bytes_per_s == whole.memory_bytes_per_s
    assert SmShare(0.8, 0.3).slice_of(whole, 1.0) is whole


# --- statistics and the command ----------------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    measured = replace(case(StaticBatch(1, 8, 8), rows=4), ttft_s=np.array([1.0, 1.0, 2.0, np.nan]))
    found = Predicted(measured, np.array([1.1, 0.8, 2.0, 9.0]), np.array([2.0, 2.0, 2.0, np.nan]))
    (row,) = error_rows([found])
    assert (row.n, row.ttft_median_abs, row.ttft_p90_abs, row.ttft_bias) == (4, *map(pytest.approx, (0.1, 0.2, 0.0)))
    assert (row.tpot_median_abs, row.tpot_p90_abs) == (1.0, None)  # a request never served is infinitely late


def app() -> typer.Typer:
    found = typer.Typer(pretty_exceptions_enable=False)
    found.command()(validate)
    return found


def test_command(tmp_path: Path) -> None:
    path = written(tmp_path, SILICON)
    result = CliRunner().invoke(app(), ["--set", str(path), "--json"])
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [list(row) for row in rows] == 2 * [list(ErrorRow.__dataclass_fields__)]
    assert [(row["backend"], row["tp"], row["n"]) for row in rows] == [("vllm", 4, 1), ("trtllm", 1, 1)]
    shown = CliRunner().invoke(app(), ["--set", str(path), "--out", str(tmp_path / "figures")])
    assert shown.exit_code == 0
    for words in ("assumed: ", "sensitivity, ", "unsupported: 1 rows", "mixture of experts"):
        assert words in shown.stdout
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["validate.png", "validate.svg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "nowhere.csv"], "--set nowhere.csv: no such file"),
        (["--data", "nowhere"], "none of the measured sets is there"),
        ([], "--data DIR with the measured sets, or --set FILE"),
    ],
)
def test_command_errors(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "fineserve_calibrate.cli", "validate", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_sensitivity_changes_what_it_says(tmp_path: Path) -> None:
    found = read(tmp_path, SILICON)
    before, after = sensitivity(found, found.sensitivities[0])
    assert [one.load.requests for one in before.cases if isinstance(one.load, ClosedLoop)] == [40]
    assert [one.load.requests for one in after.cases if isinstance(one.load, ClosedLoop)] == [20]


# --- the measured sets -------------------------------------------------------------------------------------------------


@cache
def rows_of(name: str, keep: Callable[[Case], bool]) -> list[ErrorRow]:
    found = read_set(E2E / name, StepModel)
    return error_rows(predict_set(replace(found, cases=tuple(filter(keep, found.cases))), StepModel))


def every(_: Case) -> bool:
    return True


def on_h100(one: Case) -> bool:
    return one.serving.gpu.name == "h100-sxm"


@needs_sets
def test_every_known_file_is_read() -> None:
    """All rows of every set are cases or counted."""
    counts = {}
    for name in KNOWN_FILES:
        found = read_set(E2E / name, StepModel)
        counts[name.split(".")[0]] = (sum(len(one.ttft_s) for one in found.cases), found.unsupported.total())
    assert counts["fineserve_authors_h100_8b"] == (114, 0)  # the other half is fitted on
    assert sum(counts["aic_silicon_hopper"]) == 1522
    assert sum(counts["blis_vllm_h100_groundtruth"]) == 10
    assert sum(counts["llmd_lmbench_requests"]) == 22931
    assert sum(counts["kvcached_multi_llm_summary"]) == 1575
    assert sum(counts["distserve_opt13b_a100_requests"]) == 19700


@needs_sets
def test_authors_profile() -> None:
    rows = rows_of(KNOWN_FILES[0], every)
    assert len(rows) == 19
    for row in rows:
        if row.precision != "W4A8KV4":
            assert row.ttft_median_abs is not None
            assert row.tpot_median_abs is not None
            assert row.ttft_median_abs < 0.17
            assert row.tpot_median_abs < 0.09


@needs_sets
def test_closed_loops_on_h100() -> None:
    """No constant of the roofline model was taken from these rows."""
    rows = {(row.backend, row.tp): row for row in rows_of(KNOWN_FILES[1], on_h100)}
    bounds = {
        ("vllm", 2): (0.06, 0.13), ("vllm", 4): (0.06, 0.10), ("vllm", 8): (0.11, 0.06),
        ("trtllm", 1): (0.12, 0.05), ("trtllm", 2): (0.12, 0.05), ("trtllm", 4): (0.18, 0.09), ("trtllm", 8): (0.38, 0.12),
    }  # fmt: skip
    assert set(rows) == set(bounds)
    for key, (ttft, tpot) in bounds.items():
        assert (rows[key].ttft_median_abs or 1) < ttft, key
        assert (rows[key].tpot_median_abs or 1) < tpot, key
