"""From finished parts to tables, the simulator's table set and the report. Needs no device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fineserve_calibrate.compaction import compact
from fineserve_calibrate.probes.devices import catalog_name
from fineserve_calibrate.probes.parts import collect
from fineserve_calibrate.probes.report import write_report
from fineserve_calibrate.probes.store import tables, write_tables
from fineserve_calibrate.tables import COLUMNS, Table
from fineserve_sim.catalog import GpuSpec, gpu
from fineserve_sim.latency.tables import TableError, save

NEEDED = ("gemm", "prefill_attention", "decode_attention")


def conclude(folder: Path) -> list[Path]:
    """Write tables, table set and report of the parts in ``folder``; the files written.

    Raises ProbeError when there are no parts.
    """
    measured = collect(folder)
    name = catalog_name(measured.identity.device)
    spec = gpu(name) if name else None
    found = tables(measured)
    written = write_tables(found, folder)
    note = _compact(found, spec, folder)
    if note.endswith(".npz"):
        written.append(folder / note)
    return [*written, *write_report(folder, measured, found, spec, note)]


def _compact(found: Sequence[Table], spec: GpuSpec | None, folder: Path) -> str:
    """Name of the table set that the simulator loads, or why there is none."""
    known = [table for table in found if table.operator in COLUMNS]
    if spec is None:
        return "no table set for the simulator: the device is not in its catalog"
    if set(NEEDED) - {table.operator for table in known}:
        return f"no table set for the simulator: it needs {', '.join(NEEDED)}"
    try:
        compacted = compact(known, spec)
    except (TableError, ValueError) as error:
        return f"no table set for the simulator: {error}"
    save(folder / f"{spec.name}.npz", compacted)
    return f"{spec.name}.npz"
