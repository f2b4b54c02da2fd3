"""A log of the runtime, replayed through the core alone, gives the same commands; and the log is that of the simulator."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fineserve_runtime
import pytest
from fineserve_runtime.core import EVENTS
from fineserve_runtime.decisions import Entry, LogError, decode_event, event_entry
from fineserve_runtime.replay_log import replay, replay_file
from runtimekit import core_spec, eventually, runtime

from fineserve_sim.experiment import run_experiment
from fineserve_sim.policy.events import EngineStepped, RequestArrived, Tick
from fineserve_sim.policy.interfaces import EngineState, Request
from fineserve_sim.systems.spec import PrismResidencySpec

ROOT = Path(__file__).parents[2]

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "torch"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import runpy
sys.argv = ["replay_log", *sys.argv[1:]]
runpy.run_module("fineserve_runtime.replay_log", run_name="__main__")
"""


@pytest.fixture(scope="module")
def log() -> list[Entry]:
    """Three models on one device, 220 requests: some hopeless, some preempted, models evicted and activated."""
    rng = random.Random(7)
    spec = core_spec(
        ("A", "B", "C"),
        weight_bytes=16 * 1024,
        blocks=72,
        slo_s=0.5,
        resident=("A", "B"),
        residency=PrismResidencySpec(idle_s=0.0, pressure_fraction=0.3, move=False, tick_s=0.1),
    )
    with runtime(spec, max_sequences=6) as here:
        for phase in range(5):
            models = ("AB", "BC", "CA")[phase % 3]
            heard = []
            for _ in range(44):
                length = rng.randrange(4, 120)
                slo_s = 1e-5 if rng.random() < 0.1 else 60.0
                prompt = tuple(rng.randrange(2, 200) for _ in range(length))
                heard.append(here.ask(rng.choice(models), prompt, tokens=rng.randrange(1, 60), slo_s=slo_s)[1])
                for _ in range(rng.randrange(4)):
                    here.host.step_all()
            eventually(lambda: not any([here.host.step_all()]) and all(each.end for each in heard), 20.0)  # noqa: B023
        preempted = sum(engine.preemptions for engine in here.host.engines.values())
    assert preempted > 0
    lines = [json.loads(json.dumps(entry)) for entry in here.log]
    return lines


def test_the_same_commands_event_for_event(log: list[Entry]) -> None:
    result = replay(log)
    assert result.difference is None
    assert result.events["RequestArrived"] >= 200
    for command in ("Dispatch", "Drop", "Evict", "Activate"):
        assert result.commands[command] >= 2, command
    assert sum(result.commands.values()) == sum("command" in entry for entry in log)


def test_without_vllm_and_torch(log: list[Entry], tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in log))
    folders = [str(Path(fineserve_runtime.__file__).parents[1]), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the same commands, event for event" in done.stdout


@pytest.mark.parametrize("event", ["RequestArrived", "EngineStepped", "Tick", "EngineReady", "StepMeasured"])
def test_an_altered_event_changes_the_commands(log: list[Entry], event: str) -> None:
    altered = [json.loads(json.dumps(entry)) for entry in log]
    changes: dict[str, Callable[[Entry], object]] = {
        "RequestArrived": lambda entry: entry["request"].update(prompt_tokens=10_000),
        "EngineStepped": lambda entry: [state.__setitem__("free_slots", 0) for state in entry["engines"].values()],
        "Tick": lambda entry: entry.update(free_bytes={"0": 0}, running=dict.fromkeys(map(str, range(100)), 1)),
        "EngineReady": lambda entry: entry.update(engine=10**6),
        "StepMeasured": lambda entry: entry.update(duration_s=1000.0),
    }
    for index, entry in enumerate(altered):
        follower = altered[index + 1] if index + 1 < len(altered) else {}
        decisive = event in ("EngineReady", "StepMeasured") or follower.get("command", "Drop") != "Drop"
        if entry.get("event") == event and decisive:
            changes[event](entry)
            break
    result = replay(altered)
    assert result.difference is not None


def test_the_death_of_an_engine_is_no_gap(tmp_path: Path) -> None:
    """``EngineFailed`` has a field ``lost``, as the mark of lost lines has."""
    with runtime(core_spec()) as here:
        here.ask("A")
        here.host.kill(0)
        eventually(lambda: here.host.engines[0].alive)
        here.run()
        assert any(entry.get("event") == "EngineFailed" for entry in here.log)
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in here.log))
    result = replay_file(path)
    assert result.difference is None
    assert result.events["EngineFailed"] == 1


def test_a_missing_line_is_noticed(log: list[Entry]) -> None:
    first = next(index for index, entry in enumerate(log) if entry.get("command") == "Dispatch")
    assert replay(log[:first] + log[first + 1 :]).difference is not None


def test_events_survive_json() -> None:
    state = EngineState(1, 1, 5, 3, 1000, 1.0)
    for event in (
        RequestArrived(Request(3, "A", 0.1 + 0.2, 7)),
        EngineStepped(2, {2: state, 3: state}),
        Tick({0: 2}, {0: 12345}),
    ):
        entry = json.loads(json.dumps(event_entry(1.5, event)))
        assert decode_event(entry, EVENTS) == event


@pytest.mark.parametrize(
    ("entry", "problem"),
    [({"event": "Tock", "now_s": 1}, "unknown event"), ({"event": "Tick", "now_s": 1}, "lacks 'running'")],
)
def test_a_broken_entry_is_named(entry: Entry, problem: str) -> None:
    with pytest.raises(LogError, match=problem):
        decode_event(entry, EVENTS)


def test_a_log_without_a_core_is_refused() -> None:
    with pytest.raises(LogError, match="describes no core"):
        replay([{"event": "RequestAborted", "now_s": 0.0, "request_id": 1}])


EXPERIMENT = """\
fineserve: 1
title: A simulated run
cluster: {gpu: h100-sxm, count: 1}
models: [{id: A, model: llama-3.1-8b, precision: fp8, rate_per_s: 20}]
workload: {lengths: {prompt_tokens: 512, output_tokens: 4}, requests: 20}
slo: {ttft_s: 0.05}
systems: [fineserve]
seeds: 1
"""


def test_entries_are_those_of_the_simulator(tmp_path: Path) -> None:
    """What the simulator logs is read as events and written again, with the same keys and values in the same order."""
    file = tmp_path / "file.yaml"
    file.write_text(EXPERIMENT)
    run_experiment(file, tmp_path / "out", jobs=1, decisions=True)
    (decisions,) = (tmp_path / "out" / "decisions").iterdir()
    events = [line for line in decisions.read_text().splitlines() if '"event"' in line]
    assert {json.loads(line)["event"] for line in events} >= {"RequestArrived", "EngineStepped"}
    for line in events:
        entry = json.loads(line)
        again = event_entry(entry["now_s"], decode_event(entry, EVENTS))
        assert json.dumps(again, separators=(",", ":")) == line
