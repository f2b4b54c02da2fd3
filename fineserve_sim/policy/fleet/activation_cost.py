"""How long it takes until an activated model serves (Prism, section 5.2 and Fig. 9).

Weights come from host memory. A plain copy to one GPU runs far below what its PCIe link could do. Prism loads a shard over
all GPUs of the node at once, each staging a part and passing it on over NVLink; the host memory of the node then sets
the limit. From the latencies that the paper reports for BF16 weights follow the three rates below:

    8B on one GPU in 0.7 s, 14B in 1.3 s:   29.5 GB / 1.3 s  = 22.7 GB/s to one GPU
    70B on eight GPUs in 1.5 s:             141 GB / 1.5 s   = 94 GB/s over the node
    14B by plain copy in 7.1 s:             29.5 GB / 7.1 s  = 4.2 GB/s to one GPU

Tensor-parallel ranks load at the same time with or without parallel loading. Activations that overlap on a node share its
rate; a GPU that receives two shards shares its own. Without an engine pool a new engine starts before it loads.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU_BYTES_PER_S = 22.7e9
NODE_BYTES_PER_S = 94e9
PLAIN_BYTES_PER_S = 4.2e9
SWITCH_S = 0.02  # an engine from the pool, its address space aligned; our assumption, the paper has no figure
ENGINE_START_S = 30.0  # Prism: "tens of seconds"; our reading, the same as QLM's swap (systems.md 6.4)


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """Seconds from ``Activate`` to ``EngineReady``: ``overhead_s`` of engine work, then the transfer of the weights at no more
    than these rates, which may be infinite (then the overhead is all)."""

    overhead_s: float
    gpu_bytes_per_s: float
    node_bytes_per_s: float

    def alone_s(self, shard_bytes: int, ranks: int = 1) -> float:
        """A model of ``ranks`` shards that loads with nobody beside it on its node."""
        return self.overhead_s + max(shard_bytes / self.gpu_bytes_per_s, ranks * shard_bytes / self.node_bytes_per_s)


def activation_cost(
    *, engine_pool: bool = True, parallel_loading: bool = True, engine_start_s: float = ENGINE_START_S
) -> ActivationCost:
    """The cost with Prism's two optimisations switched on or off."""
    overhead_s = SWITCH_S + (0.0 if engine_pool else engine_start_s)
    return ActivationCost(overhead_s, GPU_BYTES_PER_S if parallel_loading else PLAIN_BYTES_PER_S, NODE_BYTES_PER_S)
