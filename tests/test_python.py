"""The program as functions: docs/python.md runs as it stands there, from a script, from standard input and where processes are
spawned."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import fineserve_sim as fs
from fineserve_sim import api
from fineserve_sim.cli.app import app
from fineserve_sim.cli.compare import compare as cli_compare
from fineserve_sim.cli.plan import plan as cli_plan
from fineserve_sim.cli.run import run as cli_run
from fineserve_sim.cli.size import size as cli_size
from fineserve_sim.experiment import ConfigError
from fineserve_sim.experiment.run.local import LocalProcesses

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

EXPERIMENT: dict[str, Any] = {
    "fineserve": 1,
    "title": "Two models on one GPU",
    "cluster": {"gpu": "h100-sxm", "count": 1},
    "models": [
        {"id": "A", "model": "llama-3.1-8b", "precision": "fp8", "rate_per_s": 2},
        {"id": "B", "model": "llama-3.1-8b", "precision": "W16A16", "rate_per_s": 2},
    ],
    "workload": {"lengths": {"prompt_tokens": 512, "output_tokens": 16}, "requests": 40},
    "slo": {"ttft_s": 0.5},
    "systems": ["fineserve", "static*"],
    "sweeps": [{"name": "rates", "axes": {"rate_scale": [1, 2]}}],
    "seeds": 2,
}
PROGRAM = f"""\
import fineserve_sim as fs
experiment = {EXPERIMENT!r}
"""


@pytest.fixture(scope="module")
def result() -> fs.Result:
    return fs.run(EXPERIMENT, jobs=1)


@pytest.mark.slow
def test_the_page_runs_as_it_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in CODE:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert "infeasible" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"attainment.html", "results", "trace.csv"}
    assert len(CODE) == 5


def test_cells_have_a_row_each_with_intervals(result: fs.Result) -> None:
    assert result.cells[["system", "rate_scale"]].to_numpy().tolist() == [
        ["fineserve", 1.0], ["static*", 1.0], ["fineserve", 2.0], ["static*", 2.0]
    ]  # fmt: skip
    assert (result.cells["requests"] == 80).all()
    assert result.cells["ttft_attainment_half_width"].notna().all()


def test_requests_add_up_to_what_the_cells_say(result: fs.Result) -> None:
    measured = result.requests[result.requests["measured"]]
    assert len(measured) == result.cells["requests"].sum()
    means = measured.groupby(["rate_scale", "system"], observed=True)["ttft_s"].mean()
    cells = result.cells.set_index(["rate_scale", "system"])["ttft_mean_s"]
    assert means.to_dict() == pytest.approx(cells.to_dict())
    assert (measured["e2e_s"] > measured["ttft_s"]).all()


def test_placements_name_the_gpus_of_every_model(result: fs.Result) -> None:
    placed = result.placements[result.placements["system"] == "static*"]
    assert set(placed["model"]) == {"A", "B"}
    assert set(placed["gpus"]) == {(0,)}


def test_a_model_without_a_gpu_is_a_row_that_says_so() -> None:
    models = [*EXPERIMENT["models"], {"id": "C", "model": "qwen3-32b", "precision": "W16A16", "rate_per_s": 1}]
    placed = fs.run(EXPERIMENT | {"models": models, "systems": ["prism*"], "seeds": 1}, jobs=1).placements
    left = placed[placed["status"] == "unplaced"]
    assert len(left) and all(gpus == () for gpus in left["gpus"])


def test_the_timeline_has_a_row_a_sample_and_engine(result: fs.Result) -> None:
    one = result.timeline.query("system == 'fineserve' and rate_scale == 1 and seed == 0")
    assert set(one["model"]) == {"A", "B"}
    assert all(samples["time_s"].is_monotonic_increasing for _, samples in one.groupby("engine"))
    assert one["kv_used_bytes"].max() > 0


def test_figures_are_objects_with_a_series_a_system(result: fs.Result) -> None:
    figure = result.figures["rates/ttft_attainment"]
    assert [trace.name for trace in figure.data if trace.visible] == ["FineServe", "Static*"]
    assert list(figure.data[0].x) == [1, 2]


def test_a_notebook_shows_a_row_a_cell(result: fs.Result) -> None:
    shown = result._repr_html_()
    assert shown.count("<tr") == 1 + 4
    assert "Two models on one GPU" in shown and "TTFT SLO attainment (%)" in shown


def test_the_folder_is_gone_with_the_result() -> None:
    found = fs.run(EXPERIMENT, jobs=1, overrides={"workload.requests": 10}, seeds=1)
    folder = found.folder
    assert found.cells["requests"].tolist() == [10] * 4 and folder.exists()
    del found
    assert not folder.exists()


def test_a_file_and_its_contents_give_the_same(tmp_path: Path, result: fs.Result) -> None:
    again = fs.run(result.folder / "resolved.yaml", tmp_path, jobs=1)
    assert again.cells.equals(result.cells)
    assert fs.read(tmp_path).cells.equals(result.cells)


def test_two_results_of_one_folder_are_not_mixed_up(tmp_path: Path) -> None:
    """A loop in a notebook: each result keeps its own numbers, and does not tell of requests that are another's."""
    first, second = (fs.run(EXPERIMENT, tmp_path, jobs=1, overrides={"workload.requests": n}) for n in (10, 20))
    assert set(first.cells["requests"]) != set(second.cells["requests"])
    assert len(second.requests) == second.cells["requests"].sum()
    for asked in (lambda: first.requests, lambda: first.figures, first.report):
        with pytest.raises(ValueError, match="another run is here since; give each run a folder of its own"):
            asked()


