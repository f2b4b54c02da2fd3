"""The server under test of the chaos campaign: a file, a process, and what can be seen of it from outside.

With fake engines this module is also what that process runs. ``tests/runtime/leased_core.py`` is then in the place of vLLM:
tokens are hashes of what their KV blocks say, and a restart takes a second. Devices, memory, processes, links, driver and HTTP
are the real ones.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos_processes import children, mapping
from benchmarks.chaos_ray import DEVICES, Nodes

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "runtime"
KEY = "chaos"
START_S = 240.0
_SHARED = Path("/dev/shm")
_GONE_S = 10.0
LATEST_S = 10.0  # runtime.queued_s
LONGEST_S = 60.0  # runtime.request_s
BODY_S = 90.0
"""``runtime.limits.body_s``: as patient as the clients. On a busy machine one thread took 60 to 80 s for its burst of 1,500
requests. It may begin the body of 20 MB later than the usual 30 s."""
SETTINGS = {
    "runtime.mode": "processes",
    "runtime.admin_key_env": "CHAOS_ADMIN_KEY",
    "runtime.weights_in_region": "true",
    "runtime.poison_freed": "true",
    "runtime.silent_s": "3",
    "runtime.queued_s": str(LATEST_S),
    "runtime.request_s": str(LONGEST_S),
    "runtime.drain_s": "5",
    "runtime.limits.body_s": str(BODY_S),
    "runtime.models.tiny-bf16.max_model_len": "512",
    "runtime.models.tiny-fp8.max_model_len": "512",
    "models.0.ttft_slo_s": "8.0",
    "models.1.ttft_slo_s": "8.0",
}
REGION_BYTES = {"vllm": 24 * 2**20, "fake": 256 * 2**10, "ray": 256 * 2**10}
"""Less than 32 clients want. Weights are in it: of vLLM's models 20 MiB, of the fake ones a slab each."""

_PLACEMENT = "{policy: pinned, groups: {tiny-bf16: [[0], [1]], tiny-fp8: [[1]]}}"
ON_RAY = {
    "runtime.mode": "in_process",
    "cluster.count": str(DEVICES),
    "systems": f"[{{base: fineserve, name: two, placement: {_PLACEMENT}}}]",
}
"""What strikes an engine there strikes its device, and takes half of what one model has, and all or nothing of the other."""

MODELS = ("tiny-bf16", "tiny-fp8")


def write_file(folder: Path, engines: str) -> tuple[Path, dict[str, Any]]:
    """The file of the server, and the third model's keys: that which comes and goes. With vLLM the models are made there."""
    folder.mkdir(parents=True, exist_ok=True)
    if engines == "vllm":
        from fineserve_runtime.demo import make_demo

        file = make_demo(folder, 0)
        third = re.search(r"tiny-bf16: \{path: (\S+),", file.read_text(encoding="utf-8"))
        assert third is not None
        return file, {"path": third[1], "max_model_len": 512}
    sys.path.insert(0, str(TESTS))
    import filekit  # type: ignore[import-not-found]

    file = folder / "file.yaml"
    return file if file.exists() else filekit.write_file(folder), {"path": "bf16", "max_model_len": 512}


