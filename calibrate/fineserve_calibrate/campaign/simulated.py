"""A campaign's device of known behaviour, without torch and without waiting: what the campaign must find is known.

Steps of engines alone are those of ``probes.simulated``; ``slowdown`` says what sharing makes of them. Time is its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fineserve_calibrate.campaign.items import Item, Take, Trial, sharing_keys
from fineserve_calibrate.campaign.run import Overdue, SetupFailed
from fineserve_calibrate.campaign.steps import statistics
from fineserve_calibrate.probes.backend import Identity, Unavailable
from fineserve_calibrate.probes.runner import Row, measure, summary
from fineserve_calibrate.probes.simulated import NOISE, SimulatedDevice, step_s


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

    @property
    def identity(self) -> Identity:
        return self.device.identity

    def now_s(self) -> float:
        """See ``run.Bench``."""
        return self.device.now_s()

    def clocks(self) -> str:
        """See ``run.Bench``."""
        return self.device.clocks()

    def healthy(self) -> bool:
        """See ``run.Bench``."""
        return self.device.healthy()

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
        seconds = measure(prepared, item.ask.effort, self.now_s)
        return [{**item.ask.point, **summary(seconds), "implementation": prepared.implementation}]

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
