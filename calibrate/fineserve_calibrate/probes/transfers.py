"""Copies between host, device and devices, weight files, and the driver's memory calls."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fineserve_calibrate.probes.nvidia import Driver, load_driver
from fineserve_calibrate.probes.schema import Point, Prepared, Unavailable

if TYPE_CHECKING:
    from fineserve_calibrate.probes.torch_device import TorchDevice

TENSOR_BYTES = 64 * 2**20  # of a weight file
LOAD_PRODUCTS, LOAD_SIZE = 300, 4096
PRODUCTS_A_HANDLE = 5  # besides, so that they outlast the calls for many handles
CALLS = ("create", "map", "set_access", "unmap", "release")


def copy(device: TorchDevice, point: Point) -> Prepared:
    """Prepare one copy, timed while the host waits for it."""
    torch, size = device.torch, int(point["bytes"])
    direction, pinned = str(point["direction"]), point["host_memory"] == "pinned"
    if device.on_cpu != (direction == "host_to_host"):
        raise Unavailable("the CPU has no device memory" if device.on_cpu else "measured on the CPU alone")
    buffers = device.buffers(size)
    data = torch.randint(0, 255, (size,), dtype=torch.uint8)
    host, other = ([data.clone().to(place) for _ in range(buffers)] for place in ("cpu", device.name))
    if pinned:
        host = [tensor.pin_memory() for tensor in host]
    pairs = list(zip(host, other, strict=True))
    if direction == "host_to_device":
        pairs = [(to, source) for source, to in pairs]
    turn = iter(range(1 << 62))

    def run() -> None:
        to, source = pairs[next(turn) % buffers]
        to.copy_(source, non_blocking=pinned)

    return device.waited(run, "torch copy_")


def weight_load(device: TorchDevice, point: Point) -> Prepared:
    """Prepare loading a safetensors file to the device. It was just written, so the page cache holds it."""
    try:
        from safetensors.torch import load_file, save_file
    except ImportError:
        raise Unavailable("safetensors is not installed") from None
    folder = tempfile.TemporaryDirectory()
    path, size = Path(folder.name) / "weights.safetensors", int(point["bytes"])
    each = min(size, TENSOR_BYTES) // 2
    names = [f"layer{place}" for place in range(size // 2 // each)]
    data = device.torch.randn(each).to(device.torch.bfloat16)
    save_file({name: data.clone() for name in names}, path)

    def run() -> None:
        tensors: dict[str, Any] = load_file(path, device=device.name)
        for tensor in tensors.values():  # a mapped file is read when it is touched
            tensor.clone()

    return device.waited(run, "safetensors load_file", close=folder.cleanup)


def all_reduce(device: TorchDevice, point: Point) -> Prepared:
    """Prepare NCCL's all-reduce over the first GPUs of the machine."""
    torch, gpus, size = device.torch, int(point["gpus"]), int(point["message_bytes"])
    if device.identity.gpus < gpus:
        raise Unavailable(f"{device.identity.gpus} GPUs, needs {gpus}")
    from torch.cuda import nccl

    tensors = [torch.randn(size // 2, device=f"cuda:{place}").to(torch.bfloat16) for place in range(gpus)]

    def run() -> None:
        nccl.all_reduce(tensors)
        for place in range(gpus):
            torch.cuda.synchronize(place)

    return device.waited(run, "NCCL all_reduce, eager")


def point_to_point(device: TorchDevice, point: Point) -> Prepared:
    """Prepare a copy from one GPU to another."""
    torch, size = device.torch, int(point["message_bytes"])
    if device.identity.gpus < 2:
        raise Unavailable(f"{device.identity.gpus} GPUs, needs 2")
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda:0")
    to = torch.empty(size, dtype=torch.uint8, device="cuda:1")

    def run() -> None:
        to.copy_(source)
        torch.cuda.synchronize(1)

    return device.waited(run, "torch copy_")


class Handles:
    """The life of some handles: create, map, set access, unmap, release. Each call is timed over all handles."""

    def __init__(self, driver: Driver, size_bytes: int, count: int) -> None:
        self._driver, self._size, self._count = driver, size_bytes, count
        self._base = 0
        self._handles: list[int] = []
        self._mapped: list[int] = []

    def _create(self, place: int) -> None:
        self._handles.append(self._driver.create(self._size))

    def _map(self, place: int) -> None:
        address = self._base + place * self._size
        self._driver.map(address, self._size, self._handles[place])
        self._mapped.append(address)

    def _set_access(self, place: int) -> None:
        self._driver.set_access(self._mapped[place], self._size)

    def _unmap(self, place: int) -> None:
        self._driver.unmap(self._mapped.pop(), self._size)

    def _release(self, place: int) -> None:
        self._driver.release(self._handles.pop())

    def life(self) -> dict[str, float]:
        """Time one call of each kind, the mean over the handles. Nothing is left behind when a call fails."""
        steps = (self._create, self._map, self._set_access, self._unmap, self._release)
        self._base = self._driver.reserve(self._size * self._count)
        seconds = {}
        try:
            for name, step in zip(CALLS, steps, strict=True):
                start = time.perf_counter()
                for place in range(self._count):
                    step(place)
                seconds[name] = (time.perf_counter() - start) / self._count
        finally:
            while self._mapped:
                self._unmap(0)
            while self._handles:
                self._release(0)
            self._driver.free(self._base, self._size * self._count)
        return seconds


def vmm(device: TorchDevice, point: Point) -> Prepared:
    """Prepare a VMM call of the driver, on an idle GPU or while products keep it busy."""
    if device.on_cpu:
        raise Unavailable("the CPU has no CUDA driver")
    driver, size = load_driver(), int(point["bytes"])
    if size % driver.granularity_bytes():
        raise Unavailable(f"handles are multiples of {driver.granularity_bytes()} bytes")
    device.torch.ones(1, device=device.name)  # the primary context becomes current
    count, call, busy = int(point["count"]), str(point["call"]), point["load"] == "kernel"
    handles, products = Handles(driver, size, count), LOAD_PRODUCTS + PRODUCTS_A_HANDLE * count
    left, right = (device.random(LOAD_SIZE, LOAD_SIZE) for _ in range(2)) if busy else (None, None)

    def once() -> float:
        if not busy:
            return handles.life()[call]
        device.synchronize()
        for _ in range(products):
            device.torch.mm(left, right)
        queued = device.torch.cuda.Event()
        queued.record()
        seconds = handles.life()[call]
        if queued.query() and call in ("create", "map", "set_access"):
            raise Unavailable("the kernels ended before the calls did")
        device.synchronize()
        return seconds

    return Prepared(lambda count: [once() for _ in range(count)], f"libcuda {driver.version()}")
