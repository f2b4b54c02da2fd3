"""The bytes of every GPU whose engines come and go: what engines take beside KV, and the KV memory in the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fineserve_sim.policy.memory.kvcached import KvCachedManager, VirtualKV
from fineserve_sim.policy.memory.paged import GpuMemory, PrivatePools


class FleetMemory:
    """``managers`` by GPU serve the engines that are there from the start, which leave ``left_bytes`` for KV.

    Under kvcached the limit is what the engines leave. An engine of private pools that comes later gets what is free then:
    neither weights nor pools of others.
    """

    def __init__(self, left_bytes: Mapping[int, int], managers: Mapping[int, GpuMemory]) -> None:
        self.managers = dict(managers)
        self._left_bytes = dict(left_bytes)

    def take(self, gpus: Iterable[int], fixed_bytes: int, now: float) -> None:
        """An engine, loading or loaded, takes so much of each GPU beside KV; negative: it gives that back."""
        for gpu in gpus:
            self._left_bytes[gpu] -= fixed_bytes
            manager = self.managers[gpu]
            if isinstance(manager, KvCachedManager):
                manager.advance(now)
                manager.set_limit(max(0, self._left_bytes[gpu]))

    def join(self, engine: int, gpus: Iterable[int], block: VirtualKV | int, now: float) -> None:
        """A loaded engine may hold KV from now on, in blocks of so many bytes or in such tensors."""
        for gpu in gpus:
            manager = self.managers[gpu]
            if isinstance(manager, KvCachedManager):
                assert isinstance(block, VirtualKV)
                manager.advance(now)
                manager.join(engine, block)
            else:
                assert isinstance(manager, PrivatePools) and isinstance(block, int)
                manager.join(engine, block, max(0, self._left_bytes[gpu] - manager.ledger().total_bytes))

    def leave(self, engine: int, gpus: Iterable[int], now: float) -> None:
        """An engine that holds no KV any more goes."""
        for gpu in gpus:
            manager = self.managers[gpu]
            assert isinstance(manager, KvCachedManager | PrivatePools)
            if isinstance(manager, KvCachedManager):
                manager.advance(now)
            manager.leave(engine)

    def free_bytes(self, serving: Mapping[int, Iterable[int]]) -> dict[int, int]:
        """By GPU, what the weights of another engine could take now. ``serving`` are the GPUs of the engines with requests:
        others hold no KV."""
        free = dict(self._left_bytes)
        for engine, gpus in serving.items():
            for gpu in gpus:
                free[gpu] -= self.held_bytes(engine, gpu)
        for gpu, manager in self.managers.items():
            if isinstance(manager, PrivatePools):
                free[gpu] -= manager.ledger().total_bytes
        return free

    def held_bytes(self, engine: int, gpu: int) -> int:
        """KV memory that only this engine can use, as long as it holds it. What is in private pools is not free anyway."""
        manager = self.managers[gpu]
        return manager.block_bytes_held(engine) if isinstance(manager, KvCachedManager) else 0

    def check(self) -> None:
        """Raise AssertionError if more is taken than there is."""
        for gpu, left_bytes in self._left_bytes.items():
            manager = self.managers[gpu]
            manager.check()
            pools_bytes = manager.ledger().total_bytes if isinstance(manager, PrivatePools) else 0
            assert pools_bytes <= left_bytes, f"GPU {gpu}: pools of {pools_bytes} bytes, engines leave {left_bytes}"
