"""Memory that one process exports and another opens: by CUDA IPC, as the runtime does, and as VMM handles.

Each process writes a byte that the other one must see. Handles that are left open end with the process.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from tempfile import TemporaryDirectory

from fineserve_calibrate.probes.nvidia import Driver, load_driver

from fineserve_evidence.campaign.shapes.second import heard, second, used_bytes

REGION_BYTES = 2**30
PAGE_BYTES, PAGES = 2**21, 32
OURS, ITS = 0x5A, 0xA5
"""The bytes that the first and the second process write."""


def has_context() -> None:
    """Make this process's context on the GPU."""
    import torch

    torch.ones(1, device="cuda")
    torch.cuda.synchronize()


def ipc() -> dict[str, float]:
    """Measure the runtime's region: seconds to make and to open it, bytes that the second process takes before and after."""
    from fineserve_runtime.engines.torch_region import CudaRegion

    has_context()
    with TemporaryDirectory() as folder:
        path, begun_s = Path(folder) / "region", time.perf_counter()
        region = CudaRegion.create(path, REGION_BYTES)
        make_s = time.perf_counter() - begun_s
        region.fill(0, REGION_BYTES, OURS)
        before = used_bytes()
        with second(open_region, path) as pipe:
            heard(pipe)
            with_context = used_bytes()
            pipe.send(True)
            found = heard(pipe)
            sizes = {"context_bytes": with_context - before, "opened_bytes": used_bytes() - with_context}
            seen = region.read(REGION_BYTES - 1, 1) == bytes([ITS])
    found |= {"make_s": make_s, **sizes, "its_byte_is_here": seen}
    return {name: float(value) for name, value in found.items()}


def open_region(pipe: Connection, path: Path) -> None:
    """Open the region in the second process, once the first has counted its context."""
    from fineserve_runtime.engines.torch_region import CudaRegion

    has_context()
    pipe.send(True)
    pipe.recv()
    begun_s = time.perf_counter()
    region = CudaRegion(path)
    open_s, seen = time.perf_counter() - begun_s, region.read(0, 1)
    region.write(REGION_BYTES - 1, bytes([ITS]))
    pipe.send({"open_s": open_s, "our_byte_is_there": seen == bytes([OURS])})
    pipe.recv()


def pages() -> dict[str, float]:
    """Measure VMM handles: seconds a page to export, import, and map it in the second process."""
    has_context()
    driver = load_driver()
    with second(map_pages) as pipe:
        pid = heard(pipe)
        handles = [driver.create(PAGE_BYTES, shareable=True) for _ in range(PAGES)]
        address = mapped(driver, handles)
        fill(driver, address, OURS)
        begun_s = time.perf_counter()
        files = [driver.export(handle) for handle in handles]
        export_s = (time.perf_counter() - begun_s) / PAGES
        for file in files:
            send_handle(pipe, file, pid)
            os.close(file)
        found = heard(pipe)
        seen = driver.read(address + PAGES * PAGE_BYTES - 1, 1) == bytes([ITS])
    found |= {"export_s": export_s, "its_byte_is_here": seen}
    return {name: float(value) for name, value in found.items()}


def mapped(driver: Driver, handles: list[int]) -> int:
    """Map handles of a page each behind one another. Return the first address."""
    address = driver.reserve(len(handles) * PAGE_BYTES)
    for place, handle in enumerate(handles):
        driver.map(address + place * PAGE_BYTES, PAGE_BYTES, handle)
        driver.set_access(address + place * PAGE_BYTES, PAGE_BYTES)
    return address


def fill(driver: Driver, address: int, byte: int) -> None:
    """Fill all pages, and wait until the other process can see it."""
    driver.fill(address, PAGES * PAGE_BYTES, byte)
    driver.read(address, 1)  # the driver copies after it has filled


def map_pages(pipe: Connection) -> None:
    """Import and map the pages in the second process."""
    has_context()
    driver = load_driver()
    pipe.send(os.getpid())
    files = [recv_handle(pipe) for _ in range(PAGES)]
    begun_s = time.perf_counter()
    handles = [driver.imported(file) for file in files]
    imported_s = time.perf_counter()
    address = mapped(driver, handles)
    mapped_s = time.perf_counter()
    seen = driver.read(address, 1)
    fill(driver, address, ITS)
    each = {"import_s": (imported_s - begun_s) / PAGES, "map_s": (mapped_s - imported_s) / PAGES}
    pipe.send({**each, "our_byte_is_there": seen == bytes([OURS])})
    pipe.recv()
