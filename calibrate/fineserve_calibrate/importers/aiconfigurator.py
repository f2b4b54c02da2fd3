"""Import the measured kernel latencies of the published package ``aiconfigurator-core`` (NVIDIA, Apache-2.0).

Layout of 0.12.0: ``aiconfigurator_core/systems/data/SYSTEM/OPERATOR/BACKEND/VERSION/*_perf.parquet``, latencies in
milliseconds. Kept: GEMM, full (not windowed) prefill and decode attention, and the all-reduce that CUDA graphs replay.
The package has no int4 rows. A CSV file brings the rows of ``aiconfigurator`` 0.5.0 (``gemm_perf.txt``, TensorRT-LLM).
"""

from __future__ import annotations

import importlib.metadata
import io
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from fineserve_calibrate.importers import SYSTEMS
from fineserve_calibrate.tables import Column, Fingerprint, Table, check, check_columns, typed
from fineserve_sim.catalog import gpu
from fineserve_sim.latency.tables import TableError

PACKAGE = "aiconfigurator-core"
DATA = "aiconfigurator_core/systems/data"
LICENCE = "Apache-2.0"
_ATTENTION = ("attn_dtype", "kv_cache_dtype", "num_heads", "num_key_value_heads", "head_dim", "batch_size")
_HEADS = ("dtype", "kv_dtype", "q_heads", "kv_heads", "head_dim", "batch")


class Wheel:
    """The package's files in a wheel that was downloaded. Raises TableError for another file."""

    def __init__(self, path: Path) -> None:
        try:
            self._archive = zipfile.ZipFile(path)
        except OSError as error:
            raise TableError(f"{path}: cannot be read: {error.strerror}") from None
        except zipfile.BadZipFile as error:
            raise TableError(f"{path}: not a wheel ({error})") from error
        dist_info = [name for name in self.names() if name.endswith(".dist-info/METADATA")]
        if not dist_info or not dist_info[0].startswith("aiconfigurator_core-"):
            raise TableError(f"{path}: not a wheel of {PACKAGE}")
        self.version = dist_info[0].split("-")[1].removesuffix(".dist")

    def names(self) -> list[str]:
        """List the paths of all files in the wheel."""
        return self._archive.namelist()

    def read(self, name: str) -> bytes:
        """Read one file of the wheel."""
        return self._archive.read(name)


class Installed:
    """The package's files as installed beside this package. Raises TableError where it is not."""

    def __init__(self) -> None:
        try:
            distribution = importlib.metadata.distribution(PACKAGE)
        except importlib.metadata.PackageNotFoundError as error:
            raise TableError(f"{PACKAGE} is not installed; install it or give --wheel FILE") from error
        self.version = distribution.version
        self._root = Path(str(distribution.locate_file("")))

    def names(self) -> list[str]:
        """List the paths of the package's data files."""
        return [path.relative_to(self._root).as_posix() for path in (self._root / DATA).rglob("*.parquet")]

    def read(self, name: str) -> bytes:
        """Read one data file."""
        return (self._root / name).read_bytes()


Source = Wheel | Installed


