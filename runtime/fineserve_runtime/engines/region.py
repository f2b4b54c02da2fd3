"""The bytes of one device that engines share: KV slabs, and weights when they live there too.

On a CPU the region is a file in shared memory that every process maps. On a GPU it is one allocation of the host process,
opened by the others through CUDA IPC (torch_region.py). The host holds ``<name>.lock`` as long as it lives; the kernel drops
it with the process. So a second host is refused while the first lives. Files whose lock is free are what a crash left, and are
replaced. Processes of the crashed host that linger keep writing into the old, unlinked file.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fineserve_runtime.engines.table import RegionError, private_file


@dataclass(frozen=True, slots=True)
class RegionPaths:
    """The files of the region called ``name``."""

    directory: Path
    name: str

    def _file(self, suffix: str) -> Path:
        return self.directory / f"fineserve-{self.name}.{suffix}"

    @property
    def bytes_file(self) -> Path:
        return self._file("kv")

    @property
    def table(self) -> Path:
        return self._file("table")

    @property
    def lock(self) -> Path:
        return self._file("lock")


class Region(Protocol):
    """Bytes that can be filled and copied; engines see them as tensors (torch_region.py)."""

    @property
    def size_bytes(self) -> int: ...

    def fill(self, offset: int, length: int, byte: int) -> None: ...

    def read(self, offset: int, length: int) -> bytes: ...

    def write(self, offset: int, data: bytes) -> None: ...

    def close(self) -> None: ...


class CpuRegion:
    """A mapped file. Raises RegionError when it is missing."""

    def __init__(self, path: Path) -> None:
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise RegionError(f"no region at {path}: {error.strerror}") from None
        try:
            self._map = mmap.mmap(file, 0)
        finally:
            os.close(file)
        self.array: npt.NDArray[np.int8] = np.frombuffer(self._map, dtype=np.int8)

    @classmethod
    def create(cls, path: Path, size_bytes: int) -> CpuRegion:
        """A region of zeros, in place of any former one. Pages are taken from memory when first written."""
        with private_file(path) as file:
            file.truncate(size_bytes)
        return cls(path)

    @property
    def size_bytes(self) -> int:
        return self.array.size

    def fill(self, offset: int, length: int, byte: int) -> None:
        self.array.view(np.uint8)[offset : offset + length] = byte

    def read(self, offset: int, length: int) -> bytes:
        return self.array[offset : offset + length].tobytes()

    def write(self, offset: int, data: bytes) -> None:
        self.array[offset : offset + len(data)] = np.frombuffer(data, dtype=np.int8)

    def close(self) -> None:
        """Detach this object; the mapping goes when the last tensor over it does."""
        self.array = np.empty(0, dtype=np.int8)


def holder(paths: RegionPaths) -> int | None:
    """The process id of the server that holds the region. None: no server does, and a crash left its files."""
    try:
        file = os.open(paths.lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.read(file, 32) or 0)
    finally:
        os.close(file)
    return None


class RegionLock:
    """Held by the one host of a region. Raises RegionError when another host holds it.

    ``stale`` tells whether files of a host that did not clean up lay there; they are removed.
    """

    def __init__(self, paths: RegionPaths) -> None:
        self._paths = paths
        self._file = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 32).decode() or "unknown"
            os.close(self._file)
            raise RegionError(
                f"region {paths.name!r} is in use by the server with process id {holder}; "
                "stop it or choose another region_name"
            ) from None
        self.stale = paths.table.exists() or paths.bytes_file.exists()
        self._remove_files()
        os.truncate(self._file, 0)
        os.write(self._file, str(os.getpid()).encode())

    def release(self) -> None:
        """Remove the region's files and let go. The lock's own file stays: removing it would let two hosts hold it."""
        self._remove_files()
        os.truncate(self._file, 0)
        os.close(self._file)

    def _remove_files(self) -> None:
        for path in (self._paths.bytes_file, self._paths.table):
            path.unlink(missing_ok=True)
