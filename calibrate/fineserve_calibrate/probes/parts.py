"""A part of the probes: its points measured one after another, and kept on disk when it is finished.

``parts/NAME.json`` is one part with the identity of the device and a digest of what was asked. It is written to a temporary
file and renamed, so it is whole or not there. A part whose identity and digest match is not measured again.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fineserve_calibrate.probes.schema import KEYS, Backend, Identity, Point, Prepared, ProbeError, Unavailable

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effort:
    """Repeats of a point: between ``least`` and ``most``, until ``target_s`` is spent."""

    warm_up: int
    least: int
    most: int
    target_s: float


QUICK = Effort(warm_up=2, least=5, most=60, target_s=0.04)
FULL = Effort(warm_up=5, least=15, most=300, target_s=0.25)
ONCE = Effort(warm_up=0, least=1, most=1, target_s=0.0)
"""For a point that cannot be repeated cheaply: the start of an engine."""


@dataclass(frozen=True, slots=True)
class Part:
    """A resumable piece of work: points of one operator.

    The first point starts what all share (an engine). After it, no point begins later than ``limit_s``. Raises
    ValueError when a point lacks a column of its operator.
    """

    name: str
    operator: str
    points: tuple[Point, ...]
    effort: Effort
    limit_s: float
    expected_s: float

    def __post_init__(self) -> None:
        for point in self.points:
            if tuple(point) != KEYS[self.operator]:
                raise ValueError(f"{self.name}: a point of {self.operator} has {', '.join(KEYS[self.operator])}")


@dataclass(slots=True)
class Outcome:
    """The result of a part: rows, points without a row and the reasons, and the number that the time limit left out."""

    rows: list[Row] = field(default_factory=list)
    unavailable: list[tuple[Point, str]] = field(default_factory=list)
    left_out: int = 0
    device_lost: bool = False
    clocks: list[str] = field(default_factory=list)
    seconds: float = 0.0


def measure(prepared: Prepared, effort: Effort, now_s: Callable[[], float]) -> list[float]:
    """Measure the seconds of each repeat, after the warm-up."""
    if effort.warm_up:
        prepared.sample(effort.warm_up)
    seconds: list[float] = []
    start_s = now_s()
    while len(seconds) < effort.most and (len(seconds) < effort.least or now_s() - start_s < effort.target_s):
        seconds += prepared.sample(min(max(effort.least, len(seconds)), effort.most - len(seconds)))
    return seconds


def summary(seconds: Sequence[float]) -> Row:
    """Summarise one point's repeats: median, spread and count. Raises Unavailable for an impossible time."""
    bad = [value for value in seconds if not 0.0 < value < float("inf")]
    if bad:
        raise Unavailable(f"the clock gave {bad[0]:g} s")
    low, median, high = np.quantile(np.array(seconds), [0.25, 0.5, 0.75]).tolist()
    return {"latency_s": median, "spread": (high - low) / median, "repeats": len(seconds)}


def shuffled(part: Part) -> list[Point]:
    """Shuffle the part's points. Only the part's name determines the order."""
    points = list(part.points)
    random.Random(part.name).shuffle(points)
    return points


def measured_row(prepared: Prepared, point: Point, effort: Effort, now_s: Callable[[], float]) -> Row:
    """Measure a point that is ready to run, and close it. Raises Unavailable."""
    try:
        seconds = measure(prepared, effort, now_s)
    finally:
        prepared.close()
    return {**point, **summary(seconds), "implementation": prepared.implementation}


