"""Import the measured kernel latencies of the published package ``aiconfigurator-core`` (NVIDIA, Apache-2.0).

Layout of 0.12.0: ``aiconfigurator_core/systems/data/SYSTEM/OPERATOR/BACKEND/VERSION/*_perf.parquet``, latencies in
milliseconds. Kept: GEMM in 16 bits and FP8, full (not windowed) prefill and decode attention, and the all-reduce that CUDA
graphs replay. The package has no int4 rows. A CSV file brings the rows of ``aiconfigurator`` 0.5.0 (``gemm_perf.txt``,
TensorRT-LLM).
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
from fineserve_calibrate.repairs import repaired
from fineserve_calibrate.tables import (
    LEAST_WIDTH,
    Column,
    Fingerprint,
    Table,
    check,
    check_columns,
    check_rows,
    joined,
    typed,
)
from fineserve_sim.catalog import gpu
from fineserve_sim.latency.tables import DEVICES, TableError

PACKAGE = "aiconfigurator-core"
REPOSITORY = "ai-dynamo/aiconfigurator"
DATA = "aiconfigurator_core/systems/data"
LICENCE = "Apache-2.0"
DTYPES = ("bfloat16", "fp8")  # no precision of the catalog is block-scaled
PCIE_GROUP = 2  # vLLM has an all-reduce of its own among so many GPUs without NVLink
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
        self.label = f"{PACKAGE} {dist_info[0].split('-')[1].removesuffix('.dist')}"

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
        self.label = f"{PACKAGE} {distribution.version}"
        self._root = Path(str(distribution.locate_file("")))

    def names(self) -> list[str]:
        """List the paths of the package's data files."""
        return [path.relative_to(self._root).as_posix() for path in (self._root / DATA).rglob("*.parquet")]

    def read(self, name: str) -> bytes:
        """Read one data file."""
        return (self._root / name).read_bytes()


class Folder:
    """The systems of the package's repository in a folder: ``SYSTEM/OPERATOR/BACKEND_VERSION/*_perf.parquet``.

    Its README names the commit. Raises TableError for a folder without tables.
    """

    def __init__(self, path: Path) -> None:
        self._files = {self._name(file.relative_to(path)): file for file in sorted(path.rglob("*_perf.parquet"))}
        if not self._files:
            raise TableError(f"{path}: no SYSTEM/OPERATOR/BACKEND_VERSION/*_perf.parquet in it")
        readme = path / "README.md"
        named = re.search(r"@ ([0-9a-f]{7,40})", readme.read_text(encoding="utf-8")) if readme.is_file() else None
        self.label = f"{REPOSITORY} @ {named[1] if named else 'unknown commit'}"

    @staticmethod
    def _name(file: Path) -> str:
        """The file's path as the package has it."""
        system, operator, version, name = file.parts[-4:]
        return "/".join((DATA, system, operator, *version.split("_", 1), name))

    def names(self) -> list[str]:
        """List the paths of all tables, as the package has them."""
        return list(self._files)

    def read(self, name: str) -> bytes:
        """Read one table."""
        return self._files[name].read_bytes()


Source = Wheel | Installed | Folder


