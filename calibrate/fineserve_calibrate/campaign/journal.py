"""What a campaign has measured, on disk: one line of JSON a measurement, written when it ends.

The first line says what device and software the folder is of; a folder is of one. A line that was not written to its end
(the machine went) does not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fineserve_calibrate.campaign.items import Item
from fineserve_calibrate.probes.backend import Identity, ProbeError

FORMAT = 1
Entry = dict[str, Any]
"""key, part, table, asked, rows, reason (None: measured), seconds, setup_s, date, clocks."""


class Journal:
    """The measurements of one folder, as ``DIR/journal.jsonl``.

    Raises ProbeError when the folder holds another device's, or one measured with other software.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.path = folder / "journal.jsonl"
        self.identity = identity
        self.entries: dict[str, Entry] = {}
        if self.path.exists():
            found, entries = read_journal(self.path.read_text(encoding="utf-8"), str(self.path))
            if found != identity:
                differs = [name for name, value in asdict(found).items() if value != getattr(identity, name)]
                was = ", ".join(f"{name} {getattr(found, name)}" for name in differs)
                raise ProbeError(f"--out {folder}: holds a campaign of another machine ({was}); give another folder")
            self.entries = {entry["key"]: entry for entry in entries}

    def add(self, item: Item, outcome: Mapping[str, Any]) -> None:
        """Write a measurement. ``outcome``: rows, reason, seconds, setup_s, clocks."""
        entry = {"key": item.key, "part": item.part, "table": item.table, "asked": item.asked, **outcome}
        entry["date"] = datetime.now(UTC).date().isoformat()
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"format": FORMAT, "identity": asdict(self.identity)})
        self._append(entry)
        self.entries[item.key] = entry

    def _append(self, line: Mapping[str, Any]) -> None:
        """A line of its own, even behind one that was cut off; on the disk before this returns."""
        with self.path.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def done(self, item: Item, retry: bool = False) -> bool:
        """Whether the item was measured or could not be; with ``retry`` only the former counts."""
        entry = self.entries.get(item.key)
        return entry is not None and (entry["reason"] is None or not retry)


def read_journal(text: str, where: str) -> tuple[Identity, list[Entry]]:
    """Identity and entries of a journal, the last of each key. Raises ProbeError for what is none."""
    lines = [parsed for line in text.splitlines() if (parsed := _parsed(line)) is not None]
    if not lines or lines[0].get("format") != FORMAT:
        raise ProbeError(f"{where}: no campaign's journal of format {FORMAT}")
    entries = {entry["key"]: entry for entry in lines[1:] if "key" in entry}
    return Identity(**lines[0]["identity"]), list(entries.values())


def _parsed(line: str) -> Entry | None:
    try:
        parsed = json.loads(line)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


class Pace:
    """How long things take here, against what the plan expects: the ratio over all that was measured of a part, and over
    all setups. 1 as long as nothing was."""

    def __init__(self, entries: Sequence[Entry], expected: Mapping[str, Item]) -> None:
        self._items: dict[str, list[tuple[float, float]]] = {}
        self._setups: list[tuple[float, float]] = []
        for entry in entries:
            if entry["key"] in expected and entry["reason"] is None:
                self.note(expected[entry["key"]], entry)

    def note(self, item: Item, outcome: Mapping[str, Any]) -> None:
        """Learn from a measurement."""
        self._items.setdefault(item.part, []).append((outcome["seconds"], item.expected_s))
        if outcome["setup_s"] and item.setup_s:
            self._setups.append((outcome["setup_s"], item.setup_s))

    def item_s(self, item: Item) -> float:
        return item.expected_s * _ratio(self._items.get(item.part, ()))

    def setup_s(self, item: Item) -> float:
        return item.setup_s * _ratio(self._setups)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(took for took, _ in pairs) / sum(expected for _, expected in pairs) if pairs else 1.0
