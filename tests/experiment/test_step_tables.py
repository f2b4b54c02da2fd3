"""Measured engine steps as an experiment's step times."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fineserve_sim.cluster import ScenarioError
from fineserve_sim.experiment import load_experiment, run_experiment
from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.run.store import Store

FILE = """\
fineserve: 1
title: Measured
cluster: {gpu: h100-sxm, count: 1}
engine: {block_tokens: 32, step_times: step.parquet}
models: [{id: A, model: llama-3.1-8b, precision: W16A16, rate_per_s: 0.01}]
workload: {lengths: {prompt_tokens: 512, output_tokens: 21}, requests: 3}
slo: {ttft_s: 5.0}
systems: [dedicated]
seeds: 1
runtime: {whatever: the simulator does not look}
"""
BASE_S, TOKEN_S = 0.004, 0.001


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An experiment whose engine takes 4 ms a step and 1 ms a token in it, as a table says."""
    compositions = [(*each, 0) for each in product((1, 2, 4, 8), (64, 256, 1024))]
    compositions += [(0, 0, new) for new in (16, 64, 512, 1024)]
    rows = [
        {"model": "llama-3.1-8b", "dtype": "bfloat16", "mode": "eager", "cached_tokens": 0}
        | {"decodes": decodes, "context": context, "prefill_tokens": new}
        | {"latency_s": BASE_S + TOKEN_S * (decodes + new)}
        for decodes, context, new in compositions
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "step.parquet")
    path = tmp_path / "measured.yaml"
    path.write_text(FILE)
    return path


def test_a_request_takes_the_time_of_the_steps_in_the_table(file: Path, tmp_path: Path) -> None:
    run_experiment(file, tmp_path / "out", jobs=1)
    (meta,) = (path for path in (tmp_path / "out" / "cells").glob("*.json"))
    run = Store(tmp_path / "out").read(meta.stem)
    assert run.ttft_s == pytest.approx(BASE_S + 512 * TOKEN_S, rel=1e-3)
    assert run.tpot_s == pytest.approx(BASE_S + TOKEN_S, rel=1e-3)


def test_other_contents_are_another_run(file: Path) -> None:
    before = load_experiment(file).setup.engine
    table = pq.read_table(file.with_name("step.parquet"))
    pq.write_table(table.slice(1), file.with_name("step.parquet"))
    assert load_experiment(file).setup.engine != before


def test_the_resolved_file_runs_from_anywhere(file: Path, tmp_path: Path) -> None:
    run_experiment(file, tmp_path / "out", jobs=1)
    again = load_experiment(tmp_path / "out" / "resolved.yaml")
    assert again.setup.engine == load_experiment(file).setup.engine


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("engine.step_times", "nowhere.parquet", "engine.step_times.*nowhere.parquet cannot be read"),
        ("models.0.model", "llama-2-13b", "no steps of llama-2-13b bfloat16 eager; it has llama-3.1-8b"),
        ("models.0.precision", "W4A8KV4", "no steps in W4A8KV4"),
    ],
)
def test_what_the_table_does_not_have_is_told(file: Path, tmp_path: Path, key: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_experiment(file, tmp_path / "out", jobs=1, overrides=[(key, value)])


def test_tables_are_for_one_gpu_an_engine(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"measured at tp 1; model .* has tp 2"):
        run_experiment(file, tmp_path / "out", jobs=1, overrides=[("cluster.count", "2"), ("models.0.tp", "2")])
