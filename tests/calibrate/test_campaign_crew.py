"""The processes of a campaign: engines that begin together and leave nothing behind, trials with a time limit, MPS."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fineserve_calibrate.probes import nvidia
from fineserve_calibrate.probes.engines import LLAMA_8B, TINY, Composition
from fineserve_calibrate.probes.schema import Unavailable
from fineserve_evidence.campaign.bench import DeviceBench
from fineserve_evidence.campaign.crew import Crew, Member, settings
from fineserve_evidence.campaign.items import Take, Trial
from fineserve_evidence.campaign.plan import plan
from fineserve_evidence.campaign.trial_runs import CPU_PLAY, GPU_PLAY, draw_trace, shapes, write_play
from fineserve_evidence.campaign.trials import ended, metrics, run_trial

from fineserve_sim.cluster import ServedModel
from fineserve_sim.cluster.compose.memory import peak_activation_bytes, resident_bytes, usable_bytes
from fineserve_sim.experiment import load_experiment

ENGINE = '''
"""Speaks a campaign worker's protocol: steps of a known length, and failures where it is told to."""
import json, sys
given = json.loads(sys.argv[1])
def say(**answer):
    print(json.dumps(answer), flush=True)
def failing(where):
    if given.get("fails") == where:
        print(f"no {where}, says a library", file=sys.stderr, flush=True)
        say(error=f"RuntimeError: no {where}")
        sys.exit()
say(import_s=0.5)
if not sys.stdin.readline():
    sys.exit()
failing("start")
say(start_s=1.5)
for line in sys.stdin:
    asked = json.loads(line)
    if "from" in asked:
        failing("steps")
        count = round((asked["until"] - asked["from"]) / given["step_s"])
        say(steps=[[asked["from"] + (n + 1) * given["step_s"], given["step_s"]] for n in range(count)])
    else:
        failing("load")
        say(ready=True)