def test_a_trace_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    """A notebook edits its trace in place and compares anew."""
    trace = tmp_path / "trace.csv"

    def tokens(prompt_tokens: int, requests: int) -> list[int]:
        rows = [f"{0.25 * number},A,{prompt_tokens},4" for number in range(requests)]
        trace.write_text("arrival_s,model,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
        model = ["A=llama-3.1-8b:fp8"]
        found = fs.compare(trace, ["fineserve"], model, ttft_slo_s=0.5, anchors=False, out=tmp_path / "out", jobs=1)
        return [int(each) for each in found.requests["prompt_tokens"]]

    assert tokens(512, 3) == [512] * 3
    assert tokens(256, 4) == [256] * 4
    assert tokens(128, 4) == [128] * 4


def test_a_mistake_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^experiment: workload\.reqests: unknown key; did you mean \"requests\"\?$"):
        fs.run(EXPERIMENT | {"workload": {**EXPERIMENT["workload"], "reqests": 3}})
    with pytest.raises(ValueError, match=r"no summary\.json"):
        fs.read("nowhere")


def test_what_python_gives_is_left_alone() -> None:
    given: Mapping[str, Any] = EXPERIMENT | {"workload": {**EXPERIMENT["workload"], "requests": 10}}
    before = repr(given)
    fs.run(given, jobs=1, seeds=1)
    assert repr(given) == before


def test_sizing_finds_the_rate_and_keeps_its_probes() -> None:
    found = fs.size(EXPERIMENT | {"systems": ["fineserve"]}, {"ttft": 0.9}, "rate", precision=0.5, jobs=1)
    assert found.table["system"].tolist() == ["fineserve"]
    assert found.table["answer"][0] in set(found.probes["value"])
    assert found.probes.loc[found.probes["value"] == found.table["answer"][0], "holds"].all()
    assert "<table" in found._repr_html_()