def run_part(part: Part, backend: Backend, advance: Callable[[int], None] = lambda points: None) -> Outcome:
    """Measure every point that the time limit allows, and call ``advance`` for each.

    A point that fails is recorded with its reason. It does not stop the others, unless the device is lost.
    """
    outcome, start_s, limit_s = Outcome(), backend.now_s(), math.inf
    outcome.clocks.append(backend.clocks())
    points = shuffled(part)
    for place, point in enumerate(points):
        if backend.now_s() > limit_s:
            outcome.left_out = len(points) - place
            break
        try:
            outcome.rows.append(measured_row(backend.prepare(part.operator, point), point, part.effort, backend.now_s))
        except Unavailable as reason:
            outcome.unavailable.append((point, str(reason)))
        except Exception as error:  # a kernel may raise anything; it must not stop the others
            outcome.unavailable.append((point, _first_line(error)))
            if not backend.healthy():
                outcome.device_lost, outcome.left_out = True, len(points) - place - 1
                break
        advance(1)
        limit_s = min(limit_s, backend.now_s() + part.limit_s)
    advance(outcome.left_out)
    outcome.clocks.append(backend.clocks())
    outcome.seconds = backend.now_s() - start_s
    return outcome


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


FORMAT = 1
FIELDS = ("identity", "effort", "digest", "operator", "date", "clocks", "seconds", "rows", "unavailable", "left_out")


@dataclass(frozen=True, slots=True)
class Finished:
    """A part as it stands on disk."""

    name: str
    operator: str
    date: str
    clocks: tuple[str, ...]
    seconds: float
    rows: tuple[Row, ...]
    unavailable: tuple[tuple[str, int], ...]
    """Reasons, and how many points each explains."""
    left_out: int


def digest(part: Part) -> str:
    """Digest everything that is asked of the part."""
    asked = [part.operator, [dict(point) for point in part.points], asdict(part.effort), part.limit_s]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _path(folder: Path, part: Part) -> Path:
    return folder / "parts" / f"{part.name}.json"


def write_part(folder: Path, part: Part, identity: Identity, effort: str, outcome: Outcome) -> None:
    """Write a finished part, whole or not at all. ``effort``: quick or full."""
    reasons: dict[str, int] = {}
    for _, reason in outcome.unavailable:
        reasons[reason] = reasons.get(reason, 0) + 1
    data = {
        "format": FORMAT,
        "identity": asdict(identity),
        "effort": effort,
        "digest": digest(part),
        "operator": part.operator,
        "date": datetime.now(UTC).date().isoformat(),
        "clocks": outcome.clocks,
        "seconds": round(outcome.seconds, 3),
        "rows": outcome.rows,
        "unavailable": reasons,
        "left_out": outcome.left_out,
    }
    path = _path(folder, part)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def finished(folder: Path, part: Part, identity: Identity) -> bool:
    """Say whether the part was finished on this device, with this software and the same points."""
    data = _read(_path(folder, part))
    return data is not None and data["identity"] == asdict(identity) and data["digest"] == digest(part)


def _read(path: Path) -> dict[str, Any] | None:
    """A part file; None where it is missing, damaged or of another format."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return data if data["format"] == FORMAT and set(FIELDS) <= set(data) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class Measured:
    """All finished parts of one device, software and effort."""

    identity: Identity
    effort: str
    parts: tuple[Finished, ...]


def collect(folder: Path) -> Measured:
    """Read the parts in a folder that belong to the one written last. Raises ProbeError when there is none."""
    paths = sorted((folder / "parts").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    read = {path.stem: data for path in paths if (data := _read(path)) is not None}
    if not read:
        raise ProbeError(f"{folder}: no finished parts; give a folder that fineserve-calibrate --gpu wrote")
    last = list(read.values())[-1]
    same = {name: data for name, data in read.items() if all(data[key] == last[key] for key in ("identity", "effort"))}
    return Measured(
        Identity(**last["identity"]), last["effort"], tuple(_finished(name, same[name]) for name in sorted(same))
    )


def _finished(name: str, data: dict[str, Any]) -> Finished:
    return Finished(
        name=name,
        operator=data["operator"],
        date=data["date"],
        clocks=tuple(data["clocks"]),
        seconds=data["seconds"],
        rows=tuple(data["rows"]),
        unavailable=tuple(data["unavailable"].items()),
        left_out=data["left_out"],
    )
