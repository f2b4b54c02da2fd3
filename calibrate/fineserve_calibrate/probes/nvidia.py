"""NVIDIA's driver, as far as probes need it: the name of the GPU, virtual memory management (VMM), and MPS.

The driver library answers without torch, so a machine without a GPU gets its answer at once. Layouts and constants
are from ``cuda.h`` (CUDA driver API, section 6.14). MPS lets kernels of several processes run on one GPU at the same time. The
daemon is our own, in a folder of its own, and ends with the probes; the compute mode of the GPU stays as it is.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from fineserve_calibrate.probes.schema import ProbeError, Unavailable
from fineserve_sim.catalog import GpuSpec, gpu

_PINNED, _DEVICE, _READ_WRITE, _FILE = 1, 1, 3, 1


class DriverError(Exception):
    """The driver library is not there, or a call failed."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Driver:
    """The driver library. Raises DriverError when a call does not succeed."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("cuInit", ctypes.c_uint(0))
        location = _Location(_DEVICE, 0)
        self._properties = _Properties(_PINNED, 0, location, None, _Flags())
        self._shareable = _Properties(_PINNED, _FILE, location, None, _Flags())
        self._access = _Access(location, _READ_WRITE)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {text.value.decode() if text.value else code}")

    def device_name(self, ordinal: int) -> str:
        """Name a GPU as the driver reports it."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, ctypes.c_int(256), ctypes.c_int(ordinal))
        return text.value.decode()

    def version(self) -> str:
        """Tell the newest CUDA version that the driver speaks."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def granularity_bytes(self) -> int:
        """Tell the size of the smallest handle; sizes are multiples of it."""
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), ctypes.c_int(0))
        return size.value

    def reserve(self, size_bytes: int) -> int:
        """Reserve a range of addresses."""
        address = ctypes.c_uint64()
        size, zero = ctypes.c_size_t(size_bytes), ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, zero, ctypes.c_uint64(0), ctypes.c_uint64(0))
        return address.value

    def free(self, address: int, size_bytes: int) -> None:
        """Give a reserved range back."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))

    def create(self, size_bytes: int, *, shareable: bool = False) -> int:
        """Create a handle of physical memory. A shareable one can be exported."""
        handle = ctypes.c_uint64()
        size, properties = ctypes.c_size_t(size_bytes), ctypes.byref(self._shareable if shareable else self._properties)
        self._call("cuMemCreate", ctypes.byref(handle), size, properties, ctypes.c_uint64(0))
        return handle.value

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        """Put a handle's memory at an address."""
        address_, size, zero = ctypes.c_uint64(address), ctypes.c_size_t(size_bytes), ctypes.c_size_t(0)
        self._call("cuMemMap", address_, size, zero, ctypes.c_uint64(handle), ctypes.c_uint64(0))

    def set_access(self, address: int, size_bytes: int) -> None:
        """Let the device read and write a mapped range."""
        access, one = ctypes.byref(self._access), ctypes.c_size_t(1)
        self._call("cuMemSetAccess", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes), access, one)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Take the memory away from a range."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))

    def release(self, handle: int) -> None:
        """Free a handle."""
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def export(self, handle: int) -> int:
        """Make a file descriptor that another process can import."""
        file = ctypes.c_int()
        self._call(
            "cuMemExportToShareableHandle",
            *(ctypes.byref(file), ctypes.c_uint64(handle), ctypes.c_int(_FILE), ctypes.c_uint64(0)),
        )
        return file.value

    def imported(self, file: int) -> int:
        """Make a handle of the memory that another process exported."""
        handle = ctypes.c_uint64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(file), ctypes.c_int(_FILE))
        return handle.value

    def fill(self, address: int, size_bytes: int, byte: int) -> None:
        """Write one byte all over a range."""
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size_bytes))

    def read(self, address: int, size_bytes: int) -> bytes:
        """Copy a range to the host."""
        host = ctypes.create_string_buffer(size_bytes)
        self._call("cuMemcpyDtoH_v2", host, ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))
        return host.raw


def load_driver() -> Driver:
    """Load the driver of this machine. Raises DriverError when there is no NVIDIA driver, or no GPU."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise DriverError("there is no NVIDIA driver") from None
    driver = Driver(library)
    count = ctypes.c_int()
    driver._call("cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise DriverError("the NVIDIA driver sees no GPU")
    return driver


NAMES: tuple[tuple[str, str], ...] = (
    ("h100-sxm", r"\bH100 80GB HBM3\b"),
    ("h100-pcie", r"\bH100 PCIe\b"),
    ("h200-sxm", r"\bH200\b"),
    ("h800", r"\bH800\b"),
    ("a100-80gb", r"\bA100\b.*\b80GB\b"),
    ("a800", r"\bA800\b"),
    ("l40s", r"\bL40S\b"),
    ("b200", r"\bB200\b"),
    ("rtx-4090", r"\bRTX 4090\b(?! D)"),
)
"""Catalog GPU, and a pattern of the name that its driver reports."""
FAMILIES = tuple(dict.fromkeys(name.split("-")[0] for name, _ in NAMES))


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """The first GPU: the driver's name for it, the CUDA version that the driver speaks, its data sheet if known."""

    device: str
    driver: str
    spec: GpuSpec | None


def catalog_name(device: str) -> str | None:
    """Find the catalog's GPU for the name that a driver reports."""
    return next((name for name, pattern in NAMES if re.search(pattern, device)), None)


def check_wanted(wanted: str) -> None:
    """Raise ProbeError unless ``wanted`` is ``auto``, ``cpu``, a catalog GPU or a family of them (h100)."""
    known = ("auto", "cpu", *FAMILIES, *(name for name, _ in NAMES if name not in FAMILIES))
    if wanted not in known:
        raise ProbeError(f"--gpu {wanted}: unknown; choose one of {', '.join(known)}")


def find_gpu(wanted: str) -> FoundGpu:
    """Find the GPU of this machine. Raises ProbeError when there is none, or another one than ``wanted``."""
    try:
        driver = load_driver()
        device, version = driver.device_name(0), driver.version()
    except DriverError as error:
        raise ProbeError(
            f"--gpu {wanted}: no GPU was found on this machine ({error}); --gpu cpu measures the processor instead"
        ) from None
    name = catalog_name(device)
    if wanted not in ("auto", name, name.split("-")[0] if name else name):
        raise ProbeError(f"--gpu {wanted}: this machine has a {device}; name that one, or give --gpu auto")
    return FoundGpu(device, f"CUDA {version}", gpu(name) if name else None)


MPS = "nvidia-cuda-mps-control"
Environment = tuple[tuple[str, str], ...]


def _control(environment: Environment, *arguments: str, command: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MPS, *arguments],
        input=command,
        env=os.environ | dict(environment),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def start_mps() -> Environment:
    """Start the MPS daemon. Return the environment that makes a process use it. Raises Unavailable when it does not start."""
    if shutil.which(MPS) is None:
        raise Unavailable(f"{MPS} is not installed")
    folder = tempfile.mkdtemp(prefix="fineserve-mps-")
    environment = (("CUDA_MPS_PIPE_DIRECTORY", folder), ("CUDA_MPS_LOG_DIRECTORY", folder))
    started = _control(environment, "-d")
    if started.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        raise Unavailable(f"{MPS} does not start: {started.stderr.strip()[:200]}")
    return environment


def stop_mps(environment: Environment) -> None:
    """End the MPS daemon and remove its folder."""
    _control(environment, command="quit\n")
    shutil.rmtree(dict(environment)["CUDA_MPS_PIPE_DIRECTORY"], ignore_errors=True)
