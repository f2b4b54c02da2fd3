"""Running: order of execution, resuming, interruption, workers, and what is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import yaml

from fineserve_sim.experiment import ConfigError, Interrupted, ScenarioError, load_experiment, run_experiment
from fineserve_sim.experiment.results import writer

RUNS = 2 + 3 * (2 * 2 + 2)
"""Isolated references of two models; three seeds of two systems at three points, one of which both sweeps have."""


def results(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_summary_and_tables(write_file, tmp_path: Path, fake: ModuleType) -> None:
    summary_path = run_experiment(write_file(), tmp_path / "out", jobs=1, simulate=fake.simulate)
    assert fake.calls == RUNS
    summary = json.loads(summary_path.read_text(encoding="utf-8"))
    assert summary["slo"]["A"]["base_s"] == pytest.approx(0.0512)
    places = [(c["sweep"], c["system"], c["axes"]["slo_scale"], c["axes"]["rate_scale"]) for c in summary["cells"]]
    assert places == [
        ("slo", "fineserve", 2, 2), ("slo", "prism*", 2, 2), ("slo", "fineserve", 4, 2), ("slo", "prism*", 4, 2),
        ("rate", "fineserve", 4, 1), ("rate", "prism*", 4, 1), ("rate", "fineserve", 4, 2), ("rate", "prism*", 4, 2),
    ]  # fmt: skip
    cell = summary["cells"][0]
    assert cell["arrived"] == 180 == cell["finished"] + cell["dropped"] + cell["rejected"] + cell["unfinished"]
    assert cell["ttft_slo_s"]["A"] == pytest.approx(2 * 0.0512)
    assert cell["metrics"]["kv_use_mean"]["mean"] == pytest.approx(0.1)
    assert cell["flags"][0] == "60 measured requests a run < 2000"
    requests = pd.read_parquet(tmp_path / "out" / "requests.parquet")
    assert len(requests) == 6 * 3 * 70
    own = requests[(requests.system == "fineserve") & (requests.slo_scale == 2) & (requests.seed == 0)]
    first = own[own.fate == "finished"].iloc[0]
    assert first.first_token_s == pytest.approx(first.arrival_s + 0.0512)
    late = own.measured & ~(own.first_token_s - own.arrival_s <= 0.1024)
    cells = pd.read_parquet(tmp_path / "out" / "cells.parquet")
    assert len(cells) == 18
    row = cells[(cells.system == "fineserve") & (cells.slo_scale == 2) & (cells.seed == 0)].iloc[0]
    assert row.ttft_attainment == pytest.approx(1 - late.sum() / 60)
    means = cells[(cells.system == "fineserve") & (cells.slo_scale == 2)].ttft_attainment
    assert cell["metrics"]["ttft_attainment"]["mean"] == pytest.approx(means.mean())


def test_jobs_and_order_change_no_byte(write_file, tmp_path: Path, fake: ModuleType) -> None:
    path = write_file()
    for jobs in (1, 2):
        run_experiment(path, tmp_path / str(jobs), jobs=jobs, decisions=True, simulate=fake.simulate)
    one, two = results(tmp_path / "1"), results(tmp_path / "2")
    assert one == two
    assert sum(name.startswith("decisions/") for name in one) == RUNS - 2


def test_nothing_is_simulated_twice(write_file, tmp_path: Path, fake: ModuleType) -> None:
    path = write_file()
    run_experiment(path, tmp_path / "out", jobs=1, simulate=fake.simulate)
    before = results(tmp_path / "out")
    progress: list[tuple[int, int]] = []
    run_experiment(
        path,
        tmp_path / "out",
        jobs=1,
        simulate=fake.simulate,
        on_progress=lambda done, total, _: progress.append((done, total)),
    )
    assert fake.calls == RUNS
    assert progress == [(done, 20) for done in range(1, 21)]
    assert results(tmp_path / "out") == before
    run_experiment(path, tmp_path / "out", jobs=1, seeds=4, simulate=fake.simulate)
    assert fake.calls == RUNS + 6
    run_experiment(path, tmp_path / "out", jobs=1, overrides=[("engine.token_budget", "512")], simulate=fake.simulate)
    assert fake.calls == RUNS + 6 + RUNS


def test_an_interrupted_run_goes_on_where_it_was(write_file, tmp_path: Path, fake: ModuleType, monkeypatch) -> None:
    path = write_file()
    run_experiment(path, tmp_path / "whole", jobs=1, simulate=fake.simulate)
    monkeypatch.setattr(fake, "calls", 0)
    monkeypatch.setattr(fake, "stop_after", 7)
    with pytest.raises(Interrupted, match="interrupted after 7 of 20 simulations") as raised:
        run_experiment(path, tmp_path / "out", jobs=1, simulate=fake.simulate)
    assert (raised.value.done, raised.value.total) == (7, 20)
    assert not (tmp_path / "out" / "summary.json").exists()
    assert not list((tmp_path / "out").rglob("*.tmp"))
    monkeypatch.setattr(fake, "stop_after", 100)
    run_experiment(path, tmp_path / "out", jobs=1, simulate=fake.simulate)
    assert fake.calls == RUNS
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_tables_that_are_half_new_have_no_summary(
    write_file, tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it writes, another experiment in the same folder leaves no old answer beside its own file and tables."""

    def killed(path: Path, rows: list[object]) -> None:
        raise KeyboardInterrupt

    file, out = write_file(), tmp_path / "out"
    assert run_experiment(file, out, jobs=1, simulate=fake.simulate).exists()
    monkeypatch.setattr(writer, "_write_table", killed)
    with pytest.raises(Interrupted):
        run_experiment(file, out, jobs=1, overrides=[("loads.A.rate_per_s", "10")], simulate=fake.simulate)
    assert yaml.safe_load((out / "resolved.yaml").read_text())["loads"]["A"]["rate_per_s"] == 10
    assert not (out / "summary.json").exists()


