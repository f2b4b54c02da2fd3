"""Experiments whose requests are sent by clients that wait for their answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fineserve_sim.experiment import ConfigError, load_experiment, run_experiment, run_loaded
from fineserve_sim.experiment.run.rates import expected_rates
from fineserve_sim.experiment.run.workload import clients_of

TEXT = """\
fineserve: 1
title: Clients
cluster: {gpu: h100-sxm, count: 2}
models:
  - {id: A, model: llama-3.1-8b, precision: fp8, clients: 4}
  - {id: B, model: llama-3.1-8b, precision: fp8, clients: 2, think_s: 0.5}
workload: {lengths: {prompt_tokens: 512, output_tokens: 20}, requests: 60}
slo: {ttft_s: 1}
systems: [fineserve, dedicated]
seeds: 1
"""
ROWS = [f"{i},{10 + i},5,{'AB'[i % 2]}\n" for i in range(20)]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "clients.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def requests_of(path: Path) -> pd.DataFrame:
    out = path.parent / "out"
    run_experiment(path, out, jobs=1)
    return pd.read_parquet(out / "requests.parquet")


def test_clients_wait_for_their_answers_through_a_whole_experiment(written: Path) -> None:
    for _, run in requests_of(written).groupby("system"):
        assert len(run) == 60 and (np.diff(run.arrival_s) >= 0).all()
        for model, think_s in (("A", 0.0), ("B", 0.5)):
            own = run[run.model == model]
            begun = int((own.arrival_s == 0.0).sum())
            answered_s = np.sort(own.finish_s.to_numpy())[: len(own) - begun] + think_s
            assert np.array_equal(own.arrival_s.to_numpy()[begun:], answered_s)


def test_clients_send_recorded_requests_whatever_their_times(written: Path) -> None:
    recorded = written.parent / "recorded.csv"
    recorded.write_text("arrival_s,prompt_tokens,output_tokens,model\n" + "".join(ROWS), encoding="utf-8")
    written.write_text(
        TEXT.replace("workload: {lengths: {prompt_tokens: 512, output_tokens: 20}, requests: 60}",
                     "workload: {trace: recorded.csv}")
    )  # fmt: skip
    requests = requests_of(written)
    first = requests[requests.system == "dedicated"]
    assert sorted(first.prompt_tokens) == list(range(10, 30))
    for model, begin in (("A", 10), ("B", 11)):
        assert list(first[first.model == model].prompt_tokens) == list(range(begin, 30, 2))
    assert first[first.model == "A"].arrival_s.max() < 1.0, "twenty short answers, not twenty seconds"


def test_a_rate_scale_multiplies_clients(written: Path) -> None:
    setup = load_experiment(written).setup
    assert [clients_of(setup, scale).of for scale in (0.1, 1.0, 2.5)] == [(1, 1), (4, 2), (10, 5)]


def test_placements_expect_about_what_clients_ask_for(written: Path) -> None:
    """Alone on a GPU; the expectation leaves out that prompts interrupt decodes."""
    requests = requests_of(written)
    alone = requests[requests.system == "dedicated"]
    setup = load_experiment(written).setup
    for model in "AB":
        came_s = alone[alone.model == model].arrival_s
        asked_per_s = (len(came_s) - 1) / came_s.max()
        assert expected_rates(setup, None, 1.0)[model] == pytest.approx(asked_per_s, rel=0.3)
    eight = expected_rates(setup, None, 8.0)
    assert 1.0 < eight["A"] / expected_rates(setup, None, 1.0)["A"] < 8.0, "more clients, longer steps"


def test_metrics_alone_are_those_of_the_whole_run(written: Path) -> None:
    found = []
    for summary in (False, True):
        path = run_loaded(load_experiment(written), written.parent / str(summary), jobs=1, summary=summary)
        found.append(json.loads(path.read_text(encoding="utf-8"))["cells"])
    for one, other in zip(*found, strict=True):
        for metric in ("ttft_attainment", "throughput_per_s", "waiting_mean", "kv_use_mean"):
            assert one["metrics"][metric]["mean"] == pytest.approx(other["metrics"][metric]["mean"], rel=1e-9), metric


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("requests: 60}", "requests: 60, arrivals: {process: poisson}}", "workload.arrivals: not with clients"),
        ("requests: 60}", "requests: 60, conversations: {turns: 2}}", "workload.conversations: not with clients"),
        ("[fineserve, dedicated]", "[clairvoyant]", "systems.0: clairvoyant needs to know all arrivals"),
        ("clients: 2, think_s: 0.5", "rate_per_s: 2", "models.1: model B has no clients; all models have, or none"),
        ("clients: 4}", "clients: 4, rate_per_s: 1}", "models.0: model A needs exactly one of"),
    ],
)
def test_what_clients_cannot_be_beside_is_refused_by_name(old: str, new: str, said: str, written: Path) -> None:
    assert old in TEXT
    written.write_text(TEXT.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_experiment(written)
    assert said in str(refused.value)
