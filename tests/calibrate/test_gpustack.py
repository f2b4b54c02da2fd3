"""GPUStack's runs: a small page read by hand, the client in closed form, and the real pages where they are at hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_evidence.commands import Latency, step_factory, validate
from fineserve_evidence.validate.cases import BenchmarkRun, Case, MeasuredSet
from fineserve_evidence.validate.errors import WholeRow, missed_by, whole_median, whole_rows
from fineserve_evidence.validate.front_end import HTTP
from fineserve_evidence.validate.gpustack import COLUMNS, DURATION, FIRST, LATENCY, OUTPUTS, PROMPTS, REQUESTS
from fineserve_evidence.validate.layouts import read_set
from fineserve_evidence.validate.predict import kv_bytes, predict_set
from fineserve_evidence.validate.rows import LayoutError

from fineserve_sim.catalog import data_ranks, graph_bytes
from fineserve_sim.cluster.compose.memory import static_fraction
from fineserve_sim.latency import StepModel

FIDELITY = Path(__file__).parents[2] / "docs" / "fidelity.md"
PAGES = Path(__file__).parents[3] / "shared" / "data" / "fleets" / "gpustack_performance_lab" / "runs.csv"
SERVED = {
    "file": "qwen3-8b/h100.md", "hardware": "A single NVIDIA H100 SXM GPU.", "engine_versions": "vLLM: v0.11.0; SGLang: v0.5.3",
    "section": "Experiment Results / Other Benchmark Cases", "case": "random 2K input", "block": "Baseline benchmark results",
    "command_before": "vllm serve Qwen/Qwen3-8B", REQUESTS: 10, DURATION: 2.5, PROMPTS: 20000, OUTPUTS: 1000, FIRST: 900,
}  # fmt: skip
TUNED = SERVED | {"block": "Optimized benchmark results"}
GUIDED = {
    "file": "qwen3.5-35b-a3b/h200-latency.md", "hardware": "NVIDIA H200", "engine_versions": "vLLM v0.17.1; SGLang v0.5.9",
    "section": "Experiment Results / Other Benchmark Cases / Rate 4", "profile": "ShareGPT 8RPS", "block": "Optimized result",
    "command_before": "--max-model-len=32768", "case": "", "Maximum request concurrency": 30, LATENCY: 3.3,
}  # fmt: skip


def read(tmp_path: Path, *rows: dict[str, object]) -> MeasuredSet:
    path = tmp_path / "runs.csv"
    lines = [",".join(f'"{row.get(name, "")}"' for name in COLUMNS) for row in rows]
    path.write_text("\n".join([",".join(COLUMNS), *lines]), encoding="utf-8")
    return read_set(path, StepModel)


def case_of(tmp_path: Path, **changed: object) -> Case:
    (case,) = read(tmp_path, SERVED | changed).cases
    return case


def test_a_run_of_vllm_bench(tmp_path: Path) -> None:
    """All at once, with prompts and outputs of the mean length and a template's 8 tokens, under a large GPU's defaults."""
    case = case_of(tmp_path)
    own, load = case.serving, case.load
    assert isinstance(load, BenchmarkRun)
    assert (own.model.name, own.precision.name, own.tp, own.gpu.name) == ("qwen3-8b", "W16A16", 1, "h100-sxm")
    assert (own.token_budget, own.max_sequences, own.deployment.name) == (8192, 1024, "vllm-0.11")
    assert (set(load.prompt_tokens), set(load.output_tokens), len(load.prompt_tokens)) == ({2008}, {100}, 10)
    assert (load.clients, load.gap_s, load.whole, load.burst_queues, case.whole_s) == (10, 0.0, "duration", True, 2.5)


def test_flags_and_the_comment_behind_them(tmp_path: Path) -> None:
    flags = "vllm serve Qwen/Qwen3-8B-FP8 -tp 2 --async-scheduling --max-num-batched-tokens 8192 --gpu-memory-utilization 0.85"
    case = case_of(tmp_path, command_before=flags, case="--max-num-batched-tokens 4096", hardware="2 x NVIDIA A100 SXM")
    own = case.serving
    graphs = graph_bytes(own.model, 2) / own.gpu.memory_bytes  # which come on top
    assert (own.token_budget, own.max_sequences, own.tp) == (4096, 256, 2)
    assert own.memory_utilization == pytest.approx(0.85 + graphs)
    assert (own.precision.name, own.deployment.name) == ("W8A8-block", "vllm-0.11-async")
    assert case_of(tmp_path, command_before="vllm serve Qwen/Qwen3-8B-AWQ").serving.precision.name == "W4A16"
    later = case_of(tmp_path, engine_versions="vLLM: v0.13.0")
    assert later.serving.deployment.name == "vllm-v1"
    doubled = case_of(
        tmp_path, command_before="vllm serve Qwen/Qwen3-8B --performance-mode=throughput --max-num-seqs=512"
    )
    assert (doubled.serving.token_budget, doubled.serving.max_sequences) == (16384, 512)


def test_first_turns_have_the_tokens_of_the_row(tmp_path: Path) -> None:
    load = case_of(tmp_path, case="", **{REQUESTS: 1000, PROMPTS: 217393, OUTPUTS: 201605}).load
    assert isinstance(load, BenchmarkRun)
    assert load.prompt_tokens.sum() == pytest.approx(217393 + 8000, rel=0.01)
    assert load.output_tokens.sum() == pytest.approx(201605, rel=0.01)
    assert load.prompt_tokens.std() > 100


def test_a_run_of_guidellm(tmp_path: Path) -> None:
    """The rate is the section's, the checkpoint of optimized runs FP8; the mean latency judges."""
    (case,) = read(tmp_path, SERVED | GUIDED).cases
    assert isinstance(case.load, BenchmarkRun)
    assert (case.load.gap_s, case.load.whole, case.load.burst_queues, case.whole_s) == (0.25, "latency", False, 3.3)
    assert (case.serving.precision.name, case.serving.deployment.name) == ("W8A8-block", "vllm-0.16")


