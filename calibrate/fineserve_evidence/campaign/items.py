"""The items that a campaign can measure on a device.

A ``Take`` puts loads on the engines of a ``Scene``. Each engine has a process of its own on one device. A ``Spot`` is a point
of the probes. A ``Trial`` runs a part of the runtime. An ``Item`` is one of them with its part of the campaign and its expected
cost. The ``setup`` of an item must run before the item can be measured. Items with the same setup follow each other.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fineserve_calibrate.probes.engines import Composition
from fineserve_calibrate.probes.parts import Effort
from fineserve_calibrate.probes.schema import Point

Sharing = Literal["time_slice", "mps"]


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine's place on the device: the precision of its weights, and its part of the SMs under MPS."""

    dtype: str
    percent: int = 100


@dataclass(frozen=True, slots=True)
class Scene:
    """Engines of one model on one device.

    ``mode`` is eager, or decode_graphs (decodes in CUDA graphs, nothing compiled). ``loads`` are all loads that its engines
    ever run; they decide how much KV memory the engines get.
    """

    sharing: Sharing
    model: str
    mode: str
    seats: tuple[Seat, ...]
    loads: tuple[Composition, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """A load for each seat, None where the engine waits. All run for ``hold_s``; the first ``warm_s`` do not count."""

    scene: Scene
    loads: tuple[Composition | None, ...]
    hold_s: float
    warm_s: float


@dataclass(frozen=True, slots=True)
class Spot:
    """A point of the probes (``probes.schema``)."""

    operator: str
    point: Point
    effort: Effort


@dataclass(frozen=True, slots=True)
class Trial:
    """A part of the runtime on real engines, by name (``trials``)."""

    name: str
    model: str


@dataclass(frozen=True, slots=True)
class Item:
    """One measurement. It should take ``expected_s`` once ``setup`` runs, and the setup ``setup_s`` to start."""

    part: str
    ask: Take | Spot | Trial
    expected_s: float
    setup: str = ""
    setup_s: float = 0.0

    @property
    def table(self) -> str:
        """Name the table of its rows."""
        return "sharing" if isinstance(self.ask, Take) else getattr(self.ask, "operator", "trials")

    @property
    def asked(self) -> dict[str, Any]:
        """Give the request as plain data."""
        if isinstance(self.ask, Spot):
            return {"point": dict(self.ask.point), "effort": asdict(self.ask.effort)}
        return asdict(self.ask)

    @property
    def key(self) -> str:
        """Digest everything that is asked."""
        text = json.dumps([self.table, self.asked], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """Name the item for people."""
        if isinstance(self.ask, Take):
            seats = zip(self.ask.scene.seats, self.ask.loads, strict=True)
            return f"{self.part}: " + " + ".join(seat_text(seat, load) for seat, load in seats)
        if isinstance(self.ask, Spot):
            return f"{self.part}: {self.ask.operator} " + " ".join(map(str, self.ask.point.values()))
        return f"{self.part}: {self.ask.name}"


def load_text(load: Composition) -> str:
    """Write ``d32c512`` for 32 decodes over 512 cached tokens each, ``p2048`` for prompts of 2048 tokens."""
    return f"d{load.decodes}c{load.context}" if load.decodes else f"p{load.prefill_tokens}"


def seat_text(seat: Seat, load: Composition | None) -> str:
    """Write ``fp8@70 d32c512``, or ``fp8@70 waits`` without a load."""
    return f"{seat.dtype}@{seat.percent} {load_text(load) if load else 'waits'}"


def parse_seat(text: str) -> tuple[Seat, Composition | None]:
    """Read the text that ``seat_text`` wrote. Raises ValueError for any other text."""
    found = re.fullmatch(r"(\w+)@(\d+) (?:d(\d+)c(\d+)|p(\d+)|waits)", text)
    if found is None:
        raise ValueError(f"{text!r} names no engine and its load")
    dtype, percent, decodes, context, prefill = found.groups()
    seat = Seat(dtype, int(percent))
    if decodes is None and prefill is None:
        return seat, None
    return seat, Composition(int(decodes or 0), int(context or 0), int(prefill or 0))


SHARING_KEYS = (
    *("sharing", "processes", "model", "mode", "dtype", "percent"),
    *("decodes", "context", "prefill_tokens", "neighbours"),
)
"""Columns of the table ``sharing``. ``processes`` counts the engines on the device, waiting ones too. ``neighbours`` are the
other engines at work, as ``seat_text`` writes them, joined by `` + ``, or ``none``."""


def sharing_keys(take: Take, place: int) -> Mapping[str, str | int]:
    """Make the key columns of one engine of a take that has a load."""
    scene, mine = take.scene, take.loads[place]
    assert mine is not None
    others = [
        seat_text(seat, load)
        for other, (seat, load) in enumerate(zip(scene.seats, take.loads, strict=True))
        if load and other != place
    ]
    seat = scene.seats[place]
    values = (scene.sharing, len(scene.seats), scene.model, scene.mode, seat.dtype, seat.percent)
    load_values = (mine.decodes, mine.context, mine.prefill_tokens, " + ".join(sorted(others)) or "none")
    return dict(zip(SHARING_KEYS, (*values, *load_values), strict=True))
