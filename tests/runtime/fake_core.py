"""The fake engine in the place of a vLLM core: real devices, links and loops can be built over it, without vLLM."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from fake_engines import FakeEngine, FakeHost
from fineserve_runtime.engines.api import EngineConfig, HostConfig, StepReport, Submission, TokenChunk
from fineserve_runtime.engines.device import LocalDevice
from fineserve_runtime.engines.settings import SlabSettings

from fineserve_sim.policy.interfaces import EngineState

FATAL_TOKEN = 199
"""A prompt that begins with it kills the process of its engine."""


class FakeCore:
    """One engine with a memory of its own of ``region_bytes``, and the weights' slab and counters in the owner table."""

    def __init__(
        self, config: EngineConfig, model_dir: Path, settings: SlabSettings, region_bytes: int, eos: tuple[int, ...]
    ) -> None:
        self._host = FakeHost(HostConfig((config,), region_bytes), self)
        self._engine: FakeEngine = self._host.engines[0]
        self._table = settings.open_table()
        self._id = settings.engine
        self._slab: list[int] = []
        self._take_slab()

    def add(self, submission: Submission) -> None:
        if submission.prompt_token_ids[0] == FATAL_TOKEN:
            os._exit(7)
        self._engine.submit(submission)

    def abort(self, request_id: int) -> None:
        self._engine.abort(request_id)

    def refuse(self, request_id: int, problem: str) -> None:
        self._engine.refused.append(TokenChunk(request_id, (), "error", problem))

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def starved(self) -> bool:
        return False

    keeps_prefixes = False

    def step(self) -> StepReport | None:
        report = self._engine.step()
        return report and report._replace(engine=self._id)

    def state(self) -> EngineState:
        return self._engine.state()

    def publish(self) -> None:
        row = self._table.counters[self._id]
        row.set("steps", self._engine.steps)
        row.set("weight_bytes", len(self._slab) * self._table.header.slab_bytes)

    def sleep(self) -> None:
        self._engine.sleep()
        self._table.give_back(self._id, self._slab)
        self._slab = []

    def wake(self) -> None:
        self._take_slab()
        self._engine.wake()

    def _take_slab(self) -> None:
        with self._table.lock():
            self._slab = self._table.take(self._id, 1) or []
        if not self._slab:
            raise RuntimeError("no slab is free")

    def close(self) -> None:
        self._table.close()


def build_unless_hung(
    config: EngineConfig, model_dir: Path, settings: SlabSettings, region_bytes: int, eos: tuple[int, ...]
) -> FakeCore:
    """An engine that hangs in its start while its model's folder has a file ``hang``."""
    while (model_dir / "hang").exists():
        time.sleep(0.01)
    return FakeCore(config, model_dir, settings, region_bytes, eos)


class FrailDevice(LocalDevice):
    """Cannot start its engines while its first model's folder has a file ``fail``; its process dies at it once where there
    is a file ``die``, and stops, as at SIGSTOP, where there is a file ``stop``."""

    def start(self, engines: Sequence[int]) -> None:
        folder = self.facts.engines[0].model_dir
        if (folder / "fail").exists():
            raise RuntimeError("no room for a process")
        if (folder / "die").exists():
            (folder / "die").unlink()
            os._exit(7)
        if (folder / "stop").exists():
            (folder / "stop").unlink()
            os.kill(os.getpid(), signal.SIGSTOP)
        super().start(engines)
