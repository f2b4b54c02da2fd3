"""What does it cost to map a page of KV memory and to unmap it, on this machine? As kvcached and vTensor have it, on a CPU.

    python benchmarks/page_costs.py [--page-bytes N] [--tensors N ...] [--rounds N]

A page has ``--page-bytes`` in each of ``--tensors``: K and V of each layer. It is mapped by a call a tensor, or by one call
where its parts are neighbours in the region. A first round, which takes the region's memory from the system, is told apart.
Each figure is a median over rounds of processor time, with the 10th and 90th percentile. The calls never wait, so a busy
machine only stretches them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

from fineserve_runtime.engines.pages import AddressSpace
from fineserve_runtime.engines.region import CpuRegion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-bytes", type=int, default=2 * 2**20)
    parser.add_argument("--tensors", type=int, nargs="+", default=[8, 56, 64])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print("microseconds of processor time a page: median (tenth, ninth tenth)")
    for tensors in options.tensors:
        for batched in (False, True):
            first_us, map_us, unmap_us = measure(options.page_bytes, tensors, options.rounds, batched=batched)
            how = "one call" if batched else f"{tensors} calls"
            print(
                f"{tensors} tensors of {options.page_bytes} bytes, {how}: first map {first_us:.0f}, "
                f"map {spread(map_us)}, unmap {spread(unmap_us)}"
            )


def measure(page_bytes: int, tensors: int, rounds: int, *, batched: bool) -> tuple[float, list[float], list[float]]:
    """Microseconds of the first map, of each later one, and of each unmap."""
    slabs = range(tensors)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        CpuRegion.create(Path(folder, "bytes"), tensors * page_bytes).close()
        space = AddressSpace(Path(folder, "bytes"), page_bytes, tensors, 2)
        map_us, unmap_us = [], []
        for _ in range(rounds + 1):
            map_us.append(timed_us(lambda: space.map(1, slabs, batched=batched)))
            space.fill(1, 1)
            unmap_us.append(timed_us(lambda: space.unmap(1, batched=batched)))
    return map_us[0], map_us[1:], unmap_us[1:]


def timed_us(work: Callable[[], None]) -> float:
    begun_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - begun_ns) / 1000


def spread(values: list[float]) -> str:
    tenths = quantiles(values, n=10)
    return f"{tenths[4]:.0f} ({tenths[0]:.0f}, {tenths[8]:.0f})"


if __name__ == "__main__":
    main()
