"""run, plot and compare on the real simulator: what is printed where, what lies in the folder, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fineserve_sim.cli.console import span, told_of
from fineserve_sim.experiment import Interrupted

FIGURES = [f"{name}.{kind}" for name in ("memory", "placement", "rates") for kind in ("png", "svg")]


def test_run_prints_tables_and_fills_the_results_folder(call: Any, experiment: Path, tmp_path: Path) -> None:
    done = call("run", str(experiment), "--jobs", "1")
    assert done.code == 0
    assert "rates: TTFT SLO attainment (%) by Rate scale" in done.out
    assert "Claims: " in done.out
    assert "40 measured requests a run < 2000" in done.out
    assert "Results in results/small" in done.out
    assert "Two models on one GPU" in done.err
    assert "4 cells of 2 systems, 2 seeds each, 1 job" in done.err
    assert "\x1b" not in done.out + done.err
    folder = tmp_path / "results" / "small"
    assert sorted(path.name for path in (folder / "figures").iterdir()) == FIGURES
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["experiment"] == "small"


def test_run_prints_the_summary_alone_as_json(call: Any, experiment: Path, tmp_path: Path) -> None:
    done = call("run", str(experiment), "--jobs", "1", "--quick", "--seeds", "2", "--out", "here", "--json")
    assert done.code == 0
    assert json.loads(done.out) == json.loads((tmp_path / "here" / "summary.json").read_text(encoding="utf-8"))
    assert {(cell["seeds"], cell["requests"]) for cell in json.loads(done.out)["cells"]} == {(2, 40)}


def test_set_replaces_values_of_the_file_and_decisions_are_logged(call: Any, experiment: Path, tmp_path: Path) -> None:
    options = ("--set", "seeds=1", "--set", "systems=[fineserve]", "--decisions", "--json")
    done = call("run", str(experiment), "--jobs", "1", *options)
    assert done.code == 2  # the figure and the claim still name static*
    done = call("run", str(experiment), "--jobs", "1", *options, "--set", "claims=[]")
    assert done.code == 0
    assert {cell["system"] for cell in json.loads(done.out)["cells"]} == {"fineserve"}
    assert len(list((tmp_path / "results" / "small" / "decisions").iterdir())) == 2


@pytest.mark.slow
def test_plot_draws_the_same_bytes_again(call: Any, experiment: Path, tmp_path: Path) -> None:
    call("run", str(experiment), "--jobs", "1", "--quick")
    folder = tmp_path / "results" / "small" / "figures"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    done = call("plot", "results/small")
    assert done.code == 0
    assert sorted(Path(line).name for line in done.out.splitlines()) == FIGURES
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_plot_says_what_is_wrong_with_a_folder(call: Any, experiment: Path, tmp_path: Path) -> None:
    call("run", str(experiment), "--jobs", "1", "--quick", "--out", "here")
    for timeline in (tmp_path / "here" / "cells").glob("*.timeline.parquet"):
        timeline.unlink()
    done = call("plot", "here")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "timeline.parquet: not there; run the experiment again" in done.err
    (tmp_path / "here" / "summary.json").write_text("{", encoding="utf-8")
    done = call("plot", "here")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "summary.json: damaged" in done.err


def test_compare_needs_a_trace_and_a_list_of_systems(call: Any, trace: Path) -> None:
    models = ("--model", "A=llama-3.1-8b:fp8", "--model", "B=llama-3.1-8b")
    done = call(
        "compare", str(trace), "-s", "fineserve", "-s", "static*", *models, "--ttft-slo", "0.5", "-j", "1", "--json"
    )
    assert done.code == 0
    summary = json.loads(done.out)
    named = [(cell["sweep"], cell["system"]) for cell in summary["cells"]]
    assert named == [("run", "fineserve"), ("run", "static*"), ("run", "clairvoyant"), ("dedicated", "dedicated")]
    assert summary["cells"][-1]["axes"]["cluster.count"] == 2  # one GPU is too few to give each model its own
    assert {cell["arrived"] for cell in summary["cells"]} == {40}
    assert set(summary["slo"]) == {"A", "B"}


def test_compare_deals_out_requests_when_asked(call: Any, trace: Path) -> None:
    models = ("--model", "llama-3.1-8b:fp8", "--model", "big=llama-3.1-8b:W16A16:1")
    arguments = ("compare", str(trace), "-s", "fineserve", *models, "--ttft-slo", "0.5", "-j", "1")
    refused = call(*arguments)
    assert refused.code == 2
    assert refused.err.endswith("recorded.csv: --model is missing for A, B; name them, or give --spread\n")
    done = call(*arguments, "--spread", "--no-anchors")
    assert done.code == 0 and "Clairvoyant" not in done.out
    assert "Results in results/compare-recorded" in done.out


def test_ctrl_c_between_simulations_says_how_many_are_kept(
    call: Any, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Interrupted(3, 8)

    monkeypatch.setattr("fineserve_sim.experiment.run_loaded", stop)
    done = call("run", str(experiment))
    assert done.code == 130
    assert done.err.splitlines()[-1] == f"fineserve-sim: {Interrupted(3, 8)}"
    assert "3 of 8" in done.err


def test_ctrl_c_ends_a_process_with_one_line(spawn: Callable[..., subprocess.Popen[str]], experiment: Path) -> None:
    process = spawn("run", str(experiment), "--jobs", "1", "--set", "workload.requests=200000")
    assert process.stderr is not None
    started = [process.stderr.readline(), process.stderr.readline()]
    assert "4 cells of 2 systems" in started[1]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    assert re.fullmatch(r"fineserve-sim: interrupted.*run the same command again to go on\n", err)


IN_A_FINALIZER = """
import signal, time
from fineserve_sim.cli.console import interruptible

