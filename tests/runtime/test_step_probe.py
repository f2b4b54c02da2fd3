"""The probe of steps: which of them follow another at once, and a table that the simulator reads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from filekit import start_fake, write_file
from fineserve_runtime import step_probe
from fineserve_runtime.config import load_file
from fineserve_runtime.engines.api import StepReport
from fineserve_runtime.serve import served_scenario
from fineserve_runtime.step_probe import Noted, periods, probe_steps, write_table

from fineserve_sim.latency.measured_steps import read_steps
from fineserve_sim.policy.interfaces import EngineState


def step(engine: int, ended_s: float, running: int) -> Noted:
    state = EngineState(running, running, 0, 8, 100, 1.0)
    report = StepReport(engine, ended_s - 0.5, ended_s, 0.0, 0, 1, 10, (), (), state)
    return Noted(report, ended_s / 2)


def test_a_period_goes_from_report_to_report_unless_nobody_had_work() -> None:
    steps = [step(0, 1.0, 1), step(0, 2.5, 1), step(1, 3.0, 1), step(0, 4.0, 0), step(1, 9.0, 0), step(1, 20.0, 1)]
    found = [(p.report.engine, p.in_turn, p.seconds, p.processor_s) for p in periods(steps)]
    assert found == [(0, False, 1.5, 0.75), (1, True, 0.5, 0.25), (0, True, 1.0, 0.5), (1, True, 5.0, 2.5)]


def test_all_kinds_of_steps_of_a_file_become_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(step_probe.time, "thread_time", lambda: next(clock) / 1000)  # fake engines have a thread each
    for name, few in (("DECODES", (1, 3)), ("PROMPTS", (32,)), ("TOTALS", (32, 64)), ("_JITTER", 2)):
        monkeypatch.setattr(step_probe, name, few)
    file = load_file(write_file(tmp_path), [("models.1.precision", "W16A16")])
    rows = probe_steps(file, served_scenario(file, None), start=start_fake)
    kinds = {(row.model, row.decodes, row.prefill_tokens) for row in rows if not row.in_turn}
    models = {model.spec.name for model in file.experiment.setup.models}
    assert kinds == {(m, d, p) for m in models for d, p in ((1, 0), (1, 31), (1, 63), (3, 0), (3, 29), (3, 61))}
    assert any(row.in_turn for row in rows) and all(row.latency_s > 0 and row.repeats >= 3 for row in rows)
    write_table(rows, tmp_path / "made" / "steps.parquet")
    for model in models:
        columns = read_steps(tmp_path / "made" / "steps.parquet", model, "bfloat16", "eager")
        assert len(columns["latency_s"]) == sum(row.model == model for row in rows)


def test_engines_in_processes_take_no_turns(tmp_path: Path) -> None:
    file = load_file(write_file(tmp_path), [("runtime.mode", "processes")])
    with pytest.raises(ValueError, match="step in this process"):
        probe_steps(file, served_scenario(file, None), start=start_fake)