def test_a_full_disk_keeps_what_is_finished(write_file, tmp_path: Path, fake: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"results cannot be written: No space left on device \(cells/x\)"):
        run_experiment(write_file(), tmp_path / "out", jobs=1, simulate=fake.full_disk)
    assert len(list((tmp_path / "out" / "cells").glob("*.json"))) == 2
    assert not list((tmp_path / "out").rglob("*.tmp"))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_cell_that_cannot_run_is_named(write_file, tmp_path: Path, fake: ModuleType, jobs: int) -> None:
    with pytest.raises(ScenarioError, match=r"^prism\*, load A, rate scale \d, seed \d: model B fits on no GPU$"):
        run_experiment(write_file(), tmp_path / "out", jobs=jobs, simulate=fake.refuse_prism)


def test_an_unusable_output_folder_is_found_before_anything_runs(write_file, tmp_path: Path, fake: ModuleType) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="results cannot be written"):
            run_experiment(write_file(), out, jobs=1, simulate=fake.simulate)
    assert fake.calls == 0


def test_references_under_the_same_load_are_per_point(write_file, tmp_path: Path, fake: ModuleType) -> None:
    """P90 of FCFS: at each rate the limit is the quantile of that rate's own requests, all seeds together."""
    path = write_file(
        ("{system: dedicated, load: isolated, quantile: 0.95}", '{system: "static*", load: same, quantile: 0.9}'),
        ('[fineserve, "prism*"]', '["static*"]'),
        ("  - {name: slo, axes: {slo_scale: [2, 4]}, at: {rate_scale: 2}}\n", ""),
        ("at: {slo_scale: 4}", "at: {slo_scale: 1}"),
    )
    summary = json.loads(
        run_experiment(path, tmp_path / "out", jobs=1, simulate=fake.simulate).read_text(encoding="utf-8")
    )
    assert summary["slo"]["A"]["base_s"] is None
    requests = pd.read_parquet(tmp_path / "out" / "requests.parquet")
    for cell in summary["cells"]:
        for model in "AB":
            own = requests[
                (requests.rate_scale == cell["axes"]["rate_scale"]) & (requests.model == model) & requests.measured
            ]
            ttft_s = np.sort(own.first_token_s - own.arrival_s)
            assert cell["ttft_slo_s"][model] == ttft_s[int(np.ceil(0.9 * len(ttft_s))) - 1]
            assert cell["metrics"]["ttft_attainment"]["by_model"][model]["mean"] == pytest.approx(0.9, abs=0.03)


