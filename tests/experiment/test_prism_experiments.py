"""Arrivals of many models, SLOs of models alone, and Prism's files, each as a run of seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fineserve_traces.prism import ARENA, processes
from fineserve_traces.servegen import servegen_clients

from fineserve_sim.cluster import RunResult, Scenario, simulate
from fineserve_sim.cluster.compose.facts import demand_of, demands_of
from fineserve_sim.cluster.compose.memory import peak_activation_bytes, resident_bytes, usable_bytes
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.experiment import ConfigError, load_experiment, run_experiment
from fineserve_sim.experiment.run.rates import base_rates
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.experiment.run.workload import alone_trace, build_trace

ROOT = Path(__file__).parents[2]
FILES = sorted(path.stem for path in (ROOT / "experiments").glob("prism_*.yaml"))
MANY = """\
fineserve: 1
title: Many
cluster: {gpu: h100-sxm, count: 2}
models:
  - {id: A, model: llama-3.1-8b, precision: W16A16}
  - {id: B, model: llama-3.2-3b, precision: W16A16}
  - {id: C, model: llama-3.2-1b, precision: W16A16}
workload:
  lengths: {prompt_tokens: 200, output_tokens: 20}
  arrivals: {process: arena, duration_s: 60, scale: 50}
slo:
  ttft: {reference: {system: dedicated, load: alone, quantile: 0.95}, scale: 5}
  tpot: {reference: {system: dedicated, load: alone, quantile: 0.95}}
