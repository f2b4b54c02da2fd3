"""The memory of every GPU: claims of engines, bytes set aside for KV, and free bytes.

    usable = claims + pool + free

An engine *claims* all that it takes beside KV on each of its GPUs: weights, context, captured graphs and the activations of
a full step. A *pool* is the KV memory that is set aside on a GPU, for one engine or several. Memory that engines draw page by
page from what claims leave (kvcached in a fleet) is no pool.

Placements, composed clusters, fleets and reports ask one ledger, so that none of them sells a byte twice. It never goes below
zero: more than is free cannot be claimed or set aside (ValueError). FineServe's footprint F_M is a score, and never a budget.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from fineserve_sim.policy.interfaces import GpuSlot


class MemoryLedger:
    """Bytes by GPU; ``usable_bytes`` are all that there are. An engine has one claim, of so many bytes on each of its GPUs."""

    def __init__(self, usable_bytes: Mapping[int, int]) -> None:
        self.usable_bytes = dict(usable_bytes)
        self._left_bytes = dict(usable_bytes)  # usable less claims
        self._pool_bytes = dict.fromkeys(usable_bytes, 0)
        self._claims: dict[Hashable, tuple[tuple[int, ...], int]] = {}

    @classmethod
    def of(cls, gpus: Iterable[GpuSlot]) -> MemoryLedger:
        """A ledger of empty GPUs."""
        return cls({gpu.id: gpu.memory_bytes for gpu in gpus})

    def left_bytes(self, gpu: int) -> int:
        """What claims leave for KV."""
        return self._left_bytes[gpu]

    def free_bytes(self, gpu: int) -> int:
        """What claims and the pool leave."""
        return self._left_bytes[gpu] - self._pool_bytes[gpu]

    def has_room(self, gpus: Iterable[int], claim_bytes: int) -> bool:
        """Whether the claim fits on each of these GPUs and leaves some memory for KV: without, vLLM starts no engine."""
        return all(self.free_bytes(gpu) > claim_bytes for gpu in gpus)

    def claim(self, engine: Hashable, gpus: Iterable[int], claim_bytes: int) -> None:
        """The engine takes so much of each GPU. ValueError if one has not as much, or the engine has a claim; then nothing is
        taken."""
        gpus = tuple(gpus)
        if engine in self._claims:
            raise ValueError(f"memory: engine {engine} claims twice")
        for gpu in gpus:
            if claim_bytes > self.free_bytes(gpu):
                raise ValueError(
                    f"GPU {gpu} has {_gib(self.usable_bytes[gpu])}, of which {_gib(self.free_bytes(gpu))} are free: "
                    f"an engine of {_gib(claim_bytes)} does not fit"
                )
        self._claims[engine] = gpus, claim_bytes
        for gpu in gpus:
            self._left_bytes[gpu] -= claim_bytes

    def release(self, engine: Hashable) -> tuple[int, ...]:
        """The engine's claim ends. Returns its GPUs."""
        gpus, claim_bytes = self._claims.pop(engine)
        for gpu in gpus:
            self._left_bytes[gpu] += claim_bytes
        return gpus

    def set_pool(self, gpu: int, pool_bytes: int) -> None:
        """So much of the GPU is set aside for KV from now on. ValueError if claims leave less."""
        if not 0 <= pool_bytes <= self._left_bytes[gpu]:
            raise ValueError(
                f"GPU {gpu} is to set {_gib(pool_bytes)} aside for KV, but engines leave {_gib(self._left_bytes[gpu])}"
            )
        self._pool_bytes[gpu] = pool_bytes


def _gib(bytes: int) -> str:
    return f"{bytes / 2**30:.1f} GiB"