def test_an_absolute_limit_of_a_model_is_not_scaled(write_file, tmp_path: Path, fake: ModuleType) -> None:
    path = write_file(("share: 3}", "share: 3, ttft_slo_s: 0.07}"))
    summary = json.loads(
        run_experiment(path, tmp_path / "out", jobs=1, simulate=fake.simulate).read_text(encoding="utf-8")
    )
    assert {cell["ttft_slo_s"]["B"] for cell in summary["cells"]} == {0.07}
    assert len({cell["ttft_slo_s"]["A"] for cell in summary["cells"]}) == 2


def test_a_key_of_the_file_as_axis(write_file, tmp_path: Path, fake: ModuleType) -> None:
    path = write_file(("{slo_scale: [2, 4]}", "{workload.lengths.prompt_tokens: [100, 800]}"))
    summary = json.loads(
        run_experiment(path, tmp_path / "out", jobs=1, simulate=fake.simulate).read_text(encoding="utf-8")
    )
    limits = [
        cell["ttft_slo_s"]["A"] for cell in summary["cells"] if cell["sweep"] == "slo" and cell["system"] == "prism*"
    ]
    assert limits == pytest.approx([4 * 0.01, 4 * 0.08])
    requests = pd.read_parquet(tmp_path / "out" / "requests.parquet")
    assert set(requests["workload.lengths.prompt_tokens"]) == {"100", "800", ""}


def test_the_resolved_file_gives_the_same_results(write_file, tmp_path: Path, fake: ModuleType) -> None:
    run_experiment(write_file(), tmp_path / "out", jobs=1, quick=True, simulate=fake.simulate)
    resolved = tmp_path / "small" / "small.yaml"
    resolved.parent.mkdir()
    resolved.write_bytes((tmp_path / "out" / "resolved.yaml").read_bytes())
    assert yaml.safe_load(resolved.read_text(encoding="utf-8"))["workload"]["requests"] == 30
    before = fake.calls
    run_experiment(resolved, tmp_path / "out", jobs=1, simulate=fake.simulate)
    assert fake.calls == before


def test_the_real_cluster_end_to_end(write_file, tmp_path: Path) -> None:
    """Every system of the small file really runs, twice to the same bytes, and FineServe meets a generous SLO."""
    path = write_file(("rate_per_s: 20", "rate_per_s: 4"), ("slo_scale: 4", "slo_scale: 50"))
    for name in ("one", "two"):
        run_experiment(path, tmp_path / name, jobs=1, quick=True)
    assert results(tmp_path / "one") == results(tmp_path / "two")
    summary = json.loads((tmp_path / "one" / "summary.json").read_text(encoding="utf-8"))
    cells = {(cell["sweep"], cell["system"], cell["axes"]["rate_scale"]): cell for cell in summary["cells"]}
    assert cells["rate", "fineserve", 1]["metrics"]["ttft_attainment"]["mean"] == 1
    assert {entry["model"] for entry in summary["placements"][0]["instances"]} == {"A", "B"}
    assert load_experiment(path).file.seeds == 3


def test_an_unguarded_script_is_told_so(write_file, tmp_path: Path) -> None:
    """Worker processes import the script anew, so it must not run anything when it is imported."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from fineserve_sim.experiment import run_experiment\n"
        f"run_experiment(Path({str(write_file())!r}), Path({str(tmp_path / 'out')!r}), quick=True, jobs=2)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr.count("Traceback") == 1
    assert (
        'no worker process could start; a script runs experiments in parallel under `if __name__ == "__main__":`'
        in (done.stderr.splitlines()[-1])
    )