def test_executors_are_those_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All work goes to the one that is asked for, and nothing is left behind where there is none."""
    asked: list[tuple[str, int | None]] = []
    done: list[Any] = []

    class Notes(LocalProcesses):
        def each(self, works: Any, out: Path, tell: Any) -> Any:
            for work, found in super().each(works, out, tell):
                done.append(work)
                yield work, found

    def executor_of(text: str, jobs: int | None) -> LocalProcesses:
        asked.append((text, jobs))
        return Notes(1)

    calls: dict[str, Callable[..., Any]] = {
        "run": lambda **how: fs.run(EXPERIMENT, tmp_path / "run", seeds=1, **how),
        "size": lambda **how: fs.size(EXPERIMENT, {"ttft": 0.9}, "rate", precision=0.5, out=tmp_path / "size", **how),
        "compare": lambda **how: fs.compare(
            tmp_path / "trace.csv", ["static*"], ["A=llama-3.1-8b:fp8"], ttft_slo_s=1, out=tmp_path / "compare", **how
        ),
    }
    (tmp_path / "trace.csv").write_text("arrival_s,model,prompt_tokens,output_tokens\n0,A,100,5\n1,A,100,5\n")
    for name, call in calls.items():
        with pytest.raises(ValueError, match="executor spark: expected local, ray or ray:HOST:PORT"):
            call(executor="spark")
        assert not (tmp_path / name).exists()
    monkeypatch.setattr(api, "executor_of", executor_of)
    for call in calls.values():
        done.clear()
        call(executor="ray:10.0.0.1:6379", jobs=3)
        assert done
    assert asked == [("ray:10.0.0.1:6379", 3)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("from_stdin", [True, False], ids=["stdin", "spawned"])
def test_processes_start_from_standard_input_and_from_a_spawned_one(tmp_path: Path, from_stdin: bool) -> None:
    """Workers import the script that starts them: standard input cannot be imported, a script can, and so can one that a
    spawned process runs."""
    calls = 'print(sorted(set(fs.run(experiment, "out", jobs=2).cells["system"])))\n'
    if not from_stdin:
        body = "".join(f"    {line}\n" for line in calls.splitlines())
        calls = (
            f"def work():\n{body}\n"
            'if __name__ == "__main__":\n'
            "    from multiprocessing import get_context\n"
            '    child = get_context("spawn").Process(target=work)\n'
            "    child.start(); child.join(); raise SystemExit(child.exitcode)\n"
        )
    script = tmp_path / "script.py"
    script.write_text(PROGRAM + calls, encoding="utf-8")
    with script.open(encoding="utf-8") as source:
        command = [sys.executable, *([] if from_stdin else [str(script)])]
        stdin = source if from_stdin else subprocess.DEVNULL
        done = subprocess.run(command, stdin=stdin, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "['fineserve', 'static*']\n"), done.stderr


COMMANDS = {"run": cli_run, "compare": cli_compare, "size": cli_size, "plan": cli_plan}
OF_COMMANDS = {"as_json", "file", "exact_steps", "trace_out", "cell", "metrics", "share", "columns"}
"""Options that say how a command prints, what else it writes, and which of a file's cells; ``file`` is ``experiment`` here, a
share is of ``spread``, and traces of other layouts are for ``fineserve_traces.take_in``."""
OF_BOTH = {"trace", "source"}
"""What commands do without where each model has a trace of its own."""


@pytest.mark.parametrize("name", COMMANDS)
def test_functions_take_the_options_of_the_commands_with_their_defaults(name: str) -> None:
    command, function = (inspect.signature(each).parameters for each in (COMMANDS[name], getattr(fs, name)))
    options = {key: option.default for key, option in command.items() if key not in OF_COMMANDS | OF_BOTH}
    left_out = {"experiment", "on_progress"} | OF_BOTH
    given = {key: option.default for key, option in function.items() if key not in left_out}
    assert given == options


def test_answers_are_those_of_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One comparison and one search from a trace, by function and by command."""
    trace, models = tmp_path / "trace.csv", ["A=llama-3.1-8b:fp8", "B=llama-3.1-8b"]
    rows = [f"{0.25 * number},{'AB'[number % 2]},512,16" for number in range(40)]
    trace.write_text("arrival_s,model,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n", encoding="utf-8")
    limits = {"ttft_slo_s": 0.5, "tpot_slo_s": 0.05, "price": 2.0, "jobs": 1}
    compared = fs.compare(trace, ["static*"], models, **limits, targets={"all": 0.9}, rate_scale=1, anchors=False)
    assert compared.answer.startswith(
        "Take Static* on 1 h100-sxm, which keeps 90 % of the requests within their limits: "
    )
    assert "$2.00 an hour" in compared.answer and "holds up to rate scale" in compared.answer
    found = fs.size(trace, {"all": 0.9}, models=models, systems=["static*"], **limits, most_gpus=2, gpu=["h100-sxm"])
    assert found.answer.startswith("The cheapest that keeps 90 %") and found.result is not None
    options = [
        "--ttft-slo",
        "0.5",
        "--tpot-slo",
        "0.05",
        "--price",
        "2",
        "--target",
        "all:0.9",
        "-s",
        "static*",
        "-j",
        "1",
    ]
    for command, more, told in (
        ("compare", ["--rate-scale", "1", "--no-anchors"], compared.answer),
        ("size", ["--most-gpus", "2", "--gpu", "h100-sxm"], f"{found.answer}\n{found.result.answer}"),
    ):
        named = [word for model in models for word in ("--model", model)]
        words = [command, str(trace), *named, *options, *more, "--out", str(tmp_path / command)]
        app(words, standalone_mode=False)
        out = capsys.readouterr().out
        assert told.splitlines() and all(line in out for line in told.splitlines())


def test_one_comparison_of_several_seeds_with_a_value_replaced(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,model,prompt_tokens,output_tokens\n0,x,100,5\n1,x,100,5\n2,x,100,5\n", encoding="utf-8")
    models, how = ["llama-3.1-8b:fp8", "llama-3.1-8b:awq"], {"ttft_slo_s": 1, "rate_scale": 1, "jobs": 1}
    found = fs.compare(
        trace, ["static*"], models, spread=True, seeds=2, overrides={"engine.token_budget": 512}, search=False, **how
    )
    assert set(found.cells["seeds"]) == {2}
    assert "token_budget: 512" in (found.folder / "resolved.yaml").read_text(encoding="utf-8")


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = (
        "import sys, fineserve_sim; print(*(name in sys.modules for name in ('numpy', 'pandas', 'fineserve_sim.api')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 3


def test_what_is_not_there_is_said_as_python_does() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'simulate'"):
        _ = fs.simulate  # type: ignore[attr-defined]