def _version_key(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


@dataclass(frozen=True, slots=True)
class Importer:
    source: Source
    system: str
    backend: str

    def find(self, operator: str, file: str, backend: str) -> tuple[str, str]:
        """Path and backend version of the newest ``file``."""
        pattern = re.compile(f"{DATA}/{self.system}/{operator}/{backend}/([^/]+)/{file}")
        found = {match[1]: match[0] for name in self.source.names() if (match := pattern.fullmatch(name))}
        if not found:
            raise TableError(f"{self.source.label}: no {operator}/{backend}/*/{file} for system {self.system}")
        newest = max(found, key=_version_key)
        return found[newest], newest

    def read(
        self, operator: str, file: str, wanted: tuple[str, ...], optional: tuple[str, ...] = (), backend: str = ""
    ) -> tuple[dict[str, Column], Fingerprint]:
        """Wanted and present optional columns, latency in milliseconds, and under which conditions they were measured."""
        backend = backend or self.backend
        name, version = self.find(operator, file, backend)
        data = pq.read_table(io.BytesIO(self.source.read(name)))
        where = f"{self.source.label}: {name.removeprefix(DATA + '/')}"
        check_columns(where, data.column_names, (*wanted, "device", "latency"))
        columns = {column: data[column].to_numpy(zero_copy_only=False) for column in (*wanted, "latency")}
        columns |= {name: data[name].to_numpy() for name in optional if name in data.column_names}
        devices = set(data["device"].to_pylist())
        if len(devices) != 1:
            raise TableError(f"{where}: rows of several devices: {', '.join(sorted(devices))}")
        source = f"{self.source.label}, {name.removeprefix(DATA + '/')}"
        return columns, Fingerprint(devices.pop(), f"{backend} {version}", source, LICENCE)

    def gemm(self) -> Table:
        """Matrix products in ``DTYPES`` by m, n, k, as wide as layers ask for."""
        columns, fingerprint = self.read("gemm", "gemm_perf.parquet", ("gemm_dtype", "m", "n", "k"))
        every = _table("gemm", {"dtype": columns["gemm_dtype"], **{x: columns[x] for x in "mnk"}}, columns, fingerprint)
        wide = np.minimum(every.columns["n"], every.columns["k"]) >= LEAST_WIDTH
        return every.where(wide & np.isin(every.columns["dtype"], DTYPES))

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

    def all_reduce(self, through_host: bool) -> Table:
        """All-reduce, as CUDA graphs launch it where eager launches were measured apart. Sizes come in elements.

        ``through_host``: GPUs without NVLink, among more than two of which vLLM leaves all-reduce to NCCL.
        """
        wanted = ("kernel_source", "allreduce_dtype", "num_gpus", "message_size")
        columns, fingerprint = self.read("comm", "custom_allreduce_perf.parquet", wanted)
        eager = np.array([str(kernel).endswith("_eager") for kernel in columns["kernel_source"]])
        columns = {name: values[~eager] for name, values in columns.items()}
        elements = {"bfloat16": 2, "float16": 2, "half": 2}
        size = np.array([elements.get(str(dtype), 1) for dtype in columns["allreduce_dtype"]])
        named = {"dtype": columns["allreduce_dtype"], "gpus": columns["num_gpus"]}
        custom = _table("all_reduce", {**named, "message_bytes": columns["message_size"] * size}, columns, fingerprint)
        return joined((custom.where(custom.columns["gpus"] <= PCIE_GROUP), self.nccl())) if through_host else custom

    def nccl(self) -> Table:
        """All-reduce by NCCL among more than two GPUs, in 16 bits."""
        wanted = ("op_name", "nccl_dtype", "num_gpus", "message_size")
        columns, fingerprint = self.read("comm", "nccl_perf.parquet", wanted, backend="nccl")
        keep = (columns["op_name"] == "all_reduce") & (columns["nccl_dtype"] == "half")
        keep &= columns["num_gpus"] > PCIE_GROUP
        columns = {name: values[keep] for name, values in columns.items()}
        dtype = np.full(int(keep.sum()), "bfloat16")
        named = {"dtype": dtype, "gpus": columns["num_gpus"], "message_bytes": 2 * columns["message_size"]}
        return _table("all_reduce", named, columns, fingerprint)


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
    importer = Importer(source, system, backend)
    spec, device = gpu(SYSTEMS[system]), DEVICES[SYSTEMS[system]]
    tables = [
        importer.gemm(),
        importer.attention("prefill_attention", "context_attention_perf.parquet"),
        importer.attention("decode_attention", "generation_attention_perf.parquet"),
        importer.all_reduce(through_host=not spec.nvlink_bytes_per_s),
    ]
    if int4_csv is not None:
        tables.append(weight_only(int4_csv, device))
    for table in tables:
        check_rows(table, device)
    tables = [repaired(table, spec) for table in tables]
    for table in tables:
        check(table, device, spec)
    return tables


def imported(wheel: str, system: str, backend: str, int4_csv: Path | None) -> list[Table]:
    """Import from a wheel file, a folder of systems, or the package where ``wheel`` is ``installed``. Raises TableError."""
    return import_tables(opened(wheel), system, backend, int4_csv)


def opened(wheel: str) -> Source:
    """The package's tables: ``installed``, a wheel file or a folder of systems. Raises TableError."""
    if wheel == "installed":
        return Installed()
    return Folder(Path(wheel)) if Path(wheel).is_dir() else Wheel(Path(wheel))
