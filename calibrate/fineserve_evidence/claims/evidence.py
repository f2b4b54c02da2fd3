"""The evidence on a claim (imported tables, and tables that the probes wrote), and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fineserve_sim.latency.tables import TableError, TableSet

US, MS, GIB = 1e-6, 1e-3, 2**30


class Missing(Exception):
    """A claim needs tables that were not measured. The text says what would measure them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a claim.

    ``found`` is what the evidence shows, with its numbers. ``evidence`` names the tables read. ``decide`` says what would
    decide an open claim.
    """

    status: Literal["holds", "fails", "open"]
    found: str
    evidence: str = ""
    decide: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def judged(holds: bool, found: str, evidence: str) -> Verdict:
    """Decide a claim."""
    return Verdict("holds" if holds else "fails", found, evidence)


def undecided(decide: str, found: str = "", evidence: str = "") -> Verdict:
    """Leave a claim open. ``found`` is the part of it that is known."""
    return Verdict("open", found, evidence, decide)


def probe(part: str) -> str:
    """Name the command that measures what is missing."""
    return f"fineserve-calibrate --gpu h100 --only {part} --out DIR, then claims --probes DIR"


@dataclass(frozen=True, slots=True)
class Evidence:
    """The imported tables of the GPU that the simulator ships, and probe tables by operator (frames of their columns)."""

    imported: TableSet
    probes: Mapping[str, pd.DataFrame]

    def measured(self, operator: str, **where: Any) -> pd.DataFrame:
        """Select the rows of a probe table with these values; none where nothing was measured."""
        rows = self.probes.get(operator, pd.DataFrame())
        for column, value in where.items():
            if rows.empty:
                return rows
            rows = rows[rows[column] == value]
        return rows

    def needed(self, part: str, operator: str, **where: Any) -> pd.DataFrame:
        """Select rows as ``measured`` does. Raises Missing, naming the part that measures them, where there are none."""
        rows = self.measured(operator, **where)
        if rows.empty:
            raise Missing(probe(part))
        return rows


def read_probes(folder: Path) -> dict[str, pd.DataFrame]:
    """Read tables by operator as the probes write them: one Parquet file an operator.

    Raises TableError for a folder without tables, or for another kind of file.
    """
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise TableError(
            f"--probes {folder}: no tables there; fineserve-calibrate --gpu h100 --out {folder} writes them"
        )
    found = {}
    for path in paths:
        try:
            found[path.stem] = pq.read_table(path).to_pandas()
        except (OSError, pa.ArrowInvalid) as error:
            raise TableError(f"{path.name}: not a Parquet file ({error})") from error
        if "latency_s" not in found[path.stem]:
            raise TableError(f"{path.name}: no column latency_s; found {', '.join(map(str, found[path.stem].columns))}")
    return found
