"""A device and a bench of known speed, without torch and without waiting: what probes and campaigns must find is known.

Every operator takes ``launch_s`` and its roofline over ``efficiency``, with a fixed pattern of noise; what has no roofline
takes a millisecond. ``slowdown`` says what sharing makes of an engine's steps. Time is a clock that the samples move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from fineserve_calibrate.probes.parts import Row, measured_row
from fineserve_calibrate.probes.report import ideal_s
from fineserve_calibrate.probes.schema import Identity, Point, Prepared, Unavailable
from fineserve_calibrate.tables import Fingerprint, Table
from fineserve_evidence.campaign.crew import statistics
from fineserve_evidence.campaign.items import Item, Take, Trial, sharing_keys
from fineserve_evidence.campaign.run import Overdue, SetupFailed

from fineserve_sim.catalog import GpuSpec

NOISE = (1.0, 1.02, 0.99, 1.01, 0.98)
STEP = {"base": 2e-3, "token": 1e-5, "context": 2e-8, "pair": 1e-9}


def step_s(point: Point) -> float:
    """Seconds of an engine step: linear in tokens, decode context and query-key pairs."""
    decodes, context, new, prefix = (
        int(point.get(name, 0)) for name in ("decodes", "context", "prefill_tokens", "cached_tokens")
    )
    pairs = new * prefix + new * (new + 1) / 2
    each = STEP["token"] * (decodes + new) + STEP["context"] * decodes * (context + 1) + STEP["pair"] * pairs
    return STEP["base"] + each


@dataclass
class SimulatedDevice:
    """A ``Backend``. ``fail`` may raise for a point; ``lost`` says whether the device is broken by then."""

    spec: GpuSpec | None
    data_sheet: GpuSpec
    identity: Identity = field(default_factory=lambda: Identity("Simulated GPU", 1, "1.0", "13.0", "2.0", "0.0"))
    launch_s: float = 5e-6
    efficiency: float = 0.7
    prepare_s: float = 1e-3
    fail: Callable[[str, Point], None] = lambda operator, point: None
    lost: bool = False
    clock_s: float = 0.0
    prepared: list[Mapping[str, object]] = field(default_factory=list)
    closed: bool = False

    def exact_s(self, operator: str, point: Point) -> float:
        """Seconds of a point without noise. Raises Unavailable for more GPUs than there are."""
        if int(point.get("gpus", 1)) > self.identity.gpus or operator == "point_to_point":
            raise Unavailable(f"{self.identity.gpus} GPUs, needs more")
        if operator in ("step", "contention"):
            return step_s(point)
        columns = {name: np.array([value]) for name, value in point.items()} | {"latency_s": np.array([1.0])}
        bound = ideal_s(Table(operator, columns, Fingerprint("", "", "", "")), self.data_sheet)
        return 1e-3 if bound is None else self.launch_s + float(bound[0]) / self.efficiency

    def prepare(self, operator: str, point: Point) -> Prepared:
        """See ``Backend.prepare``."""
        self.clock_s += self.prepare_s
        self.fail(operator, point)
        seconds, turn = self.exact_s(operator, point), iter(range(1 << 62))
        self.prepared.append({"operator": operator, **point})

        def sample(count: int) -> list[float]:
            found = [seconds * NOISE[next(turn) % len(NOISE)] for _ in range(count)]
            self.clock_s += sum(found)
            return found

        return Prepared(sample, "simulated")

    def now_s(self) -> float:
        """See ``Backend.now_s``."""
        return self.clock_s

    def clocks(self) -> str:
        """See ``Backend.clocks``."""
        return "1980 MHz"

    def healthy(self) -> bool:
        """See ``Backend.healthy``."""
        return not self.lost

    def close(self) -> None:
        """See ``Backend.close``."""
        self.closed = True


def slowdown(sharing: str, engines: int, percent: int) -> float:
    """Taking turns costs a tenth on top, MPS less; fewer SMs than all take longer."""
    together = 1.1 * engines if sharing == "time_slice" else 1 + 0.44 * (engines - 1)
    return (together if engines > 1 else 1.0) * math.sqrt(100 / percent)


@dataclass
class SimulatedBench:
    """A ``run.Bench``. ``breaks`` are setups that do not start, ``overdue`` those that never end to, ``lacks`` ways of sharing
    that it does not have; ``fails`` may raise for an item, ``setup_ratio`` is how long setups take against what the plan
    expects."""

    device: SimulatedDevice
    breaks: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    overdue: tuple[str, ...] = ()
    fails: Callable[[Item], None] = lambda item: None
    setup_ratio: float = 0.7
    setup: str = ""
    started: list[str] = field(default_factory=list)
    measured: list[Item] = field(default_factory=list)

    def prepare(self, item: Item) -> None:
        """See ``run.Bench``."""
        self.setup = ""
        if isinstance(item.ask, Take) and item.ask.scene.sharing in self.lacks:
            raise Unavailable(f"no {item.ask.scene.sharing} here")
        if item.setup:
            self.device.clock_s += self.setup_ratio * item.setup_s
            if any(text in item.setup for text in self.overdue):
                raise Overdue("still starting")
            if any(text in item.setup for text in self.breaks):
                raise SetupFailed("the engine does not start")
            self.started.append(item.setup)
        self.setup = item.setup

    def measure(self, item: Item) -> list[Row]:
        """See ``run.Bench``."""
        self.fails(item)
        self.measured.append(item)
        if isinstance(item.ask, Take):
            return self._take(item.ask)
        if isinstance(item.ask, Trial):
            self.device.clock_s += item.expected_s
            return [{"trial": item.ask.name, "quantity": "seconds", "value": item.expected_s}]
        prepared = self.device.prepare(item.ask.operator, item.ask.point)
        return [measured_row(prepared, item.ask.point, item.ask.effort, self.device.now_s)]

    def _take(self, take: Take) -> list[Row]:
        self.device.clock_s += take.hold_s + 1.0
        places = [place for place, load in enumerate(take.loads) if load]
        rows = []
        for place in places:
            keys = sharing_keys(take, place)
            seconds = step_s(keys) * slowdown(take.scene.sharing, len(places), take.scene.seats[place].percent)
            times = statistics([seconds * noise for noise in NOISE])
            rows.append({**keys, **times, "implementation": "simulated"})
        return rows

    def close(self) -> None:
        """See ``run.Bench``."""
        self.device.close()
