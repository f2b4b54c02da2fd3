"""Engines in processes of their own, on one region: same tokens, and what happens when one of them dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fineserve_runtime.engines.api import EngineDied, StepReport
from fineserve_runtime.engines.table import RegionError, SlabTable

from .conftest import BF16, FP8, SLAB_BYTES, draw_requests

pytestmark = pytest.mark.filterwarnings("ignore")
SLABS = 24


CRASH = """
import os, pathlib, sys
from fineserve_runtime.engines.api import EngineConfig, HostConfig, Sampling, Submission, TinyModel
from fineserve_runtime.engines.host import start_host
from fineserve_runtime.engines.table import SlabTable

class Deaf:
    def on_step(self, report):
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    folder, cache = map(pathlib.Path, sys.argv[1:])
    config = EngineConfig("bf16", TinyModel(seed=1))
    host = start_host(HostConfig((config,), 2**21, "processes", region_dir=folder, cache_dir=cache), Deaf())
    print(host.table_path, SlabTable(host.table_path).counters[0].get("pid"), flush=True)
    host.engines[0].submit(Submission(0, (2, 3, 4), Sampling(max_tokens=500, ignore_eos=True)))
    host.engines[0].drain(60)
"""


def test_parity_kill_and_restart(
    start: Callable[..., tuple[Any, Any]],
    same_tokens: Callable[..., None],
    tmp_path: Path,
    cache_dir: Path,
) -> None:
    """One host for the whole story, after another one that crashed: engines take 10 s to start."""
    _crash_a_host(tmp_path, cache_dir)
    host, heard = start(BF16, FP8, mode="processes", slabs=SLABS)
    assert host.found_stale_region
    with pytest.raises(RegionError, match="in use by the server"):
        start(BF16, mode="processes", slabs=SLABS)
    first, second = draw_requests(1), draw_requests(2)
    _give_way(host)
    _parity(host, heard, same_tokens, first, second)
    _kill_one_in_flight(host, heard, same_tokens, first, second)
    _restart(host, heard, same_tokens, second)


def _crash_a_host(folder: Path, cache_dir: Path) -> None:
    """It leaves its files, and its engine leaves by itself."""
    script = folder / "crash.py"
    script.write_text(CRASH)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(folder), str(cache_dir)]
    crashed = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=120, check=False)
    assert crashed.returncode == -signal.SIGKILL
    table, pid = crashed.stdout.split()
    assert Path(table).exists()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists(), "the engine outlived its host"


def _give_way(host: Any) -> None:
    """Threads of process groups to the one that steps, which they kept waiting for up to 0.8 s on two busy processors."""
    for engine in range(2):
        pid = int(SlabTable(host.table_path).counters[engine].get("pid"))
        names = {int(task.name): (task / "comm").read_text() for task in Path(f"/proc/{pid}/task").iterdir()}
        groups = [thread for thread, name in names.items() if name.startswith("gloo")]
        assert groups and {os.getpriority(os.PRIO_PROCESS, thread) for thread in groups} == {19}
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)


def _parity(host: Any, heard: Any, same_tokens: Any, first: list[Any], second: list[Any]) -> None:
    for one, other in zip(first, second, strict=True):
        host.engines[0].submit(one)
        host.engines[1].submit(other)
    for engine, (config, requests) in enumerate([(BF16, first), (FP8, second)]):
        assert host.engines[engine].drain(120)
        same_tokens(config, requests, heard.of(engine))
        assert heard.preemptions(engine), "the memory was to be scarce"
        assert host.engines[engine].stats().blocks_zeroed > 50, "slabs were to change owners"
    assert host.ledger().free_bytes == (SLABS - 1) * SLAB_BYTES


def _kill_one_in_flight(host: Any, heard: Any, same_tokens: Any, first: list[Any], second: list[Any]) -> None:
    heard.tokens.clear(), heard.reasons.clear()
    pid = SlabTable(host.table_path).counters[1].get("pid")

    def kill_after_ten(report: StepReport) -> None:
        if report.engine == 1 and len(heard.of(1)) >= 10 and host.engines[1].alive:
            heard.then = lambda report: None
            os.kill(pid, signal.SIGKILL)

    heard.then = kill_after_ten
    for one, other in zip(first, second, strict=True):
        host.engines[0].submit(one)
        host.engines[1].submit(other)
    assert heard.died.wait(60)
    engine, reason, lost = heard.deaths[0]
    assert engine == 1
    assert reason == "its process ended with code -9"
    finished = {request for number, request in list(heard.reasons) if number == 1}  # the other engine goes on
    assert set(lost) == {request.request_id for request in second} - finished
    assert lost
    assert host.engines[0].drain(120)
    same_tokens(BF16, first, heard.of(0))  # the other model goes on
    assert host.ledger().free_bytes == (SLABS - 1) * SLAB_BYTES, "its slabs come back"
    with pytest.raises(EngineDied, match="fp8: its process ended with code -9"):
        host.engines[1].submit(second[0])


def _restart(host: Any, heard: Any, same_tokens: Any, second: list[Any]) -> None:
    heard.tokens.clear(), heard.reasons.clear()
    host.restart(1)
    for request in second:
        host.engines[1].submit(request)
    assert host.engines[1].drain(120)
    same_tokens(FP8, second, heard.of(1))
