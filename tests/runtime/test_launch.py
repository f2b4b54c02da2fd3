"""Which hosts a file asks for, and on what; fake engines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from filekit import start_fake, write_file
from fineserve_runtime.config import RuntimeFile, load_file
from fineserve_runtime.engines.api import EngineHost, EngineListener, HostConfig
from fineserve_runtime.launch import launch
from fineserve_runtime.serve import served_scenario

from fineserve_sim.cluster.scenario import ScenarioError

PINNED = "{base: fineserve, name: two, placement: {policy: pinned, groups: {tiny-bf16: [[0]], tiny-fp8: [[1]]}}}"
TWO = [("cluster.count", "2"), ("systems", f"[{PINNED}]")]


def hosts_of(file: RuntimeFile) -> list[HostConfig]:
    started: list[HostConfig] = []

    def start(config: HostConfig, listener: EngineListener) -> EngineHost:
        started.append(config)
        return start_fake(config, listener)

    with launch(file, served_scenario(file, None), start=start) as running:
        assert list(running.hosts) == list(range(len(started)))
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
    assert len({host.region_name for host in hosts}) == len(hosts)


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
