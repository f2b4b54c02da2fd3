"""A small experiment that the real simulator finishes in a moment, and two ways to call the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

EXPERIMENT = """\
fineserve: 1
title: Two models on one GPU
cluster: {gpu: h100-sxm, count: 1}
models:
  - {id: A, model: llama-3.1-8b, precision: fp8, rate_per_s: 2}
  - {id: B, model: llama-3.1-8b, precision: W16A16, rate_per_s: 2}
workload: {lengths: {prompt_tokens: 512, output_tokens: 16}, requests: 40}
slo: {ttft_s: 0.5}
systems: [fineserve, "static*"]
sweeps:
  - {name: rates, axes: {rate_scale: [1, 2]}}
seeds: 2
figures:
  - {name: rates, sweep: rates, x: rate_scale, panels: [ttft_attainment]}
  - {name: memory, timeline: {rate_scale: 2}, panels: [kv_used_bytes, waiting, gpu_free_bytes]}
claims:
  - {id: more, paper: "> 1", measure: ratio, metric: goodput_per_s, of: fineserve, over: "static*",
     at: {sweep: rates, rate_scale: 2}}
quick: {workload.requests: 20, seeds: 1}
"""


class Outcome(NamedTuple):
    """What a call of the command line left behind."""

    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Call ``main`` in this process, in an empty folder, as the console script does."""
    from fineserve_sim.cli import main

    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "COLUMNS", "TERMINAL_WIDTH"):
        monkeypatch.delenv(name, raising=False)

    def called(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["fineserve-sim", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        code = left.value.code
        return Outcome(code if isinstance(code, int) else 0, *capsys.readouterr())

    return called


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """The small experiment file."""
    path = tmp_path / "small.yaml"
    path.write_text(EXPERIMENT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of the small experiment's short version."""
    from fineserve_sim.experiment import load_experiment, run_loaded

    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.yaml").write_text(EXPERIMENT, encoding="utf-8")
    run_loaded(load_experiment(folder / "small.yaml", quick=True), folder / "results", jobs=1)
    return folder / "results"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A trace of two models."""
    rows = (f"{0.25 * index},{'AB'[index % 2]},512,16" for index in range(40))
    path = tmp_path / "recorded.csv"
    path.write_text("\n".join(["arrival_s,model,prompt_tokens,output_tokens", *rows, ""]), encoding="utf-8")
    return path


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command line as a process of its own, with pipes for stdout and stderr. None outlives its test."""
    started: list[subprocess.Popen[str]] = []
    colourless = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "GITHUB_ACTIONS")}

    def spawned(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from fineserve_sim.cli import main; main()", *arguments]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, env=colourless))
        return started[-1]

    yield spawned
    for process in started:
        process.kill()
        process.communicate()
