"""A listener between hosts and driver: each message comes from an engine of a device."""

from __future__ import annotations

from typing import Protocol

from fineserve_runtime.engines.api import StepReport


class HearsEngines(Protocol):
    def stepped(self, gpu: int, report: StepReport) -> None: ...

    def died(self, gpu: int, local: int, reason: str, *, crashed: bool) -> None: ...


class HostListener:
    """Hears the engines of one device for the driver (an ``EngineListener``)."""

    def __init__(self, driver: HearsEngines, gpu: int) -> None:
        self._driver = driver
        self._gpu = gpu

    def on_step(self, report: StepReport) -> None:
        self._driver.stepped(self._gpu, report)

    def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
        """The driver knows itself which requests the engine had."""
        self._driver.died(self._gpu, engine, reason, crashed=crashed)
