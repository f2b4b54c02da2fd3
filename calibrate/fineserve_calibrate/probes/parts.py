"""Finished parts on disk.

``parts/NAME.json`` is one part with the identity of the device and a digest of what was asked; it is written to a temporary
file and renamed, so that it is either whole or not there. A part whose identity and digest match is not measured again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fineserve_calibrate.probes.backend import Identity, ProbeError
from fineserve_calibrate.probes.runner import Outcome, Part, Row

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
    """Changes with anything that is asked of the part."""
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
    """Whether the part was finished on this device with this software, and asked the same; else it must be measured."""
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
    """The parts in a folder that belong to the one written last. Raises ProbeError when there is none."""
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
