"""The engines of one host as their driver sees them: passes messages between them and the listener."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fineserve_runtime.engines.api import EngineConfig, EngineHandle, EngineListener, HostConfig
from fineserve_runtime.engines.device import LocalDevice, OpenDevice, model_folder
from fineserve_runtime.engines.handle import CALL_S, Handle
from fineserve_runtime.engines.loop import REMOVED, Beat, Died, Message, Ready, Reply, Stepped, one_line
from fineserve_sim.policy.interfaces import KVLedger
from fineserve_sim.policy.memory.geometry import SlabPlan

__all__ = ["START_TIMEOUT_S", "Host", "model_folder", "start_host"]

START_TIMEOUT_S = 300.0

_END_S = 10.0

_LOOK_S = 0.2

_LOG = logging.getLogger("fineserve.engines")


def start_host(config: HostConfig, listener: EngineListener, open_device: OpenDevice = LocalDevice) -> Host:
    """Build everything and wait until each engine is ready.

    Raises ValueError for a configuration that cannot work, RegionError when another host uses the region, RuntimeError when
    an engine does not start. Nothing is left behind then.
    """
    host = Host(config, listener, open_device)
    try:
        host.start()
    except BaseException:
        host.close()
        raise
    return host


class Host:
    """An `api.EngineHost`."""

    def __init__(self, config: HostConfig, listener: EngineListener, open_device: OpenDevice = LocalDevice) -> None:
        self.config = config
        self._listener = listener
        self._quits = threading.Event()
        self._device = open_device(config, self._receive)
        facts = self._device.facts.engines
        self._handles = {
            number: Handle(number, engine, facts[number], self._device) for number, engine in enumerate(config.engines)
        }

    @property
    def engines(self) -> dict[int, EngineHandle]:
        return dict(self._handles)

    @property
    def slab_plan(self) -> SlabPlan:
        return self._device.facts.slab_plan

    @property
    def table_path(self) -> Path:
        """The owner table of the first device: anybody on the device's machine can watch the region there (table.py)."""
        return self._device.facts.table_path

    @property
    def found_stale_region(self) -> bool:
        """Whether files of a host that crashed lay there."""
        return self._device.facts.found_stale_region

    def start(self) -> None:
        self._check_capacity(*self._handles.values())  # saves the time to load what cannot work
        self._start(tuple(self._handles))
        self._check_capacity(*self._handles.values())

    def ledger(self, gpu: int | None = None) -> KVLedger:
        return self._device.ledger(gpu)

    def restart(self, engine: int) -> None:
        if self._handles[engine].alive:
            raise RuntimeError(f"{self._handles[engine].config.name} is alive: only a dead engine can be started again")
        again = self._device.clear(engine)
        for number in again:
            self._handles[number].revive()
        self._start(again)

    def add(self, engine: EngineConfig) -> int:
        if any(engine.name == handle.config.name for handle in self._handles.values()):
            raise ValueError(f"an engine of model {engine.name} is here already")
        number, facts = self._device.add(engine)
        handle = Handle(number, engine, facts, self._device)
        try:
            self._check_capacity(handle)
        except ValueError:
            self._device.forget(number)
            raise
        self._handles = self._handles | {number: handle}
        try:
            self._start((number,))
            self._check_capacity(*self._handles.values())
        except BaseException:
            self.remove(number)
            raise
        return number

    def check(self, engine: EngineConfig) -> None:
        number, facts = self._device.add(engine)
        try:
            self._check_capacity(Handle(number, engine, facts, self._device))
        finally:
            self._device.forget(number)

    def remove(self, engine: int) -> None:
        handle = self._handles[engine]
        handle.leaves()
        wait_s = 0.0 if self._quits.is_set() else CALL_S  # ``close`` ends it soon
        if not handle.await_death(wait_s):
            raise RuntimeError(f"{handle.config.name} did not end in {wait_s:g} s")
        self._device.forget(engine)
        self._handles = {number: each for number, each in self._handles.items() if number != engine}

    @property
    def sound(self) -> bool:
        return self._device.sound

    def holds_up(self, engine: int) -> bool:
        return self._device.holds_up(engine)

    def end_hung(self, engines: Sequence[int], reason: str) -> None:
        self._device.end_hung(engines, reason)

    def quit(self) -> None:
        self._quits.set()
        self._device.quit()

    def close(self) -> None:
        self._device.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _start(self, engines: Sequence[int]) -> None:
        """All start at the same time. Engines that the device cannot start are dead."""
        try:
            self._device.start(engines)
        except Exception as problem:
            for number in engines:
                self._on_died(Died(number, one_line(problem)))
            raise
        for number in engines:
            self._await_ready(self._handles[number])

    def _await_ready(self, handle: Handle) -> None:
        """Engines of one thread are silent while one of them loads, and no worse for that. An engine that hangs while it
        starts is ended, since nothing else would find it dead."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while not handle.ready.wait(_LOOK_S):
            if self._quits.is_set():
                raise RuntimeError(f"{handle.config.name} is not waited for: the server is shutting down")
            if time.monotonic() > end_s:
                reason = f"{handle.config.name} was not ready after {START_TIMEOUT_S:.0f} s"
                self._device.end_hung((handle.id,), reason)
                handle.await_death(_END_S)
                raise RuntimeError(reason)
            if self.config.mode == "in_process":
                for other in self._handles.values():
                    other.on_heard()
        if handle.death is not None:
            raise RuntimeError(f"{handle.config.name} did not start: {handle.death}")

    def _check_capacity(self, *handles: Handle) -> None:
        """Raise ValueError unless each engine could hold one sequence of full length, were it alone."""
        for handle in handles:
            if handle.kv_capacity_tokens < handle.config.max_model_len:
                raise ValueError(
                    f"{handle.config.name}: its KV memory holds {handle.kv_capacity_tokens} tokens, max_model_len is "
                    f"{handle.config.max_model_len}; enlarge region_bytes or its limit, or lower max_model_len"
                )

    def _receive(self, message: Message) -> None:
        if isinstance(message, Stepped):
            handle = self._handles[message.report.engine]
            handle.on_heard()
            handle.on_stepped(message)
            self._listener.on_step(message.report)
            handle.on_told(message.report)
        elif isinstance(message, Ready):
            self._handles[message.engine].on_ready(message.state)
        elif isinstance(message, Beat):
            self._handles[message.engine].on_heard()
        elif isinstance(message, Reply):
            self._handles[message.engine].on_heard()
            self._handles[message.engine].on_reply(message)
        else:
            self._on_died(message)

    def _on_died(self, message: Died) -> None:
        handle = self._handles[message.engine]
        if not handle.alive:
            return
        if message.details:
            _LOG.error("%s: %s", handle.config.name, message.details)
        was_ready = handle.ready.is_set()
        lost = handle.on_died(message.reason)
        if was_ready and message.reason != REMOVED:
            self._listener.on_died(message.engine, message.reason, lost, message.crashed)