def test_what_cannot_be_predicted_is_counted(tmp_path: Path) -> None:
    rows = (
        SERVED,
        SERVED | {"hardware": "A single NVIDIA A100 SXM 80GB GPU.", "file": "qwen3-8b/a100.md"},
        SERVED | {"file": "glm-9/h100.md", DURATION: 3},
        SERVED | {"engine_versions": "SGLang", DURATION: 4},
        TUNED
        | {"file": "glm-4.6/h100.md", "command_before": "python3 -m sglang.launch_server --tp 8 --ep 4", DURATION: 5},
        TUNED | {"command_before": 'vllm serve Q --speculative-config {""method"":""mtp""}', DURATION: 6},
        SERVED | {"file": "qwen3-32b/h100.md", PROMPTS: 380000, DURATION: 7},
        SERVED | {"hardware": "A single Ascend 910B NPU.", DURATION: 8},
        TUNED | {"command_before": "python3 -m sglang.launch_server --speculative-algorithm EAGLE3", DURATION: 9},
        TUNED | {"command_before": "--tp-size=8 --pp-size=2", DURATION: 10},
    )
    found = read(tmp_path, *rows)
    assert len(found.cases) == 1
    assert {reason for _, _, reason in found.unsupported} == {
        "the figures of qwen3-8b/h100.md",
        "model not in the catalog",
        "version not recorded",
        "experts both split and spread",
        "a pipeline",
        "how many drafted tokens were accepted is not recorded",
        "a request does not fit into the KV memory of h100-pcie",
    }
    assert [missed_by(found, engine) for engine in ("vllm", "sglang", "trtllm")] == [5, 3, 0]
    assert "1 rows of other GPUs are left out" in found.assumptions
    with pytest.raises(LayoutError, match="Benchmark duration"):
        read(tmp_path, SERVED | {DURATION: 0})


def test_other_engines_have_their_own_defaults(tmp_path: Path) -> None:
    """SGLang bounds a batch by its static memory; TensorRT-LLM takes nine tenths of what its weights leave."""
    plain = case_of(tmp_path, command_before="python3 -m sglang.launch_server --model Qwen/Qwen3-8B --tp-size 2")
    own = plain.serving
    assert (plain.label.backend, own.tp, own.batching, own.token_budget) == ("sglang", 2, "sglang", 8192)
    assert own.memory_utilization == static_fraction(own.gpu.memory_bytes, 8192, 2)
    told = "--tp-size=2 --chunked-prefill-size=4096 --mem-fraction-static=0.8 --max-running-requests=64"
    own = case_of(tmp_path, command_before=told).serving
    assert (own.batching, own.token_budget, own.max_sequences, own.memory_utilization) == ("sglang", 4096, 64, 0.8)
    other = case_of(tmp_path, command_before="trtllm-serve Qwen/Qwen3-8B --max_num_tokens=16384")
    own = other.serving
    assert (other.label.backend, own.token_budget, own.max_sequences) == ("trtllm", 16384, 2048)
    left = kv_bytes(replace(own, memory_utilization=1.0))
    assert kv_bytes(own) == pytest.approx(0.9 * left, rel=1e-6)