systems: [s-partition, prism]
sweeps: [{name: slo, axes: {slo_scale: [1, 10]}}]
seeds: 1
"""


@pytest.fixture
def many(tmp_path: Path) -> Callable[..., Path]:
    """Write the file above with some texts replaced; its path."""

    def write(*changes: tuple[str, str]) -> Path:
        text = MANY
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        path = tmp_path / "many.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def summary(path: Path, out: Path, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_experiment(path, out, jobs=1, **options).read_text(encoding="utf-8"))
    return found


def test_the_order_of_the_file_is_the_order_of_popularity(many: Callable[..., Path]) -> None:
    setup = load_experiment(many()).setup
    assert list(base_rates(setup, None).values()) == [50 * process.rate_per_s for process in processes(ARENA, 3)]


def test_a_rate_scale_multiplies_requests_and_keeps_times_on_and_off(many: Callable[..., Path]) -> None:
    setup = load_experiment(many(("duration_s: 60", "duration_s: 3000"))).setup
    one, four = (build_trace(setup, None, rate_scale, seed=1) for rate_scale in (1, 4))
    assert len(four) == pytest.approx(4 * len(one), rel=0.1)
    quiet = [set(range(300)) - set((trace.arrival_s[trace.model == 1] // 10).astype(int)) for trace in (one, four)]
    assert quiet[1] and quiet[1] <= quiet[0] | {0, 299}


def test_models_may_be_clients_of_servegen(many: Callable[..., Path]) -> None:
    """The day of a client passes in the run; a model's expected rate is its client's."""
    path = many(("process: arena, duration_s: 60, scale: 50", "process: servegen, duration_s: 480, scale: 0.5"))
    setup = load_experiment(path).setup
    clients = servegen_clients(3)
    assert list(base_rates(setup, None).values()) == [0.5 * client.rate_per_s for client in clients]
    trace = build_trace(setup, None, 1.0, seed=0)
    for index, client in enumerate(clients):
        mine = trace.arrival_s[trace.model == trace.models.index(setup.models[index].id)]
        assert len(mine) == pytest.approx(480 * 0.5 * client.rate_per_s, rel=0.15)
    lines = "".join(f"  - {{id: x{i}, model: llama-3.2-1b, precision: W16A16}}\n" for i in range(30))
    with pytest.raises(ConfigError, match="32 clients, one a model; 33 models"):
        load_experiment(many(("process: arena", "process: servegen"), ("workload:\n", lines + "workload:\n")))


def test_a_model_has_the_same_requests_whoever_else_is_there(many: Callable[..., Path]) -> None:
    """Streams go by model: a model alone sees the arrivals that it has among the others."""
    setup = load_experiment(many()).setup
    together = build_trace(setup, None, 1.0, seed=0)
    alone = alone_trace(setup, "A", None, seed=0)
    np.testing.assert_array_equal(alone.arrival_s, together.arrival_s[together.model == together.models.index("A")])


def test_a_quiet_model_takes_its_requests_from_the_next_seed(many: Callable[..., Path]) -> None:
    setup = load_experiment(many(("duration_s: 60, scale: 50", "duration_s: 100, scale: 3"))).setup
    quiet = next(seed for seed in range(50) if "C" not in build_trace(setup, None, 1.0, seed).models)
    assert alone_trace(setup, "C", None, quiet).models == ("C",)


def test_base_slos_are_those_of_each_model_alone(many: Callable[..., Path], tmp_path: Path) -> None:
    path = many()
    setup = load_experiment(path).setup
    run = Run(setup, (), "dedicated", None, 1.0, 0, (math.inf,) * 3, alone="B")
    described = scenario(run)
    assert len(described.gpus) == 1 and [model.id for model in described.models] == ["B"]
    served = simulate(described)
    ttft_s = served.first_token_s - described.trace.arrival_s
    tpot_s = (served.finish_s - served.first_token_s) / 19
    for cell in summary(path, tmp_path / "out")["cells"]:
        scale = cell["axes"]["slo_scale"]
        base_s = np.quantile(ttft_s, 0.95, method="inverted_cdf"), np.quantile(tpot_s, 0.95, method="inverted_cdf")
        assert (cell["ttft_slo_s"]["B"] / scale, cell["tpot_slo_s"]["B"] / scale) == pytest.approx(base_s)


def test_tpot_attainment_counts_by_the_limit_of_each_model(many: Callable[..., Path], tmp_path: Path) -> None:
    """A looser scale lets more through, a fixed one does not move with the SLO scale."""
    tight, loose = (
        cell["metrics"]["tpot_attainment"]["mean"]
        for cell in summary(many(), tmp_path / "scaled")["cells"]
        if cell["system"] == "s-partition"
    )
    assert 0 < tight < loose == 1
    path = many(("quantile: 0.95}}\n", "quantile: 0.95}, scale: 2}\n"))
    limits = [cell["tpot_slo_s"]["A"] for cell in summary(path, tmp_path / "fixed")["cells"]]
    assert len(set(limits)) == 1


def test_placement_knows_the_limit_of_the_time_per_token(many: Callable[..., Path], tmp_path: Path) -> None:
    """Every cell is simulated under the limits that it is judged by; where nothing limits the time per token, none is known."""
    seen: list[Scenario] = []

    def spy(scenario: Scenario) -> RunResult:
        seen.append(scenario)
        return simulate(scenario)

    def known(cells: int) -> list[dict[str, float | None]]:
        return [
            {
                served.id: demand_of(served, scenario.gpus[0].spec, scenario.engine, slope=False).tpot_slo_s
                for served in scenario.models
            }
            for scenario in seen[-cells:]
        ]

    cells = summary(many(), tmp_path / "limited", simulate=spy)["cells"]
    assert known(len(cells)) == [cell["tpot_slo_s"] for cell in cells]
    free = many(("  tpot: {reference: {system: dedicated, load: alone, quantile: 0.95}}\n", ""))
    cells = summary(free, tmp_path / "free", simulate=spy)["cells"]
    assert all(set(limits.values()) == {None} for limits in known(len(cells)))


def test_a_base_slo_is_not_below_the_least(many: Callable[..., Path], tmp_path: Path) -> None:
    """What a front end takes is in no simulated TTFT; models whose own P95 is longer keep it."""
    free = summary(many(), tmp_path / "free")["cells"][0]["ttft_slo_s"]
    least_s = sorted(free.values())[1]
    held = summary(
        many(("alone, quantile: 0.95}, scale: 5", f"alone, quantile: 0.95, least_s: {least_s}}}, scale: 5")),
        tmp_path / "held",
    )
    assert held["cells"][0]["ttft_slo_s"] == {model: max(slo_s, least_s) for model, slo_s in free.items()}
    assert held["slo"]["A"]["reference"].endswith(f"at least {least_s:g} s")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("precision: W16A16}\n  - {id: B", "precision: W16A16, share: 1}\n  - {id: B"), "order in the file"),
        (("workload:\n", "workload:\n  requests: 10\n"), "duration sets the number"),
        (("slo:\n", "slo:\n  tpot_s: 0.1\n"), "both given"),
        (
            (
                "  tpot: {reference: {system: dedicated, load: alone",
                "  tpot: {reference: {system: dedicated, load: isolated",
            ),
            "same",
        ),
        (("  tpot: {reference: {system: dedicated", "  tpot: {reference: {system: prism"), "fcfs"),
    ],
)
def test_mistakes_are_named(many: Callable[..., Path], change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment(many(change))


def test_every_file_of_prism_loads_in_full_and_quick() -> None:
    for name in FILES:
        full, quick = (load_experiment(ROOT / "experiments" / f"{name}.yaml", quick=quick) for quick in (False, True))
        assert 0 < len(quick.points) <= len(full.points)


@pytest.mark.parametrize("system", ["prism", "muxserve++", "s-partition"])
def test_every_model_that_is_placed_has_kv_memory(system: str) -> None:
    """18 models on four GPUs: placements charge activations, too, so that nobody is turned away at the door."""
    experiment = load_experiment(ROOT / "experiments" / "prism_fig07_gpus.yaml", quick=True)
    point = next(point for point in experiment.points if dict(point.overrides)["cluster.count"] == 4)
    setup = experiment.setup_of(point)
    described = scenario(Run(setup, point.overrides, system, None, 1.0, 0, (1.0,) * len(setup.models)))
    homes = {instance.model: instance.gpus for instance in place(described, demands_of(described))[0].instances}
    least_bytes = 4096 * 131072  # a long request of the model with the largest tokens
    for gpu in described.gpus:
        here = [model for model in described.models if homes.get(model.id) == (gpu.id,)]
        engines = sum(resident_bytes(m, described.engine) + peak_activation_bytes(m, described.engine) for m in here)
        assert here and usable_bytes(gpu, described.engine) - engines > least_bytes


def test_an_activated_model_serves_who_waited_at_once() -> None:
    """Fig. 9: a request that finds its model evicted waits for the weights, with any scheduler, and no longer."""
    path = ROOT / "experiments" / "prism_fig09.yaml"
    experiment = load_experiment(path, [("workload.requests", "6")])
    setup = experiment.setup_of(experiment.sweeps["14B"][0])
    described = scenario(Run(setup, (), "all", None, 1.0, 0, (2.0, 2.0)))
    served = simulate(replace(described, check=True))
    ttft_s = served.first_token_s - described.trace.arrival_s
    loads_s = 2 * 14.77e9 / 22.7e9
    assert ttft_s.max() == pytest.approx(loads_s, rel=0.1)
    assert ttft_s.min() < 0.1


def test_kv_memory_follows_demand(tmp_path: Path) -> None:
    """Fig. 3: what all systems of a two-model figure have in common, and the order of the static one and Prism."""
    found = summary(ROOT / "experiments" / "prism_fig08.yaml", tmp_path / "out", quick=True)
    cells = {cell["system"]: cell for cell in found["cells"]}
    for cell in cells.values():
        assert cell["arrived"] == cell["finished"] + cell["dropped"] + cell["rejected"] + cell["unfinished"]
    tokens = {name: cell["metrics"]["decode_throughput_tokens_per_s"]["mean"] for name, cell in cells.items()}
    assert tokens["prism"] > tokens["static"]
