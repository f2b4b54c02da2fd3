"""compare, size and run as somebody meets them who has a trace and a question: the answer on the screen."""

from __future__ import annotations

import json
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

MODELS = ("--model", "A=llama-3.1-8b:fp8", "--model", "B=llama-3.1-8b")


def test_compare_answers_on_the_screen_and_in_the_summary(call: Any, trace: Path, tmp_path: Path) -> None:
    limits = ("--ttft-slo", "0.5", "--tpot-slo", "0.05", "--e2e-slo", "5", "--price", "2.5")
    systems = ("-s", "fineserve", "-s", "static*", "--no-anchors")
    done = call("compare", str(trace), *systems, *MODELS, *limits, "--rate-scale", "1", "-j", "1")
    assert done.code == 0
    assert "Take " in done.out and "which keeps 95 % of the requests within their limits: 100.0" in done.out
    assert "$2.50 an hour" in done.out and "($2.50 a GPU-hour as given)" in done.out
    assert "Limits: TTFT 0.5 s, TPOT 0.05 s, end to end 5 s." in done.out
    assert "holds up to rate scale" in done.out and "1 is the fewest" in done.out
    assert done.out.count("\n") < 40
    summary = json.loads((tmp_path / "results" / "compare-recorded" / "summary.json").read_text(encoding="utf-8"))
    assert summary["answer"]["choice"]["holds"] and summary["price"]["usd_per_gpu_hour"] == 2.5
    assert summary["answer"]["search"]["gpus"]["value"] == 1
    assert "static*, " not in done.err  # the search is around the chosen system alone
    assert "fineserve, rate_scale 2:" in done.err
    page = (tmp_path / "results" / "compare-recorded" / "report.html").read_text(encoding="utf-8")
    answer = done.out.partition("\nSystem ")[0].splitlines()
    assert (
        len(answer) >= 5 and [line for line in answer if f"<p>{escape(line)}</p>" not in page] == []
    )  # what the search found, too