class Server:
    """A running server. ``nodes``: what its devices are on, if not this machine; ``log``: where its stderr is copied to while
    ``reads`` is set; ``changes`` to its settings. Raises RuntimeError when it does not start."""

    def __init__(
        self,
        file: Path,
        engines: str,
        *,
        nodes: Nodes | None = None,
        log: Path,
        changes: Mapping[str, str] | None = None,
    ) -> None:
        self.engines, self.nodes = engines, nodes
        self._region = f"chaos-{os.getpid()}-{time.monotonic_ns() % 10**9}-"
        settings = SETTINGS | {"runtime.region_name": self._region, "runtime.region_bytes": str(REGION_BYTES[engines])}
        self._decisions = log.with_suffix(".decisions")
        settings["runtime.decisions"] = str(self._decisions)
        if nodes is not None:
            settings |= ON_RAY | {"runtime.cluster": f"{{ray: '{nodes.address}'}}"}
        settings |= changes or {}
        program = ["-m", "fineserve_runtime", "serve"] if engines == "vllm" else [str(Path(__file__))]
        command = [sys.executable, *program, str(file)]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        path = os.pathsep.join([str(ROOT), *(str(ROOT / each) for each in ("traces", "runtime")), str(TESTS)])
        self.log = log
        environment = os.environ | {"PYTHONPATH": path, "CHAOS_ADMIN_KEY": KEY, "OMP_NUM_THREADS": "1"}
        log.write_bytes(b"")
        self.reads = threading.Event()
        self.reads.set()
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, env=environment | {"HF_HUB_OFFLINE": "1"}, cwd=ROOT
        )
        threading.Thread(target=self._copy_stderr, daemon=True).start()
        self.url = self._await_ready()
        self.admin = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=300)

    def _copy_stderr(self) -> None:
        assert self.process.stderr is not None
        with self.log.open("ab", buffering=0) as kept:
            while self.reads.wait() and (line := self.process.stderr.readline()):
                kept.write(line)

    def _await_ready(self) -> str:
        """The address."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.process.poll() is None:
            time.sleep(0.1)
            for line in self.log.read_text(encoding="utf-8").splitlines():
                if '"event":"ready"' in line:
                    return str(json.loads(line)["url"])
        self.process.kill()
        raise RuntimeError(f"the server did not start; see {self.log}")

    # --- its disk --------------------------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        """No file of the server's, nor of engines that it starts now, can grow."""
        self._limit_files(0)

    def free_disk(self) -> None:
        self._limit_files(resource.RLIM_INFINITY)

    def _limit_files(self, most_bytes: int) -> None:
        for pid in (self.process.pid, *children(self.process.pid, "spawn_main")):
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))

    # --- what is seen of it ----------------------------------------------------------------------------------------

    def engine_pids(self) -> list[int]:
        """Processes of engines, be they still starting. On Ray they are in that of their device."""
        if self.nodes is not None:
            return self.nodes.actors()
        return children(self.process.pid, "spawn_main")

    def rss_mb(self, pid: int | None = None) -> float:
        """Resident memory of the server, or of one of its engines."""
        status = Path(f"/proc/{pid or self.process.pid}/status").read_text(encoding="utf-8")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) / 1024 if found else 0.0

    def waited_s(self) -> float:
        """For a core, in all: the thread of its event loop, which had something to do."""
        return waited_s(self.process.pid)

    def metric(self, name: str, *labels: str) -> float:
        """The sum over all lines with these labels."""
        lines = self.admin.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name) and all(label in line for label in labels)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def ready(self) -> bool:
        states = {each["id"]: each["state"] for each in self.admin.get("/v1/models").json()["data"]}
        return set(states) == set(MODELS) and set(states.values()) == {"ready"}

    def stop(self) -> int | None:
        """SIGTERM; the exit code, None where it had to be killed."""
        self.admin.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None
        finally:
            self._decisions.unlink(missing_ok=True)

    def left_behind(self) -> list[str]:
        """Files, and processes that have one of them open, be it deleted. Ray's go by and by."""
        end_s = time.monotonic() + _GONE_S
        while (found := self._remains()) and time.monotonic() < end_s:
            time.sleep(0.2)
        return found

    def _remains(self) -> list[str]:
        name = f"fineserve-{self._region}"
        files = [path.name for path in _SHARED.glob(f"{name}*") if path.suffix != ".lock"]
        return files + [f"process {pid}" for pid in mapping(name)]


def waited_s(pid: int | str = "self") -> float:
    """How long the main thread of a process has been ready to run without a core, as the kernel counts it."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9


def serve_fake(arguments: Sequence[str]) -> None:
    """``FILE --set KEY=VALUE ...``"""
    from contextlib import ExitStack
    from functools import partial

    from fineserve_runtime.cli.options import pairs
    from fineserve_runtime.config import load_file
    from fineserve_runtime.engines.device import LocalDevice
    from fineserve_runtime.engines.host import start_host
    from fineserve_runtime.launch import StartHost
    from fineserve_runtime.serve import run_server
    from leased_core import LeasedCore  # type: ignore[import-not-found]
    from serverkit import ByteTokenizer  # type: ignore[import-not-found]

    file = load_file(Path(arguments[0]), pairs(list(arguments[2::2])))
    open_device = partial(LocalDevice, build=LeasedCore)
    with ExitStack() as stack:
        start: StartHost = partial(start_host, open_device=open_device)
        if file.section.cluster is not None:
            from fineserve_runtime.engines.ray_cluster import ray_cluster

            cluster = ray_cluster(file.section.ray_address, DEVICES, "cpu", open_device)
            start = stack.enter_context(cluster).start_host
        run_server(file, None, start=start, tokenizer=lambda folder: ByteTokenizer())


if __name__ == "__main__":
    serve_fake(sys.argv[1:])
