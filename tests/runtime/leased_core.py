"""A fake core whose KV lies in the device's region, block by block, under the slab lease that vLLM's engines use.

Each token of a sequence fills its place in a block; before each step the tokens are read back from there, and the next
token is a hash of what was read. So a slab that two engines write, a block that was freed too early or a region that was
poisoned under a running sequence shows in the text. Engines are short of memory, preempt and starve as the lease says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fake_core import FakeCore
from fake_engines import FakeEngine, Sequence_
from fineserve_runtime.engines.api import EngineConfig, StepReport
from fineserve_runtime.engines.lease import SlabLease
from fineserve_runtime.engines.region import CpuRegion
from fineserve_runtime.engines.settings import SlabSettings

from fineserve_sim.policy.interfaces import EngineState


@dataclass(eq=False)
class LeasedEngine(FakeEngine):
    """Block ids of its sequences are those of ``lease``; what is in them, in ``region``."""

    lease: SlabLease = field(kw_only=True)
    region: CpuRegion = field(kw_only=True)
    starved: bool = False

    def __post_init__(self) -> None:
        self._held: dict[Sequence_, list[int]] = {}
        self._written: dict[Sequence_, int] = {}
        blocks, block_bytes = self.lease.virtual_blocks, self.lease.block_bytes
        words = self.region.array[: blocks * block_bytes].view(np.int32)
        self._kv = words.reshape(blocks, self.config.block_tokens, -1)

    def step(self) -> StepReport | None:
        unfinished = len(self.waiting) + len(self.running)
        with self.lease.exclusive():
            for sequence in self.running:
                sequence.tokens[: sequence.computed] = self._read(sequence)
            report = super().step()
            self._settle()
            self.starved = bool(self.waiting and not self.running)
            if self.starved:
                self.lease.starve()
        for block in self.lease.take_stale():
            self.region.fill(block * self.lease.block_bytes, self.lease.block_bytes, 0)
        for sequence in self.running:
            self._write(sequence)
        if len(self.waiting) + len(self.running) < unfinished:
            self.lease.thrive()
        return report

    def _free_blocks(self) -> int:
        """What sequences gave up and took in a step is settled at its end."""
        return max(0, self.lease.free_blocks() + self.lease.used_blocks - self.used_blocks)

    def _prefill(self, budget: int) -> int:
        if self.lease.may_start():
            return super()._prefill(budget)
        waiting, self.waiting = self.waiting, []
        done = super()._prefill(budget)
        self.waiting = waiting
        return done

    def _settle(self) -> None:
        """As many blocks for each sequence as the step left it with."""
        for sequence, ids in list(self._held.items()):
            keeps = sequence.blocks if sequence in self.running else 0
            self.lease.free(ids[keeps:])
            del ids[keeps:]
            self._written[sequence] = min(self._written[sequence], sequence.computed)
            if sequence not in self.running:
                del self._held[sequence], self._written[sequence]
        for sequence in self.running:
            ids = self._held.setdefault(sequence, [])
            taken = self.lease.alloc(sequence.blocks - len(ids))
            assert taken is not None, "the lease promised more blocks than it has"
            ids += taken
            self._written.setdefault(sequence, 0)

    def _read(self, sequence: Sequence_) -> list[int]:
        """A place whose ends differ was written by somebody else."""
        ids, count = self._held[sequence], sequence.computed
        first, last = (self._kv[:, :, word][ids].reshape(-1)[:count] for word in (0, -1))
        found: list[int] = np.where(first == last, first, 0).tolist()
        return [each % 2**32 for each in found]

    def _write(self, sequence: Sequence_) -> None:
        size, ids = self.config.block_tokens, self._held[sequence]
        for block in range(self._written[sequence] // size, -(-sequence.computed // size)):
            tokens = sequence.tokens[block * size : min((block + 1) * size, sequence.computed)]
            self._kv[ids[block], : len(tokens)] = np.array(tokens, dtype=np.int64).astype(np.int32)[:, None]
        self._written[sequence] = sequence.computed


class LeasedCore(FakeCore):
    """Arguments as those of `FakeCore`."""

    _engine: LeasedEngine

    def __init__(
        self, config: EngineConfig, model_dir: Path, settings: SlabSettings, region_bytes: int, eos: tuple[int, ...]
    ) -> None:
        super().__init__(config, model_dir, settings, region_bytes, eos)
        region = CpuRegion(settings.region_path)
        self._lease = settings.open_lease(region)
        self._engine = LeasedEngine(0, config, self._host, lease=self._lease, region=region)
        self._host.engines = {0: self._engine}

    @property
    def starved(self) -> bool:
        return self._engine.starved

    def state(self) -> EngineState:
        self._lease.look()
        return super().state()

    def publish(self) -> None:
        super().publish()
        row = self._lease.counters
        row.set("used_bytes", self._lease.used_blocks * self._lease.block_bytes)
        row.set("preemptions", self._engine.preemptions)

    def close(self) -> None:
        self._lease.close()
        super().close()