def test_one_request_has_no_rate_no_interval_and_no_cost_by_request(call: Any, tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("arrival_s,model,prompt_tokens,output_tokens\n5,A,512,16\n", encoding="utf-8")
    alone = ("-s", "fineserve", "--model", "A=llama-3.1-8b:fp8", "--no-anchors", "--no-search")
    done = call("compare", "one.csv", *alone, "--ttft-slo", "0.5", "--rate-scale", "1", "-j", "1")
    assert done.code == 0, done.err
    assert "100.0 %, 5.0 points above, of too few requests for an interval." in done.out
    assert "Cost of 1 h100-sxm: $3.49 an hour ($3.49 a GPU-hour" in done.out
    assert "Load: rate scale 1; " in done.out


def test_a_prompt_longer_than_the_context_is_told_with_the_context(call: Any, tmp_path: Path) -> None:
    rows = "0,A,100,5\n1,A,9000,5\n2,A,100,5\n"
    (tmp_path / "long.csv").write_text(f"arrival_s,model,prompt_tokens,output_tokens\n{rows}", encoding="utf-8")
    alone = ("-s", "fineserve", "--model", "A=yi-34b:fp8", "--no-anchors", "--no-search", "--rate-scale", "1")
    done = call("compare", "long.csv", *alone, "--ttft-slo", "5", "-j", "1")
    assert "33.3 % rejected (no engine can hold the prompt; the context of A is 4,096 tokens)." in done.out, done.err


def test_prompts_from_which_no_limit_follows_are_told_and_leave_nothing(call: Any, tmp_path: Path) -> None:
    rows = "0,A,900000,5\n1,A,900000,5\n"
    (tmp_path / "long.csv").write_text(f"arrival_s,model,prompt_tokens,output_tokens\n{rows}", encoding="utf-8")
    done = call("compare", "long.csv", "-s", "fineserve", "--model", "A=llama-3.1-8b", "--rate-scale", "1", "-j", "1")
    assert (done.code, done.out) == (2, "")
    lost = "100 % of its requests are not served (prompts of up to 900,000 tokens; its context is 131,072)"
    limit = "give a limit in seconds, slo.ttft_s or --ttft-slo"
    assert f"none follows for model A: {lost} under dedicated, isolated load; {limit}" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["long.csv"]


@pytest.mark.slow
def test_dedicated_gpus_beside_a_model_of_open_degree_are_as_many_as_its_weights_need(call: Any, trace: Path) -> None:
    models = ("--model", "A=llama-3.1-70b:fp16:auto", "--model", "B=llama-3.1-8b:fp8:auto")
    done = call(
        "compare", str(trace), "-s", "fineserve", *models, "--gpus", "2", "--rate-scale", "1", "--no-search", "--json"
    )
    assert done.code == 0, done.err
    clusters = {cell["system"]: cell["cluster"]["count"] for cell in json.loads(done.out)["cells"]}
    assert clusters == {"fineserve": 2, "clairvoyant": 2, "dedicated": 3}


@pytest.mark.slow
def test_names_in_any_script_leave_the_screen_alone(spawn: Any, tmp_path: Path) -> None:
    rows = "\n".join(f"{index},模型,512,16" for index in range(20))
    (tmp_path / "named.csv").write_text(f"arrival_s,model,prompt_tokens,output_tokens\n{rows}\n", encoding="utf-8")
    options = ("--model", "模型=llama-3.1-8b:fp8", "--ttft-slo", "0.5", "--no-anchors", "--no-search", "-j", "1")
    process = spawn("compare", "named.csv", "-s", "fineserve", *options, "--rate-scale", "1")
    out, err = process.communicate()
    assert process.returncode == 0 and "模型" in out
    assert "Warning" not in err, err


def test_compare_without_a_rate_looks_for_one_at_which_the_systems_part(call: Any, trace: Path) -> None:
    systems = ("-s", "fineserve", "-s", "static*", "--no-anchors", "--no-search")
    done = call("compare", str(trace), *systems, *MODELS, "--ttft-slo", "0.04", "-j", "1", "--json")
    assert done.code == 0
    assert "At rate scale 1 the systems keep 100.0 to 100.0 % within limits; faster." in done.err
    answer = json.loads(done.out)["answer"]
    assert answer["axes"]["rate_scale"] >= 2 and "search" not in answer


@pytest.mark.slow
def test_a_limit_that_nobody_gave_is_shown_in_seconds(call: Any, trace: Path) -> None:
    done = call("compare", str(trace), "-s", "fineserve", *MODELS, "--no-anchors", "--no-search", "--rate-scale", "1")
    said = re.search(
        r"Limits: TTFT ([\d.]+) s \(\w\) to ([\d.]+) s \(\w\)\. Load: rate scale 1, SLO scale 20,", done.out
    )
    assert said is not None and 0.01 < float(said[1]) < float(said[2]) < 5, done.out


def test_a_trace_that_names_no_models_is_of_the_only_one(call: Any, tmp_path: Path) -> None:
    trace = tmp_path / "plain.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,40,3\n1,300,7\n", encoding="utf-8")
    limits = ("--ttft-slo", "0.5", "--target", "ttft:0.9", "-s", "static*", "-j", "1")
    done = call("size", str(trace), "--model", "chat=llama-3.1-8b", *limits)
    assert done.code == 0 and "Static* on 1 h100-sxm" in done.out, done.err


def test_from_a_trace_to_a_size_in_one_command(call: Any, trace: Path, tmp_path: Path) -> None:
    limits = ("--ttft-slo", "0.3", "--tpot-slo", "0.1", "--target", "ttft:0.9,tpot:0.9")
    done = call(
        "size", str(trace), *MODELS, *limits, "-s", "fineserve", "-s", "dedicated", "--most-gpus", "4", "-j", "1"
    )
    assert done.code == 0, done.err
    assert (
        "The cheapest that keeps 90 % within the limit of TTFT, 90 % within the limit of TPOT: FineServe on 1"
        in done.out
    )
    assert "fineserve, count 4: ttft 100.0 %, tpot 100.0 %, holds" in done.err
    folder = tmp_path / "results" / "size-recorded"
    data = json.loads((folder / "size.json").read_text(encoding="utf-8"))
    assert data["cheapest"] == 0 and data["systems"][1]["answer"]["value"] == 2
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["answer"]["choice"]["holds"]
    page = unescape((folder / "report.html").read_text(encoding="utf-8"))
    band = f"({data['systems'][0]['band']['text']} with the model's error)"
    assert band in done.out and page.count(band) >= 2, "on the screen, on the first page, above the search"
    assert all(f">{header}<" in page for header in ("With model's error", "Measured")) and ">Why none<" not in page
    assert "Model's error: steps" in done.out and "Model's error: steps" in page
    again = call("size", str(folder), "--target", "ttft:0.9", "--over", "rate", "--precision", "1", "-j", "1", "--json")
    assert again.code == 0 and json.loads(again.out)["systems"][0]["answer"]["value"] >= 1
