"""Where simulations run changes no byte: in this process or in several, whole or in components, here or on a Ray cluster, with
workers killed in the middle."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import re
import signal
import socketserver
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fineserve_sim.cluster import run
from fineserve_sim.experiment import ConfigError, ScenarioError, load_experiment, run_loaded
from fineserve_sim.experiment.run import local, runner, spread
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.executors import executor_of
from fineserve_sim.experiment.run.work import Cell, Part

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

REQUESTS = 1200
FILE = """\
fineserve: 1
title: Three models on two GPUs
cluster: {gpu: h100-sxm, count: 2}
engine: {block_tokens: 32, step_times: step.parquet}
models:
  - {id: A, model: llama-3.1-8b, precision: W16A16}
  - {id: B, model: llama-3.1-8b, precision: W16A16}
  - {id: C, model: llama-3.1-8b, precision: W16A16}
workload: {trace: recorded.csv}
slo: {ttft_s: 1.0}
systems: ["static*", {base: prism, name: prism, scheduler: {policy: fcfs}}]
sweeps: [{name: rates, axes: {rate_scale: [1, 2]}}]
seeds: 1
"""
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An experiment with a recorded trace and a table of step times, both files beside it."""
    arrivals = (f"{0.05 * row},{'ABC'[row * row % 3]},{100 + row % 400},{20 + row % 50}" for row in range(REQUESTS))
    header = "arrival_s,model,prompt_tokens,output_tokens"
    (tmp_path / "recorded.csv").write_text("\n".join([header, *arrivals, ""]))
    compositions = [(*each, 0) for each in product((1, 2, 4, 8), (64, 256, 1024))]
    compositions += [(0, 0, new) for new in (16, 64, 512, 1024)]
    rows = [
        {"model": "llama-3.1-8b", "dtype": "bfloat16", "mode": "eager", "cached_tokens": 0}
        | {"decodes": decodes, "context": context, "prefill_tokens": new}
        | {"latency_s": 0.004 + 1e-5 * (decodes + new)}
        for decodes, context, new in compositions
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "step.parquet")
    path = tmp_path / "three.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
def divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a run is, it is taken apart where it can be."""
    monkeypatch.setattr(spread, "WORTH_REQUESTS", 1)


def results(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def ran(file: Path, out: Path, executor: Executor | None = None, *pairs: tuple[str, str], **options: Any) -> Any:
    run_loaded(load_experiment(file, pairs), out, executor=executor, **({} if executor else {"jobs": 1}), **options)
    return results(out)


ALONE = (("systems", '["static*"]'), ("sweeps.0.axes.rate_scale", "[1]"))
"""One run, which falls apart."""


def test_a_packed_cell_needs_no_file_of_this_machine(file: Path, tmp_path: Path) -> None:
    whole = ran(file, tmp_path / "whole", None, *ALONE)
    cells = packed_cells(file, tmp_path)
    for name in ("recorded.csv", "step.parquet"):
        (tmp_path / name).unlink()
    (tmp_path / "out" / "cells").mkdir(parents=True)
    for cell in cells:
        assert str(tmp_path).encode() not in cell, "no path of this machine goes along"
        pickle.loads(cell)(tmp_path / "out", print)
    found = results(tmp_path / "out")
    assert found and found == {name: whole[name] for name in whole if name.startswith("cells/")}


def packed_cells(file: Path, tmp_path: Path) -> list[bytes]:
    """The work of an experiment as it travels."""
    packed: list[bytes] = []

    class Packs:
        workers, ready = 1, False

        def each(self, works: Any, out: Path, tell: Any) -> Iterator[tuple[Any, Any]]:
            for work in works:
                packed.append(pickle.dumps(work.packed()))
                yield work, work(out, print)

    ran(file, tmp_path / "packed", Packs(), *ALONE)
    return packed


def test_one_run_uses_all_workers_where_it_falls_apart(file: Path, tmp_path: Path, divide: None) -> None:
    found: list[Cell | Part] = []

    class Counts:
        workers, ready = 3, False

        def each(self, works: Any, out: Path, tell: Any) -> Iterator[tuple[Any, Any]]:
            done = [(work, work(out, partial(tell, work))) for work in works]
            found.extend(work for work, _ in done)
            return reversed(done)  # type: ignore[return-value]

    assert ran(file, tmp_path / "apart", Counts(), *ALONE) == ran(file, tmp_path / "whole", None, *ALONE)
    assert [type(work) for work in found] == [Part, Part]
    found.clear()
    ran(file, tmp_path / "mixed", Counts(), ("sweeps.0.axes.rate_scale", "[2]"))
    assert [type(work) for work in found] == [Cell, Part, Part], "what stays whole goes out first"
    found.clear()
    ran(file, tmp_path / "logged", Counts(), *ALONE, decisions=True)
    assert [type(work) for work in found] == [Cell]


def test_small_runs_are_not_taken_apart(file: Path, tmp_path: Path) -> None:
    assert spread.WORTH_REQUESTS > REQUESTS
    with executor_of("local", 2) as executor:
        ran(file, tmp_path / "out", executor, *ALONE)
        assert not multiprocessing.active_children(), "a small run starts no process"


def test_where_processes_stand_ready_smaller_runs_are_taken_apart(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Cell | Part] = []

    class Ready:
        workers, ready = 2, True

        def each(self, works: Any, out: Path, tell: Any) -> Iterator[tuple[Any, Any]]:
            for work in works:
                found.append(work)
                yield work, work(out, partial(tell, work))

    ran(file, tmp_path / "small", Ready(), *ALONE)
    assert [type(work) for work in found] == [Cell]
    found.clear()
    monkeypatch.setattr(spread, "WORTH_WHEN_READY", REQUESTS)
    ran(file, tmp_path / "apart", Ready(), *ALONE)
    assert [type(work) for work in found] == [Part, Part]
    with executor_of("local", 2) as executor:
        assert not executor.ready
        ran(file, tmp_path / "two", executor, ("sweeps.0.axes.rate_scale", "[1, 2]"))
        assert executor.ready


@pytest.mark.slow
def test_a_killed_process_changes_no_byte(file: Path, tmp_path: Path) -> None:
    """What it had begun to write is gone, too."""
    killed: list[int] = []

    def kill(done: int, total: int, what: str) -> None:
        if done == 1 and not killed:
            killed.append(done)
            os.kill(multiprocessing.active_children()[0].pid or os.getpid(), signal.SIGKILL)

    with executor_of("local", 2) as executor:
        assert ran(file, tmp_path / "killed", executor, on_progress=kill) == ran(file, tmp_path / "whole")


def test_processes_that_always_die_are_given_up(
    file: Path, tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RETRIES", 0)
    with executor_of("local", 2) as executor, pytest.raises(ConfigError, match="worker processes died again and again"):
        ran(file, tmp_path / "out", executor, simulate=fake.die)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_long_run_tells_how_far_it_is(
    file: Path, tmp_path: Path, divide: None, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """In shares of a simulation, which only grow, in this process, and out in components."""
    monkeypatch.setattr(runner, "LOOKS_S", 0.0)
    monkeypatch.setattr(run, "TOLD_S", 0.0)
    heard: list[float] = []
    with executor_of("local", jobs) as executor:
        ran(file, tmp_path / "out", executor, *ALONE, on_progress=lambda done, total, what: heard.append(done))
    assert heard == sorted(heard) and heard[-1] == 1
    assert len(heard) > 100 * (jobs == 1) and set(heard) - {0.0, 1.0}


# --- Ray ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a CPU each on loopback. Nothing but Ray tells their workers where our code is. Its sockets lie in a folder
    of a short name: a socket's path has at most 107 bytes."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed")
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder,
    ):
        patch.delenv("PYTHONPATH", raising=False)
        patch.setenv("RAY_TMPDIR", folder)
        patch.setattr("ray._private.ray_constants.ENABLE_RAY_CLUSTER", False)  # on loopback, as on a laptop
        nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=NODE)
        nodes.folder = folder
        nodes.add_node(**NODE)
        yield nodes
        nodes.shutdown()


def kill_a_busy_worker(cluster: Any) -> None:
    """SIGKILL to a process of this cluster that is at work."""
    raylets = {str(node.all_processes["raylet"][0].process.pid) for node in cluster.list_all_nodes()}
    until = time.monotonic() + 300
    while time.monotonic() < until:
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if not process.name.isdigit() or b"ray::carry_out" not in (process / "cmdline").read_bytes():
                    continue
                if (process / "stat").read_text().rpartition(")")[2].split()[1] in raylets:
                    os.kill(int(process.name), signal.SIGKILL)
                    return
    raise AssertionError("no worker was at work")


@pytest.mark.slow
@needs_ray
def test_ray_gives_the_same_bytes_though_workers_are_killed(
    cluster: Any, file: Path, tmp_path: Path, divide: None
) -> None:
    """Cells first, then the components of one run; code and data came through Ray alone."""
    import ray

    killed: list[int] = []  # progress is told several times between two simulations

    def kill(done: int, total: int, what: str) -> None:
        if done == 1 and not killed:
            killed.append(done)
            kill_a_busy_worker(cluster)

    alone = ran(file, tmp_path / "alone", None, *ALONE)
    whole = ran(file, tmp_path / "whole")
    with executor_of(f"ray:{cluster.address}") as executor:
        assert executor.workers == 2
        assert ran(file, tmp_path / "cells", executor, on_progress=kill) == whole
        killer = threading.Thread(target=kill_a_busy_worker, args=(cluster,))
        killer.start()
        assert ran(file, tmp_path / "components", executor, *ALONE) == alone
        killer.join()
        with pytest.raises(
            ScenarioError, match=r"^static\*, rate scale 1, seed 0: step.parquet: steps are measured at tp 1"
        ):
            ran(file, tmp_path / "refused", executor, *ALONE, ("models.0.tp", "2"))
        places = ray.get(
            ray.remote(lambda: [place for place in sys.path if Path(place, "fineserve_sim").exists()]).remote()
        )
    assert any(Path(place).is_relative_to(cluster.folder) for place in places), "Ray brought our code"


class ShrinkingCluster:
    """Ray's functions as ``RayCluster`` calls them: four CPUs until the first wait, one from then on."""

    def __init__(self) -> None:
        self.cpus = 4
        self.exceptions = SimpleNamespace(RayError=OSError, RayTaskError=OSError)

    def remote(self, *given: Any, **options: Any) -> Any:
        """A task whose reference is a new object; an actor likewise."""
        call = SimpleNamespace(remote=lambda *arguments: object())
        actor = SimpleNamespace(note=call, read=call)
        return SimpleNamespace(remote=lambda *arguments: object() if arguments else actor) if given else self.remote

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus}

    def wait(self, tasks: list[object], timeout: float) -> tuple[list[object], list[object]]:
        self.cpus = 1
        return tasks[:1], tasks[1:]

    def get(self, task: object, timeout: float | None = None) -> Any:
        return {} if timeout else ({}, "done")