def test_experts_spread_and_attention_in_data_parallel(tmp_path: Path) -> None:
    """A TP group of eight with ranks in data parallel has attention at TP 1, over one copy of whole experts."""
    sglang = {"file": "deepseek-v3.2/h200.md", "hardware": "8 x NVIDIA H200"}
    flags = "python3 -m sglang.launch_server --tp-size 8 --dp-size 8 --enable-dp-attention"
    split = case_of(tmp_path, **sglang, command_before=flags).serving
    assert (split.tp, data_ranks(split.model), split.batching) == (1, 8, "sglang")
    assert split.token_budget == 8192 // 8  # ranks divide a chunk
    assert split.memory_utilization == static_fraction(split.gpu.memory_bytes, 8192, 8, 8)
    assert split.model.experts is not None and split.model.experts.spread == "split"
    spread = case_of(tmp_path, **sglang, command_before=f"{flags} --ep-size 8").serving
    assert spread.model.experts is not None and spread.model.experts.spread == "whole"
    flag = "vllm serve deepseek-ai/DeepSeek-V3.2 -tp 8 --enable-expert-parallel"
    one = case_of(tmp_path, **sglang, command_before=flag).serving
    dense = case_of(tmp_path, command_before="vllm serve Qwen/Qwen3-8B --enable-expert-parallel").serving
    assert dense == case_of(tmp_path).serving
    assert (one.tp, data_ranks(one.model)) == (8, 1)
    assert one.model.experts is not None and one.model.experts.spread == "whole"


