"""A CPU or a CUDA GPU, through torch and, where it is installed, vLLM's own operators.

Kernels on a GPU are timed inside a captured CUDA graph, as an engine replays them: events around one replay, divided by the
calls in it. If a kernel cannot be captured, events surround plain launches, and the implementation says ``eager``. On the CPU
the clock is ``time.perf_counter`` around each call.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fineserve_calibrate.probes.engines import EnginePool, ProbedModel
from fineserve_calibrate.probes.nvidia import Environment, FoundGpu, stop_mps
from fineserve_calibrate.probes.schema import Identity, Prepared, ProbeError
from fineserve_sim.catalog import GpuSpec

Call = Callable[[], object]
LEAST_CALLS = 8  # in a captured graph, of calls that are not long by themselves
LONG_S = 2e-3
MOST_BUFFERS = 32
MOST_BUFFER_BYTES = 4 * 2**30
FALLBACK_CACHE_BYTES = 64 * 2**20


def package_version(name: str) -> str:
    """Tell the version of an installed package, or ``none``."""
    for distribution in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def import_torch() -> Any:
    """Import torch. Raises ProbeError where it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ProbeError(
            f"torch cannot be imported ({error}); install torch, and vllm for its kernels and engines"
        ) from None


def import_vllm_operators(on_cpu: bool) -> Any:
    """Import ``vllm._custom_ops``; None where vLLM is not installed or does not load.

    The attention kernels are loaded, too, so that no point pays for it.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        operators = importlib.import_module("vllm._custom_ops")
        with suppress(ImportError):  # the points that need it will say so
            importlib.import_module("vllm.v1.attention.backends.cpu_attn" if on_cpu else "vllm.vllm_flash_attn")
        return operators
    except Exception as error:  # a broken installation is as good as none, and says why
        logging.getLogger(__name__).info("vLLM's operators are not used: %s", error)
        return None


def last_level_cache_bytes() -> int:
    """Read the size of the CPU's last-level cache from Linux, or guess generously."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    kib = [int(size[:-1]) for size in sizes if size[-1:] == "K"]
    return max(kib) * 1024 if kib else FALLBACK_CACHE_BYTES


