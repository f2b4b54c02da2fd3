"""Two kernels at once on two streams of one process: how much a product slows beside another one.

What limits the pair is the SMs, the memory, or neither: a product of many rows needs the tensor cores, one of few rows the
memory. Two engines share a GPU by time slices or MPS (``contention``); streams show what the kernels alone do to each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fineserve_calibrate.probes.backend import Prepared, Unavailable
from fineserve_calibrate.probes.schema import Point

if TYPE_CHECKING:
    from fineserve_calibrate.probes.torch_device import Call, TorchDevice

ROWS = {"compute": 4096, "memory": 8}
WIDTH = 8192
CALLS = {"compute": 2, "memory": 16}
"""Products in a graph: about a millisecond on a large GPU."""
LONGER = 8  # how much longer the neighbour is at work


def _graph(device: TorchDevice, kernel: str, calls: int) -> Any:
    """Products in a captured graph, by weights that no cache holds."""
    rows, torch = ROWS[kernel], device.torch
    x = device.random(rows, WIDTH)
    weights = [device.random(WIDTH, WIDTH) for _ in range(device.buffers(2.0 * WIDTH * WIDTH))]
    out = torch.empty(rows, WIDTH, device=device.name, dtype=x.dtype)

    def product(weight: Any) -> Call:
        return lambda: torch.mm(x, weight, out=out)

    products = [product(weight) for weight in weights]
    for run in products:
        run()
    device.synchronize()
    return device.captured([products[place % len(products)] for place in range(calls)])


def streams(device: TorchDevice, point: Point) -> Prepared:
    """One product while its neighbour's run on another stream; ``none``: alone. Raises Unavailable on the CPU."""
    if device.on_cpu:
        raise Unavailable("streams are a GPU's")
    kernel, neighbour = str(point["kernel"]), str(point["neighbour"])
    mine = _graph(device, kernel, CALLS[kernel])
    theirs = _graph(device, neighbour, LONGER * CALLS[neighbour]) if neighbour != "none" else None
    cuda, other = device.torch.cuda, device.torch.cuda.Stream()

    def once() -> float:
        start, end, done = (cuda.Event(enable_timing=True) for _ in range(3))
        if theirs is not None:
            with cuda.stream(other):
                theirs.replay()
                done.record(other)
        start.record()
        mine.replay()
        end.record()
        end.synchronize()
        if theirs is not None and done.query():
            raise Unavailable("the neighbour ended first")
        device.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / CALLS[kernel]

    return Prepared(lambda count: [once() for _ in range(count)], "torch mm")
