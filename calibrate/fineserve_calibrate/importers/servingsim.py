"""Import the layers that the authors of LLMServingSim profiled under vLLM (casys-kaist/LLMServingSim, MIT).

Layout: ``profiler/perf/GPU/OWNER/MODEL/bf16/tp1`` (``tp2``), in a folder or a tar file. Each file has rows of one layer of a
model, in microseconds:

* ``dense.csv``: matrix products and others by tokens. ``per_sequence.csv``: the lm_head by sequences.
* ``attention.csv``: attention of a batch with one chunk of a prompt, behind ``kv_prefill`` cached tokens, and ``n_decode``
  decodes with ``kv_decode`` keys each. Kept are chunks alone and decodes alone.

Shapes come from the catalog's model. Other models keep the ratio to the roofline of the nearest shape.

Where a GPU has tables by kernel already, decodes alone take the place of theirs: a kernel that is called again and again, on KV
that lies in order, takes up to a quarter less than inside an engine.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from fineserve_calibrate.compaction import compact, rounded
from fineserve_calibrate.tables import Column, Fingerprint, Table, check, check_columns, check_rows, joined, typed
from fineserve_sim.catalog import CatalogError, GpuSpec, Linear, ModelSpec, gpu, model, products
from fineserve_sim.latency.tables import DEVICES, Grid, TableError, TableSet

REPOSITORY, LICENCE = "casys-kaist/LLMServingSim @ 5daddb2", "MIT"
ROOT = "profiler/perf"
BATCH = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
DECODES = "decode_attention/bfloat16"
LAYERS = {"qkv_proj": "qkv", "o_proj": "o", "gate_up_proj": "gate_up", "down_proj": "down"}
"""Matrix products: as the profile names them, and as the catalog does."""


class Profile:
    """The files of one model on one GPU of a TP group; ``meta`` is what its profiler wrote."""

    def __init__(self, files: Mapping[str, bytes], folder: str, spec: ModelSpec, tp: int = 1) -> None:
        self._files, self.folder, self.model, self.tp = files, folder, spec, tp
        self.meta: dict[str, str] = yaml.safe_load(files[f"{folder}/meta.yaml"])

    @property
    def fingerprint(self) -> Fingerprint:
        """Where and when it was measured."""
        source = f"{REPOSITORY}, {ROOT}/{self.folder}/tp{self.tp}"
        repeats, made = str(self.meta.get("measurement_iterations", "unknown")), str(self.meta.get("profiled_at"))
        vllm, cuda = f"vllm {self.meta['vllm_version']}", str(self.meta.get("cuda_version", "unknown"))
        return Fingerprint(self.meta["gpu"], vllm, source, LICENCE, cuda=cuda, date=made, repeats=repeats)

    def rows(self, name: str, *columns: str) -> pd.DataFrame:
        """A file with its columns. Raises TableError where one is missing."""
        path = f"{self.folder}/tp{self.tp}/{name}.csv"
        if path not in self._files:
            raise TableError(f"{ROOT}/{path}: not there")
        frame = pd.read_csv(io.BytesIO(self._files[path]))
        check_columns(f"{ROOT}/{path}", list(frame.columns), (*columns, "time_us"))
        return frame

    def gemm(self) -> Table:
        """The products of a layer, and the lm_head."""
        shapes = {name: product.shape for name, product in products(self.model, 1).items()}
        dense = self.rows("dense", "layer", "tokens")
        parts = [_product(dense[dense.layer == theirs], "tokens", shapes[ours]) for theirs, ours in LAYERS.items()]
        heads = self.rows("per_sequence", "layer", "sequences")
        head = Linear(self.model.hidden_size, self.model.vocab_size)
        parts.append(_product(heads[heads.layer == "lm_head"], "sequences", head))
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return Table("gemm", typed(columns), self.fingerprint)

    def attention(self) -> list[Table]:
        """Prompt chunks without a prefix, and decodes, each alone."""
        frame = self.rows("attention", *BATCH)
        chunks = frame[(frame.n_decode == 0) & (frame.prefill_chunk > 0) & (frame.kv_prefill == 0)]
        chunks = chunks.rename(columns={"prefill_chunk": "new_tokens", "kv_prefill": "cached_tokens"}).assign(batch=1)
        return [
            self._attention("prefill_attention", chunks, "batch", "new_tokens", "cached_tokens"),
            self._attention("decode_attention", self.decodes(), "batch", "context"),
        ]

    def decodes(self) -> pd.DataFrame:
        """Attention of decodes alone."""
        frame = self.rows("attention", *BATCH)
        alone = frame[(frame.prefill_chunk == 0) & (frame.n_decode > 0)]
        return alone.rename(columns={"n_decode": "batch", "kv_decode": "context"})

    def _attention(self, operator: str, rows: pd.DataFrame, *work: str) -> Table:
        heads = {"q_heads": self.model.q_heads, "kv_heads": self.model.kv_heads, "head_dim": self.model.head_dim}
        columns = {name: np.full(len(rows), "bfloat16") for name in ("dtype", "kv_dtype")}
        columns |= {name: np.full(len(rows), value) for name, value in heads.items()}
        columns |= {name: rows[name].to_numpy() for name in work}
        return Table(operator, typed({**columns, "latency_s": rows.time_us.to_numpy() * 1e-6}), self.fingerprint)


def _product(rows: pd.DataFrame, count: str, shape: Linear) -> dict[str, Column]:
    size = len(rows)
    wide = {"n": np.full(size, shape.outputs), "k": np.full(size, shape.inputs)}
    return {
        "dtype": np.full(size, "bfloat16"),
        "m": rows[count].to_numpy(),
        **wide,
        "latency_s": rows.time_us.to_numpy() * 1e-6,
    }


def profiles(path: Path, spec: GpuSpec) -> list[Profile]:
    """The profiles of a GPU in a folder or a tar file, of models that the catalog has. Raises TableError without any, and for a
    GPU that has no tables."""
    if spec.name not in DEVICES:
        raise TableError(f"no tables of {spec.name} are known to ship; known: {', '.join(DEVICES)}")
    files = _files(path)
    found = []
    for name in files:
        folder, _, rest = name.rpartition("/")
        owner = folder.split("/")
        if rest != "meta.yaml" or len(owner) != 4:
            continue
        try:
            profile = Profile(files, folder, model(owner[2].lower()))
        except CatalogError:
            continue
        if profile.meta["gpu"] == DEVICES[spec.name]:
            found.append(profile)
    if not found:
        raise TableError(f"{path}: no {ROOT}/GPU/OWNER/MODEL/bf16 of {spec.name} and a model of the catalog")
    return found


def _files(path: Path) -> dict[str, bytes]:
    """Files beneath ``ROOT`` by their paths there. Raises TableError for a path that is neither folder nor tar file."""
    if path.is_dir():
        root = path / ROOT
        return {file.relative_to(root).as_posix(): file.read_bytes() for file in root.rglob("*") if file.is_file()}
    try:
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile() and member.name.startswith(f"{ROOT}/")]
            return {member.name.removeprefix(f"{ROOT}/"): _read(archive, member) for member in members}
    except (OSError, tarfile.TarError) as problem:
        raise TableError(f"{path}: neither a folder nor a tar file ({problem})") from None


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file else b""


def import_profiles(path: Path, gpu_name: str) -> TableSet:
    """The compact tables of a GPU. Raises TableError for other files, another GPU, or implausible rows."""
    spec = gpu(gpu_name)
    found = profiles(path, spec)
    tables = [
        joined(of_models) for of_models in zip(*([each.gemm(), *each.attention()] for each in found), strict=True)
    ]
    for table in tables:
        check_rows(table, DEVICES[gpu_name])
        check(table, DEVICES[gpu_name], spec)
    return compact(tables, spec)


def with_decodes(path: Path, tables: TableSet) -> TableSet:
    """The compact tables of a GPU, with decode attention in 16 bits as profiled, at the points that both have. Raises
    TableError as ``import_profiles``."""
    spec = gpu(tables.fingerprint["gpu"])
    grids, key = dict(tables.grids), "decode_attention/all"
    sources = [tables.fingerprint[f"{key} source"]]
    for profile in _each_degree(path, spec):
        name = f"{DECODES}/{profile.model.head_dim}"
        if name not in grids:
            continue
        grids[name], points = _profiled(grids[name], profile)
        sources.append(f"{points} points: {profile.fingerprint.source} (vllm {profile.meta['vllm_version']})")
    origin = {
        f"{key} source": "; ".join(sources),
        f"{key} licence": f"{tables.fingerprint[f'{key} licence']}, {LICENCE}",
    }
    return TableSet({**tables.fingerprint, **origin}, grids)


def _each_degree(path: Path, spec: GpuSpec) -> list[Profile]:
    """The profiles of a GPU at each TP degree that was profiled."""
    files = _files(path)
    found = [(one, int(tp)) for one in profiles(path, spec) for tp in one.meta["tp_degrees"]]
    return [Profile(files, one.folder, one.model, tp) for one, tp in found]


def _profiled(grid: Grid, profile: Profile) -> tuple[Grid, int]:
    """The grid with the profile's points, and how many they are."""
    heads = [profile.model.q_heads // profile.tp, profile.model.kv_heads // profile.tp]
    pairs, rows = grid.axes["heads"].tolist(), profile.decodes()
    rows = rows[rows.batch.isin(grid.axes["batch"]) & rows.context.isin(grid.axes["context"])]
    if heads not in pairs:
        return grid, 0
    place = pairs.index(heads), *(np.searchsorted(grid.axes[axis], rows[axis]) for axis in ("batch", "context"))
    seconds = grid.latency_s.copy()
    seconds[place] = rounded(rows.time_us.to_numpy() * 1e-6)
    return replace(grid, latency_s=seconds), len(rows)