@needs_ray
def test_a_lost_node_leaves_more_under_way_than_the_rest_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself does the work of the lost node again."""
    from fineserve_sim.experiment.run import on_ray

    monkeypatch.setattr(on_ray, "ray", ShrinkingCluster())
    works = [SimpleNamespace(packed=lambda: None) for _ in range(20)]
    done = [(work, found) for work, found in on_ray.RayCluster(None).each(works, tmp_path, print)]
    assert len(done) == 20 and {found for _, found in done} == {"done"}


@pytest.mark.slow
@needs_ray
def test_another_version_of_a_library_on_a_node_is_one_line(
    cluster: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fineserve_sim.experiment.run import on_ray

    monkeypatch.setattr(on_ray, "libraries", lambda: {"numpy": "1.0"})
    with executor_of(f"ray:{cluster.address}") as executor, pytest.raises(ConfigError) as told:
        ran(file, tmp_path / "out", executor, *ALONE)
    expected = r"Ray node \S+: numpy \S+, this machine has 1.0; install the same lock file on every node"
    assert re.fullmatch(expected, str(told.value))


@needs_ray
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ray:127.0.0.1:9", "no Ray cluster at 127.0.0.1:9: Connection refused"),
        ("ray:{other}", "what answers there is something else"),
        ("ray:somewhere", "expected ray:HOST:PORT"),
        ("ray:", "--executor ray:: expected local, ray or ray:HOST:PORT"),
        ("spark", "--executor spark: expected local, ray or ray:HOST:PORT"),
    ],
)
def test_an_address_where_no_cluster_is_is_one_line(text: str, problem: str) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), Answers) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        where = text.format(other=f"127.0.0.1:{other.server_address[1]}")
        with pytest.raises(ValueError) as told, executor_of(where):
            raise AssertionError("it was there")
        assert problem in str(told.value) and "\n" not in str(told.value)


class Answers(socketserver.BaseRequestHandler):
    """A server of another kind."""

    def handle(self) -> None:
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"^--executor ray: Ray is not installed; pip install 'fineserve\[ray\]'$"):
        executor_of("ray").__enter__()
