"""A region as torch sees it: one flat int8 tensor that KV caches and weights are views of.

On a GPU the host process allocates it by plain ``torch.zeros``, since the default allocator's memory can be exported. It
writes the CUDA IPC handle into the region's file, and engine processes open the handle. The exporter must outlive them, which
the host does.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from fineserve_runtime.engines.region import CpuRegion
from fineserve_runtime.engines.table import RegionError, private_file

_exported: dict[Path, torch.Tensor] = {}
"""CUDA allocations of this process: it may not open its own handles."""


class CudaRegion:
    """One allocation of the host's GPU, shared by CUDA IPC. Raises RegionError when it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.tensor = _exported[path] if path in _exported else _open_handle(path)

    @classmethod
    def create(cls, path: Path, size_bytes: int, device: str = "cuda:0") -> CudaRegion:
        from torch.multiprocessing.reductions import reduce_tensor

        try:
            tensor = torch.zeros(size_bytes, dtype=torch.int8, device=device)
            rebuild, arguments = reduce_tensor(tensor)
        except (RuntimeError, AssertionError) as error:  # no driver, no device, no memory; AssertionError: a CPU build
            raise RegionError(f"no region of {size_bytes} bytes on {device}: {error}") from None
        with private_file(path) as file:
            file.write(pickle.dumps((rebuild, arguments)))
        _exported[path] = tensor
        return cls(path)

    @property
    def size_bytes(self) -> int:
        return int(self.tensor.numel())

    def fill(self, offset: int, length: int, byte: int) -> None:
        """Ordered with this process's work on the current stream only: wait for it before others may look."""
        self.tensor[offset : offset + length].view(torch.uint8).fill_(byte)
        torch.cuda.current_stream().synchronize()

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.tensor[offset : offset + length].cpu().numpy().tobytes())

    def write(self, offset: int, data: bytes) -> None:
        """Ordered as ``fill``."""
        self.tensor[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.int8)
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        for path, tensor in list(_exported.items()):
            if tensor is self.tensor:
                del _exported[path]
        self.tensor = torch.empty(0, dtype=torch.int8)


def _open_handle(path: Path) -> torch.Tensor:
    try:
        rebuild, arguments = pickle.loads(path.read_bytes())
        tensor: torch.Tensor = rebuild(*arguments)
    except (OSError, RuntimeError) as error:
        raise RegionError(f"cannot open the GPU region at {path}: {error}") from None
    return tensor


def open_region(path: Path, device: str) -> tuple[Any, torch.Tensor]:
    """The region of this kind of device (``cpu`` or ``cuda``) and its bytes as an int8 tensor."""
    if device == "cuda":
        shared = CudaRegion(path)
        return shared, shared.tensor
    region = CpuRegion(path)
    return region, torch.from_numpy(region.array)