def cpu_name() -> str:
    """Name the processor as Linux does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0]}, {len(models)} cores" if models else platform.machine()


class TorchDevice:
    """A device: the GPU, or the CPU where ``gpu`` is None. Raises ProbeError where torch is missing or cannot use the GPU."""

    def __init__(self, gpu: FoundGpu | None, models: dict[str, ProbedModel]) -> None:
        self.torch = import_torch()
        self.on_cpu = gpu is None
        self.ops = import_vllm_operators(self.on_cpu)
        self.engines = EnginePool(models, self.on_cpu)
        self.mps: Environment | None = None  # environment of the MPS daemon, once it runs
        self.has_vllm = package_version("vllm") != "none"
        self.spec: GpuSpec | None = gpu.spec if gpu else None
        if gpu is None:
            self.name, cache_bytes = "cpu", last_level_cache_bytes()
            self.torch.set_num_threads(1)  # as the probed engines have it
            device, gpus, driver, cuda = cpu_name(), 0, "none", "none"
        else:
            if not self.torch.cuda.is_available():
                raise ProbeError(
                    f"torch {self.torch.__version__} cannot use the {gpu.device}; install a CUDA build of torch"
                )
            self.name, properties = "cuda", self.torch.cuda.get_device_properties(0)
            self.capability: tuple[int, int] = (properties.major, properties.minor)
            cache_bytes = getattr(properties, "L2_cache_size", FALLBACK_CACHE_BYTES)
            device, gpus, driver = gpu.device, self.torch.cuda.device_count(), _smi("driver_version") or gpu.driver
            cuda = str(self.torch.version.cuda)
        self.cache_bytes = int(cache_bytes)
        self.identity = Identity(device, gpus, driver, cuda, str(self.torch.__version__), package_version("vllm"))
        self._random = self.torch.Generator(device=self.name)
        self._random.manual_seed(0)

    def now_s(self) -> float:
        """See ``Backend.now_s``."""
        return time.perf_counter()

    def clocks(self) -> str:
        """Tell SM and memory clocks, temperature and power of the GPU, or mean core clock and load of the CPU."""
        if not self.on_cpu:
            return _smi("clocks.sm,clocks.mem,temperature.gpu,power.draw") or "unknown"
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            return "unknown"
        mhz = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
        return f"{sum(mhz) / len(mhz) if mhz else 0:.0f} MHz, load {os.getloadavg()[0]:.1f}"

    def healthy(self) -> bool:
        """Try a small computation: a GPU that lost its context fails every call from then on."""
        try:
            ones = self.torch.ones(8, device=self.name)
            return float((ones + ones).sum()) == 16.0
        except Exception:
            return False

    def close(self) -> None:
        """End the engines and the MPS daemon, free cached memory."""
        self.engines.close()
        if self.mps is not None:
            stop_mps(self.mps)
        self.free()

    def free(self) -> None:
        """Give cached GPU memory back, so that another process can have it."""
        if not self.on_cpu:
            self.torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.on_cpu:
            self.torch.cuda.synchronize()

    def random(self, *shape: int, dtype: Any = None) -> Any:
        """Draw a tensor of normal numbers on the device. 8-bit floats are rounded from 16-bit ones."""
        torch, wanted = self.torch, dtype or self.torch.bfloat16
        narrow = wanted.itemsize == 1
        tensor = torch.randn(
            *shape, device=self.name, dtype=torch.bfloat16 if narrow else wanted, generator=self._random
        )
        return tensor.to(wanted) if narrow else tensor

    def random_bits(self, *shape: int) -> Any:
        """Draw a tensor of random 32-bit words."""
        torch = self.torch
        high = 2**31
        return torch.randint(-high, high, shape, device=self.name, dtype=torch.int32, generator=self._random)

    def buffers(self, one_bytes: float) -> int:
        """Count the sets of operands to rotate so that no cache holds the next one."""
        wanted = math.ceil(2 * self.cache_bytes / one_bytes) + 1
        affordable = int(MOST_BUFFER_BYTES / one_bytes)
        return max(1, min(wanted, MOST_BUFFERS, affordable))

    def timed(self, calls: Sequence[Call], implementation: str) -> Prepared:
        """Prepare kernels to be measured. The calls take turns, one a buffer."""
        if self.on_cpu:
            return Prepared(_wall_clock(calls), implementation)
        for call in calls:
            call()
        self.synchronize()
        start = time.perf_counter()
        calls[0]()
        self.synchronize()
        short = time.perf_counter() - start < LONG_S
        repeated = list(calls) * (math.ceil(LEAST_CALLS / len(calls)) if short else 1)
        try:
            graph = self.captured(repeated)
        except RuntimeError:
            self.synchronize()
            return Prepared(self._events(_in_turn(repeated), len(repeated)), f"{implementation}, eager")
        return Prepared(self._events(graph.replay, len(repeated)), implementation, close=graph.reset)

    def waited(self, call: Call, implementation: str, close: Callable[[], None] | None = None) -> Prepared:
        """Prepare a call whose effect the host waits for, by the host's clock."""

        def finished() -> None:
            call()
            self.synchronize()

        return Prepared(_wall_clock([finished]), implementation, *([close] if close else []))

    def captured(self, calls: Sequence[Call]) -> Any:
        """Capture these calls as a CUDA graph. Raises RuntimeError for a call that cannot be captured."""
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def _events(self, run: Call, calls: int) -> Callable[[int], list[float]]:
        torch = self.torch

        def sample(count: int) -> list[float]:
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            for start, end in pairs:
                start.record()
                run()
                end.record()
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1e3 / calls for start, end in pairs]

        return sample


def _in_turn(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _wall_clock(calls: Sequence[Call]) -> Callable[[int], list[float]]:
    turn = 0

    def sample(count: int) -> list[float]:
        nonlocal turn
        seconds = []
        for _ in range(count):
            call = calls[turn % len(calls)]
            turn += 1
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return seconds

    return sample


def _smi(fields: str) -> str:
    """What nvidia-smi says of the first GPU; empty where it does not run."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()
