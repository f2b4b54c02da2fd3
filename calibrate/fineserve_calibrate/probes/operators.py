"""The functions that prepare the points of an operator, and the real backend that calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fineserve_calibrate.probes import attention, engine_points, kernels, transfers
from fineserve_calibrate.probes.schema import Point, Prepared
from fineserve_calibrate.probes.torch_device import TorchDevice

PREPARE: Mapping[str, Callable[[TorchDevice, Point], Prepared]] = MappingProxyType(
    {
        "gemm": kernels.gemm,
        "int4_gemm": kernels.int4_gemm,
        "elementwise": kernels.elementwise,
        "prefill_attention": attention.prefill,
        "decode_attention": attention.decode,
        "kv_layout": attention.kv_layout,
        "streams": kernels.streams,
        "copy": transfers.copy,
        "weight_load": transfers.weight_load,
        "all_reduce": transfers.all_reduce,
        "point_to_point": transfers.point_to_point,
        "vmm": transfers.vmm,
        "engine_start": engine_points.engine_start,
        "host_overhead": engine_points.host_overhead,
        "step": engine_points.step,
        "contention": engine_points.contention,
    }
)


class TorchBackend(TorchDevice):
    """A torch device under test."""

    def prepare(self, operator: str, point: Point) -> Prepared:
        """See ``Backend.prepare``."""
        return PREPARE[operator](self, point)