class Interrupting:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

with interruptible():
    Interrupting()
    print("lost", flush=True)
    time.sleep(60)
"""


def test_ctrl_c_in_a_finalizer_is_not_lost(tmp_path: Path) -> None:
    """Python ignores what is raised there, and in the callbacks of an import."""
    command = [sys.executable, "-c", IN_A_FINALIZER]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "lost\n"
    assert done.stderr.startswith("fineserve-sim: interrupted; run the same command again to go on\n")
    assert done.returncode != 0


def test_the_trace_file_is_of_the_cell_that_one_names(call: Any, experiment: Path, tmp_path: Path) -> None:
    common = ("run", str(experiment), "--quick", "--jobs", "1", "--out", "out", "--trace-out")
    assert call(*common, "trace.json", "--cell", "rate_scale=2").code == 0
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    runs = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len(runs) == 4 and all("rate_scale 2.0" in name for name in runs)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--trace-out", "nodir/trace.json"), "--trace-out nodir/trace.json: there is no folder nodir"),
        (("--trace-out", "t.json", "--cell", "rate_scale=3"), "--cell rate_scale=3: no such cell; "),
        (("--trace-out", "t.json", "--cell", "rate"), "--cell rate: expected AXIS=VALUE"),
        (("--cell", "rate_scale=2"), "give --trace-out FILE, too"),
    ],
)
def test_a_trace_file_that_cannot_be_is_refused_before_anything_is_run(
    call: Any, experiment: Path, tmp_path: Path, options: tuple[str, ...], problem: str
) -> None:
    refused = call("run", str(experiment), "--quick", "--out", "out", *options)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert problem in refused.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["run", "compare", "size", "reproduce"])
def test_ray_that_is_not_installed_is_one_line(
    call: Any, experiment: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "experiments").mkdir()
    experiment.rename(tmp_path / "experiments" / "small.yaml")
    of_trace = (str(trace), "-m", "A=llama-3.1-8b", "-m", "B=llama-3.1-8b", "-s", "fineserve")
    arguments = {
        "run": ("experiments/small.yaml",),
        "compare": of_trace,
        "size": (*of_trace, "--target", "ttft:0.9"),
        "reproduce": ("--paper", "KunServe"),
    }
    refused = call(command, *arguments[command], "--executor", "ray")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == ("fineserve-sim: error: --executor ray: Ray is not installed; pip install 'fineserve[ray]'\n")


@pytest.mark.slow
def test_a_damaged_simulation_is_run_again_and_what_a_killed_run_left_goes(
    call: Any, experiment: Path, tmp_path: Path
) -> None:
    command = ("run", str(experiment), "--jobs", "1", "--quick", "--out", "here")
    assert call(*command).code == 0
    cells, summary = tmp_path / "here" / "cells", (tmp_path / "here" / "summary.json").read_bytes()
    for path in sorted(cells.glob("*.parquet"))[:3]:
        path.write_bytes(path.read_bytes()[:50])
    (cells / ".old.parquet.4711.tmp").write_bytes(b"x")
    os.utime(cells / ".old.parquet.4711.tmp", (0, 0))
    (cells / ".new.parquet.4711.tmp").write_bytes(b"x")
    assert call(*command).code == 0
    assert (tmp_path / "here" / "summary.json").read_bytes() == summary
    assert [path.name for path in cells.glob(".*.tmp")] == [".new.parquet.4711.tmp"]
    damaged = next(path for path in cells.glob("*.parquet") if "timeline" not in path.name)
    damaged.write_bytes(b"PAR1" + bytes(60) + b"PAR1")
    done = call(*command)
    assert (done.code, done.err.splitlines()[-1].endswith("damaged; delete it and run again")) == (2, True)


@pytest.mark.slow
def test_nothing_is_written_outside_the_chosen_folder(call: Any, experiment: Path, trace: Path, tmp_path: Path) -> None:
    models = ("--model", "A=llama-3.1-8b:fp8", "--model", "B=llama-3.1-8b", "-s", "fineserve", "-j", "1")
    before = {*tmp_path.iterdir()}
    for command in (
        ("run", experiment.name, "--quick", "--decisions", "--jobs", "1"),
        ("compare", trace.name, *models, "--ttft-slo", "0.5", "--rate-scale", "1"),
        ("size", trace.name, *models, "--ttft-slo", "0.5", "--target", "ttft:0.9", "--most-gpus", "2"),
    ):
        assert call(*command, "--out", "a/b").code == 0
    for command in (("plot", "a/b"), ("report", "a/b"), ("diff", "a/b", "a/b"), ("explain", "a/b", "1")):
        call(*command)
    assert {*tmp_path.iterdir()} - before == {tmp_path / "a"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.slow
def test_a_model_without_traffic_is_a_row_without_numbers(call: Any, tmp_path: Path) -> None:
    rows = [f"{0.1 * index:.1f},default,512,16" for index in range(20)]
    text = "\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows, ""])
    (tmp_path / "one.csv").write_text(text, encoding="utf-8")
    models = ("--model", "default=llama-3.1-8b", "--model", "x=llama-3-8b", "--ttft-slo", "1", "--no-anchors")
    done = call("compare", "one.csv", *models, "-s", "fineserve", "--rate-scale", "1", "--no-search", "-j", "1")
    assert done.code == 0, done.err
    assert [line.split()[:4] for line in done.out.splitlines() if line.startswith("x ")] == [["x", "0", "0", "–"]]
    (tmp_path / "one.yaml").write_text(
        "fineserve: 1\ntitle: One\ncluster: {gpu: h100-sxm, count: 1}\nworkload: {trace: one.csv}\nslo: {ttft_s: 1}\n"
        "models: [{id: default, model: llama-3.1-8b, precision: fp8}, {id: x, model: llama-3-8b, precision: fp8}]\n"
        "systems: [fineserve]\nseeds: 1\n",
        encoding="utf-8",
    )
    assert call("run", "one.yaml", "-j", "1").code == 0


@pytest.mark.slow
def test_into_a_pipe_a_line_says_now_and_then_how_far_a_run_is(
    call: Any, experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fineserve_sim.cli.console.LINE_S", 0.0)
    monkeypatch.setattr("fineserve_sim.cli.console.LOOKS_S", 0.0)
    lines = call("run", str(experiment), "--jobs", "1").err.splitlines()[2:]
    assert lines[0] == "1 of 8 simulations (fineserve, rate scale 1, seed 0)"
    assert re.fullmatch(r"7 of 8 simulations, 0 s left \(static\*, rate scale 2, seed 0\)", lines[6]), lines
    assert len(lines) == 7 and [span(s) for s in (12.3, 200, 9000)] == ["12 s", "3 min", "2.5 h"]
    assert [told_of(done, 40) for done in (0.3, 3, 3.99)] == ["0 of 40", "3 of 40", "3 of 40"]
