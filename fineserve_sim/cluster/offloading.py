"""The setting of engines that keep KV of prefixes in host memory, too (``engine/offload.py``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVOffloading:
    """A prefix cache in host memory, below the GPU cache of each engine that keeps prefixes, as vLLM's
    ``--kv-offloading-size``.

    ``size_gib``: of each engine, over all its GPUs; 0: none. ``bytes_per_s``: of each GPU's host link, one way, in place of its
    PCIe rate. ``store_s_per_gib``: seconds that copying to the host adds to steps, for each GiB of KV that they compute.
    """

    size_gib: float
    bytes_per_s: float | None = None
    store_s_per_gib: float = 0.0