def test_a_baseline_has_the_command_of_the_page_s_first(tmp_path: Path) -> None:
    """GLM-5.2 in FP8, with prompts alike where the profile says so."""
    page = SERVED | {
        "file": "glm-5.2/h200.md",
        "hardware": "NVIDIA H200x8",
        "engine_versions": "vLLM v0.24.0; SGLang v0.5.14",
    }
    other = "Experiment Results / Other Benchmark Cases / "
    first = page | {
        "section": f"{other}Balanced: 8K in / 1K out",
        "command_before": "--tensor-parallel-size=8",
        "case": "",
    }
    flags = "--tp-size=8 --dp-size=8 --enable-dp-attention --moe-a2a-backend=deepep --max-running-requests=256"
    tuned = first | {"block": "Optimized benchmark", "command_before": flags, DURATION: 3}
    later = tuned | {"block": "Baseline benchmark", "section": f"{other}ShareGPT", DURATION: 4}
    alike = tuned | {"section": "Experiment Results / DeepEP Mode / auto", "profile": "Balanced", DURATION: 5}
    one, two, three, four = read(tmp_path, first, tuned, later, alike).cases
    assert [case.label.backend for case in (one, two, three, four)] == ["vllm", "sglang", "vllm", "sglang"]
    assert (three.serving.tp, two.serving.tp, two.serving.max_sequences) == (8, 1, 256 // 8)
    assert two.serving.model.experts is not None and two.serving.model.experts.spread == "whole"
    assert (one.serving.precision.name, two.serving.precision.name) == ("W8A8-block", "W8A8-block")
    assert isinstance(four.load, BenchmarkRun) and len(set(four.load.prompt_tokens)) == 1


def predicted_s(tmp_path: Path, **changed: object) -> float:
    case = case_of(tmp_path)
    assert isinstance(case.load, BenchmarkRun)
    (found,) = predict_set(MeasuredSet("", (replace(case, load=replace(case.load, **changed)),)), StepModel)  # type: ignore[arg-type]
    assert found.whole_s is not None
    return found.whole_s


def test_the_client_in_closed_form(tmp_path: Path) -> None:
    """Requests far apart each take what one takes; a queue before the engine takes all of a burst one by one."""
    two = {"prompt_tokens": np.array([100, 100]), "output_tokens": np.array([5, 5])}
    api_s = float(HTTP.seconds(100))
    alone_s = predicted_s(tmp_path, **two, clients=2, gap_s=10.0, whole="latency")
    assert predicted_s(tmp_path, **two, clients=1, burst_queues=False) == pytest.approx(2 * alone_s)
    far = predicted_s(tmp_path, **two, clients=2, gap_s=10.0, burst_queues=False)
    assert far == pytest.approx(10 + alone_s)
    late = predicted_s(tmp_path, **two, clients=1, gap_s=10.0, burst_queues=False)
    assert late == pytest.approx(10 + alone_s + api_s)  # of the second turn
    together = [predicted_s(tmp_path, **two, clients=2, burst_queues=queues) for queues in (False, True)]
    assert together[1] - together[0] == pytest.approx(api_s)


def test_the_command_prints_each_run(tmp_path: Path) -> None:
    read(tmp_path, SERVED, SERVED | {"file": "glm-9/h100.md", DURATION: 3})
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(validate)
    path = str(tmp_path / "runs.csv")
    shown = CliRunner().invoke(app, ["--set", path, "--out", str(tmp_path / "figures")])
    assert shown.exit_code == 0
    for words in (
        "measured s",
        "predicted s",
        "over 2 runs, of which 1 cannot be predicted",
        "glm-9/h100.md: model not in",
    ):
        assert words in shown.stdout
    (row,) = json.loads(CliRunner().invoke(app, ["--set", path, "--json"]).stdout)
    assert row["error"] == pytest.approx(row["predicted_s"] / 2.5 - 1)


def test_missed_runs_count_as_infinitely_wrong() -> None:
    rows = [WholeRow("", "", "", "", 1, "duration", 1.0, 1 + error, error) for error in (0.1, -0.2, 0.3)]
    assert whole_median(rows, 0) == pytest.approx(0.2)
    assert whole_median(rows, 1) == pytest.approx(0.25)
    assert whole_median(rows, 4) == np.inf


@pytest.mark.slow
@pytest.mark.skipif(not PAGES.is_file(), reason="the shared/ folder with the pages is absent")
def test_the_pages_as_fidelity_says() -> None:
    """167 runs of vLLM on NVIDIA GPUs, four of them baselines; with those that cannot be predicted, the median keeps 15 %."""
    make_step = step_factory(Latency.TABLES)
    found = read_set(PAGES, make_step)
    rows, page = whole_rows(predict_set(found, make_step)), " ".join(FIDELITY.read_text(encoding="utf-8").split())
    for engine, predicted, missed, median, said in (
        ("vllm", 148, 19, 0.1358, "13.6 %"),
        ("sglang", 90, 23, 0.127, "12.7 %"),
        ("trtllm", 26, 1, 0.217, "21.7 %"),
    ):
        mine = [row for row in rows if row.backend == engine]
        assert (len(mine), missed_by(found, engine)) == (predicted, missed)
        assert whole_median(mine, 0) == pytest.approx(median, abs=0.0006)
        assert said in page
    whole = {"deepseek-v3.2", "glm-5.2"}
    ranks = [row for row in rows if row.backend == "sglang" and row.model in whole and row.tp == 1]
    assert f"off by {100 * whole_median(ranks, 0):.1f} % in the median of {len(ranks)} runs" in page
    both = [row for row in rows if row.backend == "sglang"]
    slow = [row.error for row in both if row.model.startswith(("gpt-oss", "qwen3.5")) and row.error is not None]
    assert f"{-100 * max(slow):.0f} to {-100 * min(slow):.0f} % too fast" in page and len(slow) == 6
    assert whole_median(both, 23) == pytest.approx(0.155, abs=0.0006)
    assert whole_median([row for row in rows if row.backend == "vllm"], 19) == pytest.approx(0.147, abs=0.0006)
    for other, median in zip(found.sensitivities[:2], (0.159, 0.1537), strict=True):
        cases = tuple(other.change(case) for case in found.cases if case.label.backend == "vllm")
        moved = whole_rows(predict_set(replace(found, cases=cases), make_step))
        assert whole_median(moved, 19) == pytest.approx(median, abs=0.0006), other.what
