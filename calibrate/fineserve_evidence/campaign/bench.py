"""A device as a campaign uses it: engines of a scene, points of the probes, trials of the runtime."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fineserve_calibrate.probes.engine_points import KV_OF
from fineserve_calibrate.probes.engines import ONE_LAYER, EngineSpec, ProbedModel
from fineserve_calibrate.probes.nvidia import Environment, FoundGpu, start_mps, stop_mps
from fineserve_calibrate.probes.operators import TorchBackend
from fineserve_calibrate.probes.parts import Row, measured_row
from fineserve_calibrate.probes.schema import Unavailable

from fineserve_evidence.campaign import crew
from fineserve_evidence.campaign.crew import Steps, statistics, steady
from fineserve_evidence.campaign.items import Item, Spot, Take, Trial, sharing_keys
from fineserve_evidence.campaign.record import TRIALS
from fineserve_evidence.campaign.run import SetupFailed
from fineserve_evidence.campaign.trials import run_trial

LEAST_STEPS = 8
LONGEST_HOLD = 4
"""Times the take's own time, until there are enough steps."""

TakeLoads = Callable[[float], tuple[float, list[Steps]]]


class DeviceBench:
    """A ``run.Bench`` on this machine's GPU, or on its CPU where ``gpu`` is None."""

    def __init__(self, gpu: FoundGpu | None, model: ProbedModel, folder: Path) -> None:
        self._on_cpu, self._folder = gpu is None, folder
        self._models = {known.name: known for known in (model, ONE_LAYER)}
        self.device = TorchBackend(gpu, self._models)
        self._crew: crew.Crew | None = None
        self._mps: Environment | None = None
        self._note = folder / "mps.json"
        self.setup = ""
        self._end_left_over_mps()

    def prepare(self, item: Item) -> None:
        """See ``run.Bench``. The setup before ends first: memory is what engines lack."""
        self._clear()
        if isinstance(item.ask, Take):
            self._start_crew(item, item.ask)
        elif isinstance(item.ask, Spot) and item.setup:
            try:
                self.device.engines.get(_engine_of(item.ask))
            except Unavailable as reason:
                raise SetupFailed(str(reason)) from None
        self.setup = item.setup

    def measure(self, item: Item) -> list[Row]:
        """See ``run.Bench``."""
        if isinstance(item.ask, Take):
            return self._take(item.ask)
        if isinstance(item.ask, Trial):
            return run_trial(item.ask, self._folder, self._catalog_gpu())
        prepared = self.device.prepare(item.ask.operator, item.ask.point)
        return [measured_row(prepared, item.ask.point, item.ask.effort, self.device.now_s)]

    def _catalog_gpu(self) -> str | None:
        """The catalog's name of this device; None for the CPU. Raises Unavailable for a GPU that it does not have."""
        if self._on_cpu:
            return None
        if self.device.spec is None:
            raise Unavailable(f"the catalog has no {self.device.identity.device}")
        return self.device.spec.name

    def close(self) -> None:
        """See ``run.Bench``."""
        self._clear()
        self._stop_mps()
        self.device.close()

    def _clear(self) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None
        self.device.engines.close()
        self.device.free()
        self.setup = ""

    def _start_crew(self, item: Item, take: Take) -> None:
        scene, model = take.scene, self._models[take.scene.model]
        if not self.device.has_vllm:
            raise Unavailable("vllm is not installed")
        mps = self._sharing(scene.sharing)
        seats = [crew.settings(scene, place, model, self._on_cpu, mps) for place in range(len(scene.seats))]
        try:
            self._crew = crew.Crew(seats, self._folder / TRIALS / item.part)
        except Unavailable as reason:
            raise SetupFailed(str(reason)) from None

    def _take(self, take: Take) -> list[Row]:
        assert self._crew is not None
        try:
            seconds = side_by_side(lambda hold_s: self._run(take, hold_s), take)
        except Unavailable:
            self._clear()  # the next take starts its engines anew
            raise
        places = [place for place, load in enumerate(take.loads) if load]
        name = f"vllm {self.device.identity.vllm} engine"
        return [
            {**sharing_keys(take, place), **statistics(mine), "implementation": name}
            for place, mine in zip(places, seconds, strict=True)
        ]

    def _run(self, take: Take, hold_s: float) -> tuple[float, list[Steps]]:
        assert self._crew is not None
        return self._crew.take(take.loads, hold_s)

    def _sharing(self, sharing: str) -> Environment:
        """The environment that makes a process share the device so. Raises Unavailable where it cannot."""
        if sharing == "time_slice":
            return ()
        if self._on_cpu:
            raise Unavailable("MPS is NVIDIA's")
        if self._mps is None:
            self._mps = start_mps()
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.write_text(json.dumps(self._mps), encoding="utf-8")
        return self._mps

    def _stop_mps(self) -> None:
        if self._mps is not None:
            stop_mps(self._mps)
            self._mps = None
            self._note.unlink(missing_ok=True)

    def _end_left_over_mps(self) -> None:
        """End the daemon of a campaign in this folder that was killed: nothing else would."""
        if self._note.exists():
            with suppress(ValueError, OSError, subprocess.SubprocessError):
                stop_mps(tuple((name, value) for name, value in json.loads(self._note.read_text(encoding="utf-8"))))
            self._note.unlink(missing_ok=True)


def _engine_of(spot: Spot) -> EngineSpec:
    """The engine that a step or a host's overhead is measured on."""
    if spot.operator == "host_overhead":
        return EngineSpec(ONE_LAYER.name, "bfloat16", "bfloat16", str(spot.point["mode"]))
    model, dtype, mode = (str(spot.point[name]) for name in ("model", "dtype", "mode"))
    return EngineSpec(model, dtype, KV_OF[dtype], mode)


def side_by_side(run: TakeLoads, take: Take) -> list[list[float]]:
    """Run a take until each engine at work has enough steps that count, and return their seconds.

    A take with too few steps is repeated for longer. Raises Unavailable when ``LONGEST_HOLD`` times as long is too short.
    """
    longer = 1
    while True:
        from_s, steps = run(longer * take.hold_s)
        found = steady(steps, from_s + take.warm_s, from_s + longer * take.hold_s)
        if min(map(len, found)) >= LEAST_STEPS:
            return found
        longer *= 2
        if longer > LONGEST_HOLD:
            counts = ", ".join(str(len(seconds)) for seconds in found)
            raise Unavailable(f"only {counts} steps side by side in {longer * take.hold_s / 2:g} s")
