"""The operators that probes measure, with the columns of their tables, and the interface of a device.

``fineserve_calibrate.tables`` says what the columns of ``gemm``, ``prefill_attention``, ``decode_attention`` and ``all_reduce``
mean. Measuring does without that module, which needs pyarrow. Every table also has the columns of ``MEASURED``.

================== =========================================================================================
operator           columns; ``latency_s`` is the time of ...
================== =========================================================================================
elementwise        operation (rms_norm, add_rms_norm, rope, silu_and_mul, greedy, random), dtype, tokens, width
                   (elements a token reads): one call
int4_gemm          kernel (machete, marlin), m, n, k: one product by 4-bit weights
kv_layout          layout (of the KV cache: the order of its axes, see ``attention``), kv_dtype, q_heads, kv_heads,
                   head_dim, batch, context: decode attention of one of 32 layers
streams            kernel (compute, memory), neighbour (compute, memory, none): one product while the neighbour's run on
                   another stream
point_to_point     message_bytes: a copy from one GPU to another
copy               direction (host_to_device, device_to_host, host_to_host), host_memory (pinned, pageable), bytes:
                   one copy
vmm                call (create, map, set_access, unmap, release), bytes (of a handle), count (handles), load (idle,
                   kernel): one driver call, the mean of ``count`` in a row
weight_load        bytes: a safetensors file, in the page cache, to tensors on the device
engine_start       model, dtype, mode, phase (import: Python and vLLM; start: the engine, random weights): one phase
host_overhead      mode, decodes: a step of an engine whose model is too small to take time (one layer)
step               model, dtype, kv_dtype, mode (eager, graphs), decodes, context (cached tokens of each decode),
                   prefill_tokens (of one prompt chunk), cached_tokens (its prefix): one step of a vLLM engine
contention         sharing (time_slicing, mps), model, dtype, neighbour (dtype of the other engine, none: alone),
                   decodes, context, prefill_tokens, neighbour_decodes, neighbour_prefill_tokens: one step of the first
                   engine while the other runs its own steps
================== =========================================================================================

A ``Backend`` is a device under test: torch on CUDA or on the CPU (``operators``), or a simulated one in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from fineserve_sim.catalog import GpuSpec

Value = str | int
Point = Mapping[str, Value]
"""A measurement to make: the operator's key columns."""

LATENCY = "latency_s"
MEASURED = ("latency_s", "spread", "repeats", "implementation")
"""Median seconds; interquartile range / median; measurements; the kernel or engine that ran."""

_HEADS = ("dtype", "kv_dtype", "q_heads", "kv_heads", "head_dim", "batch")
_COMPOSITION = ("decodes", "context", "prefill_tokens")
KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gemm": ("dtype", "m", "n", "k"),
        "prefill_attention": (*_HEADS, "new_tokens", "cached_tokens"),
        "decode_attention": (*_HEADS, "context"),
        "all_reduce": ("dtype", "gpus", "message_bytes"),
        "int4_gemm": ("kernel", "m", "n", "k"),
        "kv_layout": ("layout", *_HEADS[1:], "context"),
        "streams": ("kernel", "neighbour"),
        "elementwise": ("operation", "dtype", "tokens", "width"),
        "point_to_point": ("message_bytes",),
        "copy": ("direction", "host_memory", "bytes"),
        "vmm": ("call", "bytes", "count", "load"),
        "weight_load": ("bytes",),
        "engine_start": ("model", "dtype", "mode", "phase"),
        "host_overhead": ("mode", "decodes"),
        "step": ("model", "dtype", "kv_dtype", "mode", *_COMPOSITION, "cached_tokens"),
        "contention": (
            *("sharing", "model", "dtype", "neighbour"),
            *(*_COMPOSITION, "neighbour_decodes", "neighbour_prefill_tokens"),
        ),
    }
)


class ProbeError(ValueError):
    """Probing cannot start or go on. The text is one line: what was wrong, where, what would be right."""


class Unavailable(Exception):
    """A point cannot be measured here. The text is the reason, for the report."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Device and software of a measurement. Finished parts are kept while it stays the same.

    ``device`` is the name that the driver reports, ``gpus`` the number of GPUs. ``vllm`` is ``none`` where it is missing.
    """

    device: str
    gpus: int
    driver: str
    cuda: str
    torch: str
    vllm: str


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Prepared:
    """A point that is ready to run. ``sample(n)`` measures it n times and returns n positive seconds."""

    sample: Callable[[int], list[float]]
    implementation: str
    close: Callable[[], None] = _nothing


class Backend(Protocol):
    """A device under test."""

    identity: Identity
    spec: GpuSpec | None
    """The data sheet; None for a device that the catalog lacks."""

    def prepare(self, operator: str, point: Point) -> Prepared:
        """Allocate what the point needs. Raises Unavailable, or an error of the libraries."""

    def now_s(self) -> float:
        """Read a clock that only grows."""

    def clocks(self) -> str:
        """Tell the clock rates seen now, in words."""

    def healthy(self) -> bool:
        """Say whether the device still works after an error."""

    def close(self) -> None:
        """Give back processes and memory that points shared. Probing is over."""
