"""The few calls of the CUDA driver library that probes need: names, and the virtual memory management (VMM) calls.

Layouts and constants are those of ``cuda.h`` (CUDA driver API, section 6.14, virtual memory management).
"""

from __future__ import annotations

import ctypes
from typing import Any

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3


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
    """libcuda. Raises DriverError when a call does not succeed."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("cuInit", ctypes.c_uint(0))
        location = _Location(_DEVICE, 0)
        self._properties = _Properties(_PINNED, 0, location, None, _Flags())
        self._access = _Access(location, _READ_WRITE)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {text.value.decode() if text.value else code}")

    def device_name(self, ordinal: int) -> str:
        """The name that the driver reports."""
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, ctypes.c_int(256), ctypes.c_int(ordinal))
        return text.value.decode()

    def version(self) -> str:
        """The newest CUDA version that the driver speaks."""
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def granularity_bytes(self) -> int:
        """The smallest handle; sizes are multiples of it."""
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), ctypes.c_int(0))
        return size.value

    def reserve(self, size_bytes: int) -> int:
        """A range of addresses."""
        address = ctypes.c_uint64()
        size, zero = ctypes.c_size_t(size_bytes), ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, zero, ctypes.c_uint64(0), ctypes.c_uint64(0))
        return address.value

    def free(self, address: int, size_bytes: int) -> None:
        """Give a reserved range back."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size_bytes))

    def create(self, size_bytes: int) -> int:
        """A handle of physical memory."""
        handle = ctypes.c_uint64()
        size, properties = ctypes.c_size_t(size_bytes), ctypes.byref(self._properties)
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


def load() -> Driver:
    """The driver of this machine. Raises DriverError when there is no NVIDIA driver, or no GPU."""
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
