"""Experiments on engines: the results folder is the simulator's, and the decisions replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from filekit import start_fake, write_file
from fineserve_runtime.config import load_file
from fineserve_runtime.replay import claim_folder, replay_on, with_trace, without_model_warnings
from fineserve_runtime.replay_log import replay_file
from fineserve_runtime.serve import served_scenario

from fineserve_sim.experiment import run_loaded
from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.show.report import report

SHORT = [("workload.requests", "40"), ("models.0.rate_per_s", "40"), ("models.1.rate_per_s", "40")]


def test_a_file_is_played_and_reported_as_a_simulation_is(tmp_path: Path) -> None:
    file = load_file(write_file(tmp_path), SHORT)
    out = tmp_path / "out"
    claim_folder(out, "cpu")
    path = run_loaded(file.experiment, out, jobs=1, decisions=True, simulate=replay_on(file, start=start_fake))
    without_model_warnings(path)
    summary = read_summary(out)
    assert not summary["warnings"], "no step of these was simulated"
    assert [cell["system"] for cell in summary["cells"]] == ["fineserve", "static*"]
    assert all(cell["finished"] == 40 and cell["unfinished"] == 0 for cell in summary["cells"])
    requests = pq.read_table(out / "requests.parquet").to_pydict()
    ttft_s = np.array(requests["first_token_s"]) - np.array(requests["arrival_s"])
    assert (ttft_s > 0).all() and (np.array(requests["finish_s"]) >= np.array(requests["first_token_s"])).all()
    assert report(summary) is not None
    logs = sorted((out / "decisions").iterdir())
    assert len(logs) == 2
    for log in logs:
        result = replay_file(log)
        assert result.difference is None and result.commands["Dispatch"] == 40


def test_a_trace_replaces_the_workload(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i * 0.01:.2f},{('tiny-bf16', 'tiny-fp8')[i % 2]},{20 + i},5\n" for i in range(30))
    trace.write_text("arrival_s,model,prompt_tokens,output_tokens\n" + rows)
    text = write_file(tmp_path)
    assert served_scenario(load_file(text), None), "a server takes the same file"
    file = load_file(text, changes=with_trace(text, trace, 2.0, 20))
    out = tmp_path / "out"
    run_loaded(file.experiment, out, jobs=1, simulate=replay_on(file, start=start_fake))
    requests = pq.read_table(out / "requests.parquet").to_pydict()
    assert max(requests["arrival_s"]) == pytest.approx(0.095)
    assert len(requests["arrival_s"]) == 40 and set(requests["fate"]) == {"finished"}


def test_real_and_simulated_results_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "0.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds simulated results"):
        claim_folder(tmp_path, "cpu")


def test_a_system_that_evicts_is_played_too(tmp_path: Path) -> None:
    item = "{base: fineserve, name: prism, residency: {policy: prism, idle_s: 0.2}}"
    changes = [*SHORT, ("systems", f"[{item}]"), ("runtime.weights_in_region", "true")]
    file = load_file(write_file(tmp_path), changes)
    out = tmp_path / "out"
    run_loaded(file.experiment, out, jobs=1, decisions=True, simulate=replay_on(file, start=start_fake))
    (cell,) = read_summary(out)["cells"]
    assert cell["finished"] == 40
    (log,) = (out / "decisions").iterdir()
    result = replay_file(log)
    assert result.difference is None and result.events["Tick"] > 0
