"""resolved.yaml is the experiment as it was run: it loads from anywhere and means the same."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fineserve_sim.experiment import Experiment, load_experiment, run_experiment
from fineserve_sim.experiment.file.degrees import groups_by_degree
from fineserve_sim.experiment.results.writer import write_resolved
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.experiment.show.figures import draw

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))
LENGTHS = """\
  lengths: {prompt_tokens: 512, output_tokens: 20}
  arrivals: {process: poisson}
  requests: 60
  warmup_requests: 10
"""
TRACE = "arrival_s,model,prompt_tokens,output_tokens\n0,A,512,20\n1,B,512,20\n"


def read_again(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment of the resolved file, from a folder without anything else."""
    folder.mkdir()
    write_resolved(experiment, folder / "resolved.yaml")
    return load_experiment(folder / "resolved.yaml")


def meaning(experiment: Experiment) -> Any:
    """All that a file says, without what its resolved form leaves out."""
    return experiment.file.model_dump(exclude={"quick", "runtime", "folder"})


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_shipped_file_means_the_same_resolved(path: Path, tmp_path: Path) -> None:
    experiment = load_experiment(path)
    again = read_again(experiment, tmp_path / "out")
    assert meaning(again) == meaning(experiment)
    assert again.sweeps == experiment.sweeps


def test_paths_that_a_sweep_varies_lead_to_the_same_runs(write_file, tmp_path: Path, fake: ModuleType) -> None:
    for name in ("one.csv", "two.csv"):
        (tmp_path / name).write_text(TRACE)
    path = write_file(
        (LENGTHS, "  trace: one.csv\n"),
        (" share: 2}", "}"),
        (" share: 3}", "}"),
        ("loads:\n  A: {rate_per_s: 20}\n", ""),
        ("at: {rate_scale: 2}", "at: {workload.trace: two.csv}"),
        ("{rate_scale: [1, 2]}", "{workload.trace: [one.csv, two.csv]}"),
        ("quick: {workload.requests: 30, seeds: 1}", CLAIM_AND_FIGURE),
    )
    run_experiment(path, tmp_path / "out", jobs=1, simulate=fake.simulate)
    before, summary = fake.calls, (tmp_path / "out" / "summary.json").read_bytes()
    resolved = tmp_path / "elsewhere" / "small.yaml"
    resolved.parent.mkdir()
    resolved.write_bytes((tmp_path / "out" / "resolved.yaml").read_bytes())
    run_experiment(resolved, tmp_path / "out", jobs=1, simulate=fake.simulate)
    assert fake.calls == before
    assert (tmp_path / "out" / "summary.json").read_bytes() == summary
    assert draw(tmp_path / "out")


CLAIM_AND_FIGURE = """\
claims:
  - {id: X, paper: "> 0", measure: difference, metric: ttft_p50_s, of: fineserve, over: fineserve,
     at: {sweep: rate, workload.trace: one.csv}, over_at: {workload.trace: two.csv}}
figures:
  - {name: life, timeline: {sweep: rate, workload.trace: one.csv}, panels: [waiting]}
"""


def test_an_assumption_of_nothing_stays(write_file, tmp_path: Path) -> None:
    assumption = "assumptions:\n  - {what: host time, value: null, why: not given}\nquick: {"
    again = read_again(load_experiment(write_file(("quick: {", assumption))), tmp_path / "out")
    assert again.file.assumptions[0].value is None


def test_an_open_tp_degree_follows_the_rate(write_file) -> None:
    """A 70B model that no GPU holds starts at the least degree that does, and takes more where its rate or limit needs it."""
    big = "model: llama-3.1-70b, precision: fp8, tp: auto"
    found = load_experiment(write_file(("count: 2", "count: 8"), ("model: llama-3.1-8b, precision: fp8", big)))

    def degrees(rate_scale: float, slo_s: float) -> dict[str, int]:
        run = Run(found.setup, (), "fineserve", "A", rate_scale, 0, (slo_s, slo_s))
        return {served.id: served.tp for served in scenario(run).models}

    assert degrees(0.001, 10.0) == {"A": 1, "B": 1}
    assert degrees(0.001, 0.06)["B"] > 1  # the limit
    assert degrees(3.0, 10.0)["B"] > 1  # the rate
    alone = Run(found.setup, (), "dedicated", "A", 1.0, 0, (1.0, 1.0), alone="B")
    assert [served.tp for served in scenario(alone).models] == [1] and len(scenario(alone).gpus) == 1


def test_at_an_open_tp_degree_there_is_memory_for_kv(write_file) -> None:
    """On one GPU the weights fit beside the context, but with the logits of 1,024 sequences nothing is left."""
    big = "model: llama-3.1-70b, precision: fp8, tp: auto"
    many = ("models:", "engine: {deployment: vllm-v1-eager, max_sequences: 1024}\n\nmodels:")
    found = load_experiment(write_file(many, ("count: 2", "count: 8"), ("model: llama-3.1-8b, precision: fp8", big)))
    assert [*groups_by_degree(found.setup, found.setup.models[1])] == [2, 4, 8]