def _version_key(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


@dataclass(frozen=True, slots=True)
class _Importer:
    source: Source
    system: str
    backend: str

    def find(self, operator: str, file: str) -> tuple[str, str]:
        """Path and backend version of the newest ``file``."""
        pattern = re.compile(f"{DATA}/{self.system}/{operator}/{self.backend}/([^/]+)/{file}")
        found = {match[1]: match[0] for name in self.source.names() if (match := pattern.fullmatch(name))}
        if not found:
            raise TableError(
                f"{PACKAGE} {self.source.version}: no {operator}/{self.backend}/*/{file} for system {self.system}"
            )
        newest = max(found, key=_version_key)
        return found[newest], newest

    def read(
        self, operator: str, file: str, wanted: tuple[str, ...], optional: tuple[str, ...] = ()
    ) -> tuple[dict[str, Column], Fingerprint]:
        """Wanted and present optional columns, latency in milliseconds, and under which conditions they were measured."""
        name, version = self.find(operator, file)
        data = pq.read_table(io.BytesIO(self.source.read(name)))
        where = f"{PACKAGE} {self.source.version}: {name.removeprefix(DATA + '/')}"
        check_columns(where, data.column_names, (*wanted, "device", "latency"))
        columns = {column: data[column].to_numpy(zero_copy_only=False) for column in (*wanted, "latency")}
        columns |= {name: data[name].to_numpy() for name in optional if name in data.column_names}
        devices = set(data["device"].to_pylist())
        if len(devices) != 1:
            raise TableError(f"{where}: rows of several devices: {', '.join(sorted(devices))}")
        source = f"{PACKAGE} {self.source.version}, {name.removeprefix(DATA + '/')}"
        return columns, Fingerprint(devices.pop(), f"{self.backend} {version}", source, LICENCE)

    def gemm(self) -> Table:
        """Matrix products by dtype and m, n, k."""
        columns, fingerprint = self.read("gemm", "gemm_perf.parquet", ("gemm_dtype", "m", "n", "k"))
        return _table("gemm", {"dtype": columns["gemm_dtype"], **{x: columns[x] for x in "mnk"}}, columns, fingerprint)

    def attention(self, operator: str, file: str) -> Table:
        """Full attention of one layer; ``step`` is what is cached already. Older tables have no windowed rows."""
        columns, fingerprint = self.read("attention", file, (*_ATTENTION, "isl", "step"), ("window_size",))
        full = columns["window_size"] == 0 if "window_size" in columns else np.ones(len(columns["isl"]), dtype=bool)
        columns = {name: values[full] for name, values in columns.items()}
        named = {ours: columns[theirs] for ours, theirs in zip(_HEADS, _ATTENTION, strict=True)}
        if operator == "decode_attention":
            named["context"] = columns["step"] + 1
        else:
            named |= {"new_tokens": columns["isl"], "cached_tokens": columns["step"]}
        return _table(operator, named, columns, fingerprint)

    def all_reduce(self) -> Table:
        """All-reduce, as CUDA graphs launch it where eager launches were measured apart. Sizes come in elements."""
        wanted = ("kernel_source", "allreduce_dtype", "num_gpus", "message_size")
        columns, fingerprint = self.read("comm", "custom_allreduce_perf.parquet", wanted)
        eager = np.array([str(kernel).endswith("_eager") for kernel in columns["kernel_source"]])
        columns = {name: values[~eager] for name, values in columns.items()}
        elements = {"bfloat16": 2, "float16": 2, "half": 2}
        size = np.array([elements.get(str(dtype), 1) for dtype in columns["allreduce_dtype"]])
        named = {"dtype": columns["allreduce_dtype"], "gpus": columns["num_gpus"]}
        return _table("all_reduce", {**named, "message_bytes": columns["message_size"] * size}, columns, fingerprint)


def _table(
    operator: str, named: Mapping[str, Column], columns: Mapping[str, Column], fingerprint: Fingerprint
) -> Table:
    """A table in our columns, milliseconds made seconds."""
    return Table(operator, typed({**named, "latency_s": columns["latency"] / 1e3}), fingerprint)


def weight_only(path: Path, device: str) -> Table:
    """Read the int4_wo rows of a ``gemm_perf`` CSV file (columns gemm_dtype, m, n, k and latency or latency_ms).

    Latencies are milliseconds there. Raises TableError for another file, or one without such rows.
    """
    try:
        data = pyarrow.csv.read_csv(path)  # decompresses .gz by its name
    except (OSError, pa.ArrowInvalid) as error:
        raise TableError(f"{path.name}: not a readable CSV file ({error})") from error
    latency = "latency_ms" if "latency_ms" in data.column_names else "latency"
    check_columns(path.name, data.column_names, ("gemm_dtype", "m", "n", "k", latency))
    columns = {name: data[name].to_numpy(zero_copy_only=False) for name in ("gemm_dtype", "m", "n", "k", latency)}
    rows = columns["gemm_dtype"] == "int4_wo"
    if not rows.any():
        raise TableError(f"{path.name}: no rows of gemm_dtype int4_wo")
    named = {"dtype": columns["gemm_dtype"][rows], **{x: columns[x][rows] for x in "mnk"}}
    fingerprint = Fingerprint(device, "trtllm 1.2.0rc5", "aiconfigurator 0.5.0, h100_sxm/trtllm gemm_perf", LICENCE)
    return _table("gemm", named, {"latency": columns[latency][rows]}, fingerprint)


def import_tables(source: Source, system: str, backend: str, int4_csv: Path | None = None) -> list[Table]:
    """Import every table of ``system`` and ``backend``, checked.

    Raises TableError for an unknown system or backend, other columns, another GPU, or implausible rows.
    """
    if system not in SYSTEMS:
        raise TableError(f"unknown system {system!r}; known: {', '.join(SYSTEMS)}")
    importer = _Importer(source, system, backend)
    tables = [
        importer.gemm(),
        importer.attention("prefill_attention", "context_attention_perf.parquet"),
        importer.attention("decode_attention", "generation_attention_perf.parquet"),
        importer.all_reduce(),
    ]
    gpu_name, device = SYSTEMS[system]
    if int4_csv is not None:
        tables.append(weight_only(int4_csv, device))
    for table in tables:
        check(table, device, gpu(gpu_name))
    return tables


def imported(wheel: str, system: str, backend: str, int4_csv: Path | None) -> list[Table]:
    """Import from a wheel file, or from the package where ``wheel`` is ``installed``. Raises TableError."""
    source = Installed() if wheel == "installed" else Wheel(Path(wheel))
    return import_tables(source, system, backend, int4_csv)
