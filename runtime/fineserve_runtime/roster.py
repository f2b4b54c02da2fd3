"""Models that come and go while the server runs.

A model is added where its weights have room in the region. The memory accounting covers the region, so ``weights_in_region``
must be true. Memory must not be split beforehand between the models of the start. Calls take seconds; one comes at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import Any

from fineserve_runtime.config import AddedModel, RuntimeFile, check_model
from fineserve_runtime.core import ModelFacts
from fineserve_runtime.launch import Running, engine_config, model_facts
from fineserve_runtime.memories import SHARED
from fineserve_runtime.metrics import Metrics
from fineserve_runtime.warmup import measure_engine
from fineserve_sim.cluster.scenario import Scenario
from fineserve_sim.systems.spec import DriftingResidencySpec, QlmResidencySpec

_LOOK_S = 0.02

_END_S = 180.0
"""So long what is under way on a device may last."""


class Roster:
    def __init__(self, file: RuntimeFile, scenario: Scenario, running: Running, metrics: Metrics) -> None:
        self._file = file
        self._scenario = scenario
        self._running = running
        self._metrics = metrics

    def add(self, name: str, model: AddedModel, prepare: Callable[[dict[str, Any]], None]) -> ModelFacts:
        """Start engines for the model and let the core know it. ``prepare`` is called with its config.json before. Raises
        ValueError for a model that cannot be served here, RuntimeError for engines that do not start; nothing is left then."""
        self.check_system()
        if model.stages != 1:
            raise ValueError(f"stages: {model.stages}; an added model has one device")
        prepare(check_model(model, self._file.folder))
        slo_s = model.ttft_slo_s or self._file.experiment.file.slo.ttft_s
        if slo_s is None:
            raise ValueError("ttft_slo_s: missing, and the file has no slo.ttft_s")
        moves = self._scenario.system.residency is not None
        gpus = list(self._running.devices) if moves else [self._device(model.device)]
        hosts = self._running.devices
        started: list[int] = []
        try:
            for gpu in gpus:
                config = engine_config(name, model, self._file.folder, self._scenario, gpus=(gpu,))
                local = hosts[gpu].add(config)
                started.append(gpu)
                handle = hosts[gpu].engines[local]
                if gpu == gpus[0]:
                    rows = measure_engine(handle, self._running.relays[hosts[gpu].config.gpus[0]])
                    facts = model_facts(handle, model.rate_per_s, slo_s, rows)
                if moves:
                    handle.sleep()
        except BaseException:
            for gpu in started:
                self._end(name, gpu)
            raise
        self._metrics.add_model(name)
        self._running.driver.add_model(facts, None if moves else gpus[0])
        self._await_up(name)
        return facts

    def move(self, name: str, gpu: int, patience_s: float) -> ModelFacts:
        """Give the file's model to another device, once its requests have ended. It is back where it was when that does not
        work. Raises as ``add`` and ``remove`` do."""
        before = next(
            gpu
            for gpu, host in self._running.devices.items()
            for each in host.engines.values()
            if each.config.name == name and each.gpus == (gpu,)
        )
        model = self._of_file(name, gpu)
        self.remove(name, patience_s)
        try:
            return self.add(name, model, lambda config: None)
        except (ValueError, RuntimeError):
            self.add(name, model.model_copy(update={"device": before}), lambda config: None)
            raise

    def check_moves(self, to: Mapping[str, int]) -> None:
        """Raises ValueError where models cannot be moved by hand, or one of them cannot be on its device."""
        self.check_system()
        if self._scenario.system.residency is not None:
            raise ValueError(
                f"system {self._scenario.system.name} moves models itself; a plan is for one that does not"
            )
        for name, gpu in to.items():
            config = engine_config(name, self._of_file(name, gpu), self._file.folder, self._scenario, gpus=(gpu,))
            self._running.devices[gpu].check(config)

    def _of_file(self, name: str, gpu: int) -> AddedModel:
        """A model of the file as one that is added."""
        entry = next(each.entry for each in self._file.experiment.setup.models if each.id == name)
        files = self._file.section.models[name].model_dump()
        return AddedModel(**files, ttft_slo_s=entry.ttft_slo_s, rate_per_s=entry.rate_per_s or 1.0, device=gpu)

    def remove(self, name: str, drain_s: float) -> None:
        """Refuse new requests of the model, let the others end for ``drain_s``, then end its engines. Raises ValueError where
        models cannot go, RuntimeError for an engine that does not end."""
        self.check_system()
        driver = self._running.driver
        driver.stop(name)
        end_s = time.monotonic() + drain_s
        while driver.live(name) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
        ends = driver.remove_model(name, f"model {name} was removed by an operator")
        self._metrics.remove_model(name)
        if wait(ends, _END_S).not_done:
            raise RuntimeError(f"model {name} is removed, but an engine of it did not end in {_END_S:g} s")
        for end in ends:
            end.result()

    def _await_up(self, name: str) -> None:
        """Its device may have something to do before: another engine starts there."""
        driver, end_s = self._running.driver, time.monotonic() + _END_S
        while driver.health(name).condition == "starting" and not driver.draining and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def check_system(self) -> None:
        """Raises ValueError where models can neither come nor go."""
        if not self._file.section.weights_in_region:
            raise ValueError("models come and go only where runtime.weights_in_region is true")
        if self._scenario.system.dispatch is not None:
            raise ValueError(f"system {self._scenario.system.name} serves one model: none can come or go")
        name = self._scenario.system.name
        if not isinstance(self._scenario.system.memory, SHARED):
            raise ValueError(f"system {name} splits its memory between the models of the start: none can come or go")
        if isinstance(self._scenario.system.residency, DriftingResidencySpec | QlmResidencySpec):
            raise ValueError(f"system {name} needs profiles, which the file's load gives: no model can come or go")

    def _device(self, wanted: int | None) -> int:
        hosts = self._running.devices
        if wanted is None:
            return max(hosts, key=lambda gpu: hosts[gpu].ledger(gpu).free_bytes)
        if wanted not in hosts:
            raise ValueError(f"device: there is no {wanted}; served are {', '.join(map(str, hosts))}")
        return wanted

    def _end(self, name: str, gpu: int) -> None:
        host = self._running.devices[gpu]
        for local, handle in host.engines.items():
            if handle.config.name == name and handle.gpus == (gpu,):
                host.remove(local)
