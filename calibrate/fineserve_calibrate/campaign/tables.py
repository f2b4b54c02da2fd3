"""Parquet tables of a campaign: columns and fingerprint as those of the probes. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fineserve_calibrate.campaign.items import SHARING_KEYS
from fineserve_calibrate.campaign.journal import Entry
from fineserve_calibrate.probes.backend import Identity
from fineserve_calibrate.probes.parts import Finished, Measured
from fineserve_calibrate.probes.store import fingerprint, tables, write_tables
from fineserve_calibrate.tables import Table

SHARING, TRIALS, EFFORT = "sharing", "trials", "campaign"
CLOCKS_SHOWN = 6
COLUMNS = (*SHARING_KEYS, "latency_s", "mean_s", "p90_s", "spread", "repeats", "implementation")


def campaign_tables(identity: Identity, entries: Iterable[Entry]) -> list[Table]:
    """One table an operator that has rows, sorted by its key columns; ``trials`` are none."""
    parts = _parts(entries)
    found = tables(Measured(identity, EFFORT, tuple(part for part in parts if part.operator not in (SHARING, TRIALS))))
    sharing = [part for part in parts if part.operator == SHARING]
    rows = sorted((row for part in sharing for row in part.rows), key=lambda row: [row[key] for key in SHARING_KEYS])
    if rows:
        columns = {name: np.array([row[name] for row in rows]) for name in COLUMNS}
        found.append(Table(SHARING, columns, fingerprint(sharing, identity, rows, EFFORT)))
    return found


def write(folder: Path, identity: Identity, entries: Iterable[Entry]) -> list[Path]:
    """Write them; the files."""
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
