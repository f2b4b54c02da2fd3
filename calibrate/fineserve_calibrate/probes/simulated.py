"""A device of known speed, without torch and without waiting: what the probes must find is known.

Every operator takes ``launch_s`` and its roofline over ``efficiency``, with a fixed pattern of noise; what has no roofline
takes a millisecond. Time is its own: a clock that its samples move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fineserve_calibrate.probes.backend import Identity, Prepared, Unavailable
from fineserve_calibrate.probes.roofline import ideal_s
from fineserve_calibrate.probes.schema import Point
from fineserve_calibrate.tables import Fingerprint, Table
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
