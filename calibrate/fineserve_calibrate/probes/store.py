"""Tables made of finished parts, one an operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from fineserve_calibrate.probes.parts import Finished, Measured, Row
from fineserve_calibrate.probes.schema import KEYS, MEASURED, Identity
from fineserve_calibrate.tables import Fingerprint, Table, write_table


def _own_version() -> str:
    try:
        return version("fineserve")
    except PackageNotFoundError:
        return "from source"


def fingerprint(parts: Sequence[Finished], identity: Identity, rows: Sequence[Row], effort: str) -> Fingerprint:
    spread = np.quantile([row["spread"] for row in rows], [0.5, 0.9])
    repeats = [row["repeats"] for row in rows]
    clocks = dict.fromkeys(clock for part in parts for clock in part.clocks)
    return Fingerprint(
        device=identity.device,
        backend=f"vllm {identity.vllm}" if identity.vllm != "none" else f"torch {identity.torch}",
        source=f"fineserve-calibrate {_own_version()} probes, {effort}",
        licence="Apache-2.0",
        driver=identity.driver,
        cuda=identity.cuda,
        torch=identity.torch,
        date=" to ".join(sorted({min(part.date for part in parts), max(part.date for part in parts)})),
        clocks="; ".join(clocks),
        repeats=f"{min(repeats)} to {max(repeats)} a row",
        spread=f"interquartile range / median of a row: median {spread[0]:.1%}, p90 {spread[1]:.1%}",
    )


def tables(measured: Measured) -> list[Table]:
    """Make one table an operator that has rows, sorted by its key columns."""
    by_operator: dict[str, list[Finished]] = {}
    for part in measured.parts:
        if part.rows:
            by_operator.setdefault(part.operator, []).append(part)
    result = []
    for operator, parts in by_operator.items():
        keys = KEYS[operator]
        rows = sorted((row for part in parts for row in part.rows), key=lambda row: [row[name] for name in keys])
        columns = {name: np.array([row[name] for row in rows]) for name in (*keys, *MEASURED)}
        result.append(Table(operator, columns, fingerprint(parts, measured.identity, rows, measured.effort)))
    return result


def write_tables(found: Iterable[Table], folder: Path) -> list[Path]:
    """Write one Parquet file an operator. Return the files."""
    paths = []
    for table in found:
        path = folder / f"{table.operator}.parquet"
        write_table(table, path)
        paths.append(path)
    return paths
