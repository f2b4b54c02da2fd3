"""The bytes of every GPU whose engines come and go: what engines take beside KV, and the KV memory in the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fineserve_sim.cluster.compose.virtual_memory import build_kvcached, virtual_kv
from fineserve_sim.cluster.scenario import ScenarioError
from fineserve_sim.cluster.sharing.memory import GpuMemory
from fineserve_sim.policy.memory.geometry import KVGeometry
from fineserve_sim.policy.memory.kvcached import KvCachedManager
from fineserve_sim.policy.memory.paged import PrivatePools
from fineserve_sim.systems.spec import KvCachedSpec, MemorySpec, PrivatePoolsSpec


class FleetMemory:
    """``usable_bytes`` of each GPU under a memory policy: kvcached, whose limit is what the engines leave, or private pools,
    where an engine that comes gets what is free then. ScenarioError for other policies."""

    def __init__(self, spec: MemorySpec, usable_bytes: Mapping[int, int]) -> None:
        if not isinstance(spec, KvCachedSpec | PrivatePoolsSpec):
            raise ScenarioError(f"a system with residency needs memory kvcached or private, not {spec.policy}")
        self._spec = spec
        self._usable_bytes = dict(usable_bytes)
        self._fixed_bytes = dict.fromkeys(usable_bytes, 0)
        self.managers: dict[int, GpuMemory] = {
            gpu: build_kvcached(spec, size, {}) if isinstance(spec, KvCachedSpec) else PrivatePools({})
            for gpu, size in usable_bytes.items()
        }

    def take(self, gpus: Iterable[int], fixed_bytes: int) -> None:
        """An engine, loading or loaded, takes so much of each GPU beside KV."""
        for gpu in gpus:
            self._fixed_bytes[gpu] += fixed_bytes
            self._limit(gpu)

    def give(self, gpus: Iterable[int], fixed_bytes: int) -> None:
        """It went."""
        self.take(gpus, -fixed_bytes)

    def join(self, engine: int, gpus: Iterable[int], block: KVGeometry) -> None:
        """A loaded engine may hold KV from now on."""
        for gpu in gpus:
            manager = self.managers[gpu]
            if isinstance(manager, KvCachedManager):
                assert isinstance(self._spec, KvCachedSpec)
                manager.join(engine, virtual_kv(self._spec, block))
            else:
                assert isinstance(manager, PrivatePools)
                free = self._usable_bytes[gpu] - self._fixed_bytes[gpu] - manager.ledger().total_bytes
                manager.join(engine, block.block_bytes, max(0, free))

    def leave(self, engine: int, gpus: Iterable[int]) -> None:
        """An engine that holds no KV any more goes."""
        for gpu in gpus:
            manager = self.managers[gpu]
            assert isinstance(manager, KvCachedManager | PrivatePools)
            manager.leave(engine)

    def free_bytes(self) -> dict[int, int]:
        """By GPU, what the weights of another engine could take now."""
        return {gpu: self._free_bytes(gpu) for gpu in self._usable_bytes}

    def _free_bytes(self, gpu: int) -> int:
        ledger = self.managers[gpu].ledger()
        return self._usable_bytes[gpu] - self._fixed_bytes[gpu] - ledger.used_bytes - ledger.stranded_bytes

    def _limit(self, gpu: int) -> None:
        manager = self.managers[gpu]
        if isinstance(manager, KvCachedManager):
            manager.set_limit(max(0, self._usable_bytes[gpu] - self._fixed_bytes[gpu]))

    def check(self) -> None:
        """Raise AssertionError if more is taken than there is."""
        for gpu, usable in self._usable_bytes.items():
            assert 0 <= self._fixed_bytes[gpu] <= usable, f"GPU {gpu}: engines take {self._fixed_bytes[gpu]} bytes"
            self.managers[gpu].check()