'''
DECODE = Composition(4, 64, 0)


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Engines that are this script; the folder it lies in."""
    (tmp_path / "scripted_engine.py").write_text(ENGINE, encoding="utf-8")
    monkeypatch.setattr(Member, "worker", "scripted_engine")
    return tmp_path


def seat(folder: Path, step_s: float = 0.25, fails: str = "") -> dict[str, Any]:
    return {"environment": {"PYTHONPATH": str(folder)}, "step_s": step_s, "fails": fails}


def test_loads_begin_and_end_at_the_same_instants(scripted: Path) -> None:
    crew = Crew([seat(scripted, 0.25), seat(scripted, 0.5), seat(scripted)], scripted / "logs")
    try:
        from_s, (first, second) = crew.take([DECODE, Composition(0, 0, 256), None], hold_s=2.0)
        assert [len(first), len(second)] == [8, 4]
        assert first[0][0] == pytest.approx(from_s + 0.25) and second[-1][0] == pytest.approx(from_s + 2.0)
        assert [member.start_s for member in crew._members] == [1.5] * 3
    finally:
        crew.close()


@pytest.mark.parametrize(("fails", "says"), [("load", "no load"), ("steps", "no steps")])
def test_an_engine_that_fails_says_why(scripted: Path, fails: str, says: str) -> None:
    crew = Crew([seat(scripted), seat(scripted, fails=fails)], scripted / "logs")
    with pytest.raises(Unavailable, match=f"vLLM: RuntimeError: {says}"):
        crew.take([DECODE, DECODE], hold_s=1.0)
    crew.close()
    assert [path.read_text() for path in sorted((scripted / "logs").iterdir())] == ["", f"{says}, says a library\n"]


def gone(pid: int) -> bool:
    """Whether a process ends within ten seconds."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 10.0)[0])
    finally:
        os.close(process)


def test_one_that_does_not_start_takes_the_others_with_it(scripted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    class Noted(Member):
        def __post_init__(self) -> None:
            super().__post_init__()
            pids.append(self._process.pid)

    monkeypatch.setattr("fineserve_evidence.campaign.crew.Member", Noted)
    with pytest.raises(Unavailable, match="no start"):
        Crew([seat(scripted), seat(scripted, fails="start"), seat(scripted)], scripted / "logs")
    assert len(pids) == 3 and all(gone(pid) for pid in pids)


PARENT = """
import json, sys
from pathlib import Path
from fineserve_evidence.campaign.command import _signals
from fineserve_evidence.campaign.crew import Crew, Member
Member.worker = "scripted_engine"
crew = Crew(json.loads(sys.argv[1]), Path("logs"))
with _signals(60.0):
    try:
        print(*(member._process.pid for member in crew._members), flush=True)
        sys.stdin.read()
    finally:
        crew.close()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_engines_end_with_the_command_however_it_ends(scripted: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, json.dumps([seat(scripted), seat(scripted)])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        engines = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(engines) == 2
        parent.send_signal(how)
        assert parent.wait(300) != 0
    assert all(gone(pid) for pid in engines)


def test_engines_are_asked_for_what_a_scene_needs() -> None:
    capped = next(item.ask for item in plan(False, LLAMA_8B.name) if item.part == "pairs-mps-bfloat16@70+bfloat16@30")
    assert isinstance(capped, Take)
    pipe = ("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    given = [settings(capped.scene, place, LLAMA_8B, on_cpu=False, mps=(pipe,)) for place in (0, 1)]
    assert [each["environment"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for each in given] == ["70", "30"]
    assert all(each["environment"][pipe[0]] == pipe[1] for each in given)
    graphs = given[0]["arguments"]["compilation_config"]
    assert graphs["cudagraph_capture_sizes"] == [1, 32, 256] and not given[0]["arguments"]["enforce_eager"]
    small = next(item.ask for item in plan(True, TINY.name) if isinstance(item.ask, Take))
    on_cpu = settings(small.scene, 0, TINY, on_cpu=True, mps=())
    assert on_cpu["arguments"]["enforce_eager"] and "gpu_memory_utilization" not in on_cpu["arguments"]


# --- MPS --------------------------------------------------------------------------------------------------------------


def test_a_daemon_that_a_killed_campaign_left_is_ended_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon, log = tmp_path / nvidia.MPS, tmp_path / "log"
    daemon.write_text(f'#!/bin/sh\n[ -n "$1" ] || {{ read word; echo "$word" >> {log}; }}\n', encoding="utf-8")
    daemon.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    killed, following = (DeviceBench.__new__(DeviceBench) for _ in range(2))
    for each in (killed, following):
        each._on_cpu, each._mps, each._note = False, None, tmp_path / "out" / "mps.json"
    folder = Path(dict(killed._sharing("mps"))["CUDA_MPS_PIPE_DIRECTORY"])
    assert folder.is_dir() and killed._sharing("mps") == killed._mps
    following._end_left_over_mps()
    assert not folder.exists() and log.read_text(encoding="utf-8") == "quit\n"
    following._end_left_over_mps()  # once
    assert log.read_text(encoding="utf-8") == "quit\n"


# --- trials -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a Python module that a trial can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def make(text: str) -> list[str]:
        (tmp_path / "a_trial.py").write_text(text, encoding="utf-8")
        return ["a_trial"]

    return make


def test_a_trials_output_and_log_are_kept_apart(module: Any, tmp_path: Path) -> None:
    command = module("import sys\nprint('rows')\nprint('noise', file=sys.stderr)\nsys.exit(1)")
    assert ended(command, tmp_path / "log", fine=(1,)) == "rows\n"
    assert (tmp_path / "log").read_text(encoding="utf-8") == "noise\n"
    with pytest.raises(Unavailable, match="a_trial ended with 1: noise"):
        ended(command, tmp_path / "log")


def test_a_trial_that_takes_too_long_is_ended(module: Any, tmp_path: Path) -> None:
    command = module("import os, pathlib, signal\nprint(os.getpid(), flush=True)\nsignal.pause()")
    with pytest.raises(Unavailable, match=r"a_trial took longer than 0.2 s"):
        ended(command, tmp_path / "log", limit_s=0.2)


def test_weights_of_a_trial_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(command: list[str], log: Path, *_: object, **__: object) -> str:
        (tmp_path / "trials" / "overhead" / "model.safetensors").write_bytes(b"much")
        return 'a word of a library\n{"added_us_1": 2.5}\n'

    monkeypatch.setattr("fineserve_evidence.campaign.trials.ended", fake)
    rows = run_trial(Trial("overhead", TINY.name), tmp_path, None)
    assert rows == [{"trial": "overhead", "quantity": "added_us_1", "value": 2.5}]
    assert not list(tmp_path.rglob("*.safetensors"))


def test_metrics_are_those_of_the_one_cell() -> None:
    summary = {"cells": [{"metrics": {"ttft_p50_s": {"mean": 0.5, "half_width": 0.1}, "missing": {"mean": None}}}]}
    assert metrics(summary) == {"ttft_p50_s": 0.5}


@pytest.mark.parametrize("play", [CPU_PLAY, GPU_PLAY])
def test_traces_fit_the_engines(play: Any) -> None:
    rows = [line.split(",") for line in draw_trace(play).splitlines()[1:]]
    assert {row[1] for row in rows} == {"A", "B"}
    assert sorted(rows, key=lambda row: float(row[0])) == rows
    assert all(int(row[2]) + int(row[3]) <= play.max_model_len for row in rows)
    assert 0.7 * play.rate_per_s < len(rows) / play.seconds < 2.5 * play.rate_per_s


@pytest.mark.parametrize(("model", "gpu"), [(TINY, None), (LLAMA_8B, "h100-sxm"), (LLAMA_8B, "h200-sxm")])
def test_the_engines_of_a_play_share_its_region_in_the_simulator(model: Any, gpu: str | None, tmp_path: Path) -> None:
    (tmp_path / model.name).mkdir()
    (tmp_path / model.name / "config.json").write_text(json.dumps(model.config), encoding="utf-8")
    setup = load_experiment(write_play(tmp_path, model, gpu)).setup
    assert setup.engine.memory_utilization < 1
    models = [ServedModel(found.id, found.spec, found.precision, 1, 1.0, 1.0, 1.0, 1.0) for found in setup.models]
    taken = sum(resident_bytes(one, setup.engine) + peak_activation_bytes(one, setup.engine) for one in models)
    left = usable_bytes(setup.gpus[0], setup.engine) - taken
    play = GPU_PLAY if gpu else CPU_PLAY
    assert 0.8 * play.region_bytes < left < play.region_bytes  # less the first slab


def test_shapes_are_those_of_an_8b_model() -> None:
    config = dict(LLAMA_8B.config)
    layer = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes(config).values())
    total = config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * config["hidden_size"]
    assert total == pytest.approx(8.03e9, rel=1e-3)
