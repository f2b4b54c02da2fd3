"""Which hosts a file asks for, and on what; fake engines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_engines import continuation
from filekit import start_fake, write_file
from fineserve_runtime.config import RuntimeFile, load_file
from fineserve_runtime.engines.api import EngineHost, EngineListener, HostConfig, Sampling
from fineserve_runtime.jobs import Job
from fineserve_runtime.launch import launch
from fineserve_runtime.serve import served_scenario
from runtimekit import Heard, eventually

from fineserve_sim.cluster.compose.facts import demands_of
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.cluster.scenario import ScenarioError
from fineserve_sim.experiment.file.errors import ConfigError

PINNED = "{base: fineserve, name: two, placement: {policy: pinned, groups: {tiny-bf16: [[0]], tiny-fp8: [[1]]}}}"
TWO = [("cluster.count", "2"), ("systems", f"[{PINNED}]")]


def hosts_of(file: RuntimeFile) -> list[HostConfig]:
    started: list[HostConfig] = []

    def start(config: HostConfig, listener: EngineListener) -> EngineHost:
        started.append(config)
        return start_fake(config, listener)

    with launch(file, served_scenario(file, None), start=start) as running:
        assert list(running.hosts) == [config.gpus[0] for config in started]
        assert all(host.config in started for host in running.hosts.values())
    return started


@pytest.mark.parametrize(
    ("changes", "modes"),
    [
        ([], ["in_process"]),
        ([("runtime.mode", "processes")], ["processes"]),
        ([("runtime.backend", "cuda")], ["processes"]),
        (TWO, ["processes", "processes"]),
        ([*TWO, ("runtime.cluster", "ray")], ["in_process", "in_process"]),
        ([*TWO, ("runtime.cluster", "{ray: auto}"), ("runtime.backend", "cuda")], ["processes", "processes"]),
    ],
)
def test_engines_share_a_process_only_where_they_can_take_turns(
    changes: list[tuple[str, str]], modes: list[str], tmp_path: Path
) -> None:
    hosts = hosts_of(load_file(write_file(tmp_path), changes))
    assert [host.mode for host in hosts] == modes
    names = [[engine.name for engine in host.engines] for host in hosts]
    assert sorted(names) == ([["tiny-bf16", "tiny-fp8"]] if len(modes) == 1 else [["tiny-bf16"], ["tiny-fp8"]])
    assert len({host.gpus for host in hosts}) == len(hosts)


def test_the_runtime_places_engines_by_balanced_as_the_simulator_does(tmp_path: Path) -> None:
    file = load_file(write_file(tmp_path), [("cluster.count", "2"), ("systems", "[balanced]")])
    placement, _ = place(served_scenario(file, None), demands_of(served_scenario(file, None)))
    stays = {(each.model, each.gpus) for each in placement.instances}
    assert {model for model, _ in stays} == {"tiny-bf16", "tiny-fp8"}
    assert {(each.name, each.gpus) for host in hosts_of(file) for each in host.engines} == stays


TIED = [
    ("cluster.count", "3"),
    ("models.0.tp", "2"),
    ("systems", f"[{PINNED.replace('[[0]]', '[[1, 2]]', 1).replace('[[1]]', '[[0], [2]]')}]"),
]


def test_devices_that_ranks_tie_together_are_one_host(tmp_path: Path) -> None:
    """A model on devices 1 and 2, the other one on 0 and on 2."""
    alone, tied = hosts_of(load_file(write_file(tmp_path, bf16={"num_key_value_heads": 2}), TIED))
    assert (alone.gpus, tied.gpus) == ((0,), (1, 2))
    assert [(engine.name, engine.gpus) for engine in alone.engines] == [("tiny-fp8", (0,))]
    assert {(engine.name, engine.gpus) for engine in tied.engines} == {("tiny-bf16", (1, 2)), ("tiny-fp8", (2,))}
    assert (alone.mode, tied.mode) == ("processes", "processes")


def test_a_model_on_two_devices_is_served(tmp_path: Path) -> None:
    file = load_file(write_file(tmp_path, bf16={"num_key_value_heads": 2}), TIED)
    with launch(file, served_scenario(file, None), start=start_fake) as running:
        assert [stay.gpus for stay in running.spec.stays if stay.model == "tiny-bf16"] == [(1, 2)]
        assert [(gpu.id, gpu.memory_bytes) for gpu in running.spec.gpus] == [(gpu, 2**24) for gpu in range(3)]
        assert {model.id: model.tp for model in running.spec.models} == {"tiny-bf16": 2, "tiny-fp8": 1}
        for model in ("tiny-bf16", "tiny-fp8"):
            heard = Heard()
            running.driver.submit(lambda id: Job(id, model, (5, 6, 7), Sampling(max_tokens=4), heard, 5.0))  # noqa: B023
            eventually(lambda: heard.end is not None)  # noqa: B023
            assert heard.tokens_ == continuation((5, 6, 7), 4)
        tied = running.hosts[1]
        local = next(each.id for each in tied.engines.values() if each.gpus == (1, 2))
        tied.kill(local)  # type: ignore[attr-defined]
        eventually(lambda: running.driver.health("tiny-bf16").condition == "ready" and tied.engines[local].alive)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("runtime.mode", "in_process"), "engines on 2 devices need processes"),
        (("runtime.backend", "cuda"), "engines on 2 GPUs need runtime.cluster: ray"),
    ],
)
def test_devices_that_cannot_be_side_by_side_are_refused(change: tuple[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=problem):
        hosts_of(load_file(write_file(tmp_path), [*TWO, change]))


def test_cuda_without_a_gpu_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fineserve_runtime.launch.gpus", lambda: 0)
    file = load_file(write_file(tmp_path), [("runtime.backend", "cuda")])
    problem = pytest.raises(ValueError, match=r"^runtime.backend: cuda, but no GPU can be used here")
    with problem, launch(file, served_scenario(file, None)):
        raise AssertionError("it started")


def test_a_cluster_without_ray_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ray_cluster", "ray_device"):
        monkeypatch.delitem(sys.modules, f"fineserve_runtime.engines.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    file = load_file(write_file(tmp_path), [("runtime.cluster", "ray")])
    problem = pytest.raises(ValueError, match=r"^runtime.cluster: Ray cannot be imported \(.*; pip install")
    with problem, launch(file, served_scenario(file, None)):
        raise AssertionError("it started")


def test_memory_split_by_demand_goes_with_rates_and_kv_of_a_token(tmp_path: Path) -> None:
    """Three times the requests at the same KV of a token: three quarters of the region."""
    changes = [("models.0.rate_per_s", "12"), ("systems", "[s-partition]")]
    (host,) = hosts_of(load_file(write_file(tmp_path), changes))
    limits = {engine.name: engine.kv_limit_bytes for engine in host.engines}
    assert limits == {"tiny-bf16": 3 * 2**22, "tiny-fp8": 2**22}


REPLICAS = [
    ("cluster.count", "2"),
    ("models", "[{id: m, model: {config: bf16/config.json}, precision: W16A16, rate_per_s: 4}]"),
    ("runtime.models", "{m: {path: bf16, max_model_len: 1024}}"),
    ("systems", "[vllm-dp]"),
]


@pytest.mark.parametrize("system", ["distserve", "vllm-pd"])
def test_prefill_and_decode_apart_is_refused_by_name(tmp_path: Path, system: str) -> None:
    with pytest.raises(ConfigError, match=rf"systems\.0: {system}: real engines have no roles axis yet"):
        load_file(write_file(tmp_path), [*REPLICAS[:-1], ("systems", f"[{system}]")])


def test_a_model_has_an_instance_on_each_device_under_a_system_with_dispatch(tmp_path: Path) -> None:
    file = load_file(write_file(tmp_path), REPLICAS)
    with launch(file, served_scenario(file, None), start=start_fake) as running:
        assert [(stay.model, stay.gpus) for stay in running.spec.stays] == [("m", (0,)), ("m", (1,))]
        asked = []
        for _ in range(8):
            asked.append(Heard())
            sink, sampling = asked[-1], Sampling(max_tokens=5)
            running.driver.submit(lambda id, s=sink, p=sampling: Job(id, "m", (5, 6, 7), p, s, 60.0))  # type: ignore[misc]
        eventually(lambda: all(heard.end for heard in asked))
        assert all(heard.tokens_ == continuation((5, 6, 7), 5) for heard in asked)
        assert all(host.engines[0].submitted for host in running.hosts.values())  # type: ignore[attr-defined]


def test_pairs_of_instances_are_pipelines_of_one_engine_each(tmp_path: Path) -> None:
    changes = [*REPLICAS, ("cluster.count", "4"), ("systems", "[vllm-pp]")]
    hosts = hosts_of(load_file(write_file(tmp_path), changes))
    assert [host.gpus for host in hosts] == [(0, 1), (2, 3)]
    assert [(engine.gpus, engine.stages) for host in hosts for engine in host.engines] == [((0, 1), 2), ((2, 3), 2)]
    with pytest.raises(ScenarioError, match="3 instances do not make pipelines of 2 stages"):
        hosts_of(load_file(tmp_path / "file.yaml", [*changes, ("cluster.count", "3")]))


def test_kunserve_has_two_instances_and_the_pipeline_over_both_on_one_host(tmp_path: Path) -> None:
    """Each instance keeps the layers that the other drops."""
    changes = [*REPLICAS, ("cluster.count", "2"), ("systems", "[kunserve]"), ("runtime.weights_in_region", "true")]
    (host,) = hosts_of(load_file(write_file(tmp_path), changes))
    shapes = [(engine.gpus, engine.stages, engine.keeps, engine.borrows) for engine in host.engines]
    assert shapes == [((0,), 1, (0, 1), False), ((1,), 1, (1, 2), False), ((0, 1), 2, None, True)]
    assert {engine.lookahead for engine in host.engines} == {"balanced"}
    assert (host.gpus, host.mode) == ((0, 1), "processes")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("cluster.count", "4"), "in pairs: two devices, tp: 1, stages: 1"),
        (("runtime.weights_in_region", "false"), "kunserve drops layers: set it to true"),
        (("runtime.backend", "cuda"), "is served by backend cpu, mode processes"),
        (("runtime.mode", "in_process"), "is served by backend cpu, mode processes"),
    ],
)
def test_drops_that_engines_cannot_do_are_refused(change: tuple[str, str], problem: str, tmp_path: Path) -> None:
    changes = [*REPLICAS, ("cluster.count", "2"), ("systems", "[kunserve]"), ("runtime.weights_in_region", "true")]
    with pytest.raises(ConfigError, match=problem):
        load_file(write_file(tmp_path), [*changes, change])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("runtime.models.m.stages", "2"), "do not divide into the 2 stages"),
        (("runtime.mode", "in_process"), "is served by backend cpu, mode processes"),
        (
            ("systems", "[{base: vllm-pp, name: p, execution: {stages: 3}}]"),
            "2 layers do not divide into 3 equal parts",
        ),
    ],
)
def test_pipelines_that_engines_cannot_be_are_refused(change: tuple[str, str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_file(write_file(tmp_path), [*REPLICAS, ("cluster.count", "6"), ("systems", "[vllm-pp]"), change])
