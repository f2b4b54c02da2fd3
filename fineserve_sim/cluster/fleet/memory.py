"""The memory of GPUs whose engines come and go: what engines claim, and the KV memory in the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.policy.memory.kvcached import KvCachedManager, VirtualKV
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.memory.paged import GpuMemory, PrivatePools


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """The bytes that an engine of a model takes of each of its GPUs: weights to load, its process (context, captured graphs),
    all bytes beside KV, its KV block (bytes, or the tensors of virtual memory). ``context_tokens`` bounds a sequence."""

    weight_bytes: int
    process_bytes: int
    fixed_bytes: int
    block: VirtualKV | int
    context_tokens: int


class FleetMemory:
    """The memory of every GPU while engines come and go: their claims in ``ledger``, and ``managers`` of the KV memory in the
    rest, by GPU. Pages of kvcached take what claims leave, so they are no pool of the ledger. When an engine of private pools
    comes later, the free bytes are for it and for the loading engines: ``divide`` splits so many bytes among engines, with
    their models."""

    def __init__(
        self,
        ledger: MemoryLedger,
        managers: Mapping[int, GpuMemory],
        divide: Callable[[int, Mapping[int, str]], PrivatePools],
    ) -> None:
        self.managers = dict(managers)
        self._ledger = ledger
        self._divide = divide
        self._loading: dict[int, dict[int, str]] = {gpu: {} for gpu in managers}  # the models of engines, by GPU
        for gpu in self.managers:
            self._set_pool(gpu)

    def expect(self, engine: int, model: str, gpus: Iterable[int]) -> None:
        """The engine loads."""
        for gpu in gpus:
            self._loading[gpu][engine] = model

    def give_up(self, engine: int, gpus: Iterable[int]) -> None:
        """The engine loads no more."""
        for gpu in gpus:
            del self._loading[gpu][engine]

    def claim(self, engine: int, gpus: Iterable[int], claim_bytes: int, now: float) -> None:
        """An engine that begins to load, or falls asleep, takes so much of each GPU."""
        self._ledger.claim(engine, gpus, claim_bytes)
        self._set_limits(gpus, now)

    def release(self, engine: int, now: float) -> None:
        """An engine, loading, loaded or asleep, gives back its claims."""
        self._set_limits(self._ledger.release(engine), now)

    def _set_limits(self, gpus: Iterable[int], now: float) -> None:
        for gpu in gpus:
            manager = self.managers[gpu]
            if isinstance(manager, KvCachedManager):
                manager.advance(now)
                manager.set_limit(self._ledger.left_bytes(gpu))

    def _set_pool(self, gpu: int) -> None:
        manager = self.managers[gpu]
        self._ledger.set_pool(gpu, manager.ledger().total_bytes if isinstance(manager, PrivatePools) else 0)

    def join(self, engine: int, gpus: Sequence[int], block: VirtualKV | int, now: float) -> None:
        """A loaded engine may hold KV from now on, in blocks of so many bytes or in such tensors."""
        for gpu in gpus:
            manager = self.managers[gpu]
            if isinstance(manager, KvCachedManager):
                assert isinstance(block, VirtualKV)
                manager.advance(now)
                manager.join(engine, block)
            else:
                assert isinstance(manager, PrivatePools) and isinstance(block, int)
                parts = self._divide(self._ledger.free_bytes(gpu), self._loading[gpu])
                manager.join(engine, block, parts.pool(engine).memory.limit_bytes)
                self._set_pool(gpu)
        self.give_up(engine, gpus)

    def leave(self, engine: int, gpus: Iterable[int], now: float) -> None:
        """An engine that holds no KV any more goes."""
        for gpu in gpus:
            manager = self.managers[gpu]
            assert isinstance(manager, KvCachedManager | PrivatePools)
            if isinstance(manager, KvCachedManager):
                manager.advance(now)
            manager.leave(engine)
            self._set_pool(gpu)

    def free_bytes(self, serving: Mapping[int, Iterable[int]]) -> dict[int, int]:
        """By GPU, the bytes that the weights of another engine could take now. ``serving`` are the GPUs of the engines with
        requests: others hold no KV."""
        free = {gpu: self._ledger.free_bytes(gpu) for gpu in self.managers}
        for engine, gpus in serving.items():
            for gpu in gpus:
                free[gpu] -= self.held_bytes(engine, gpu)
        return free

    def held_bytes(self, engine: int, gpu: int) -> int:
        """KV memory that only this engine can use, as long as it holds it. It is 0 for private pools, whose bytes are not free
        anyway."""
        manager = self.managers[gpu]
        return manager.block_bytes_held(engine) if isinstance(manager, KvCachedManager) else 0

    def check(self) -> None:
        """Raise AssertionError if a KV memory contradicts itself; that claims and pools fit is always checked."""
        for manager in self.managers.values():
            manager.check()
