"""From the rows of a measured file to cases: columns checked, benchmarks' names resolved, settings supported."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import pandas as pd

from fineserve_evidence.validate.cases import Case, Serving
from fineserve_evidence.validate.predict import block_bytes, kv_bytes
from fineserve_sim.catalog import CatalogError, GpuSpec, ModelSpec, PrecisionSpec, check_tp, gpu, model, precision
from fineserve_sim.latency.rates import resolve

T = TypeVar("T")
STEPS_AHEAD = 1
"""vLLM schedules the next step while one runs, by default from 0.14 on. A request that comes meanwhile is in the step after."""
HIDDEN = "vllm-0.16"
"""The deployment of releases that hide the host's time so. In the runs of 0.15.1 (BLIS) it still shows."""
HIDDEN_FROM, AHEAD_FROM = (0, 16), (0, 14)


def host_of(version: tuple[int, ...], *, ahead: bool = False) -> str | None:
    """The deployment of a release of vLLM that schedules ahead, which earlier ones do when asked to; None for others."""
    if version >= HIDDEN_FROM or (ahead and version < AHEAD_FROM):
        return HIDDEN
    return "vllm-cudagraph" if version >= AHEAD_FROM else None


class LayoutError(ValueError):
    """A file's columns are none of the known layouts, or a value cannot be read. The text is one line."""


def read_columns(path: Path) -> pd.DataFrame:
    """Read the file as a frame. Raises LayoutError when it is no readable CSV, or no JSON lines."""
    try:
        if ".jsonl" in path.suffixes:
            return pd.read_json(path, lines=True)
        return pd.read_csv(path, sep="\t" if path.suffix == ".tsv" else ",")
    except (OSError, ValueError, pd.errors.ParserError) as error:
        kind = "file of JSON lines" if ".jsonl" in path.suffixes else "CSV file"
        raise LayoutError(f"{path}: not a readable {kind} ({error})") from error


def check_positive(frame: pd.DataFrame, columns: tuple[str, ...], path: Path, may_miss: tuple[str, ...] = ()) -> None:
    """Raise LayoutError with file, row and column of the first value that is not a number above zero.

    Columns in ``may_miss`` may have empty fields: the row lacks that measurement.
    """
    for column in columns:
        numbers = pd.to_numeric(frame[column], errors="coerce")
        bad = ~(numbers > 0)
        if column in may_miss:
            bad &= frame[column].notna()
        if bad.any():
            row = int(bad.to_numpy().argmax())
            place = f"row {frame.index[row] + 1}, column {column}"
            raise LayoutError(f"{path}, {place}: {frame[column].iloc[row]} is no number above 0")


def stem(path: Path) -> str:
    """Name the set: the file's name up to its first dot."""
    return path.name.split(".")[0]


_GPUS = {
    **dict.fromkeys(("h100", "h100_sxm", "nvidia h100 80gb hbm3"), "h100-sxm"),
    **dict.fromkeys(("h200", "h200_sxm"), "h200-sxm"),
    **dict.fromkeys(("a100", "a100_sxm"), "a100-80gb"),
    **{"rtxpro6000": "rtx-pro-6000-server", "rtx4090": "rtx-4090", "h100_pcie": "h100-pcie", "b200_sxm": "b200"},
}
_SUFFIXES = re.compile(
    r"-(instruct|chat|it|base|hf|bf16|fp16|fp8|fp8_kv8|dynamic|block|awq|gptq|int4|w4a16|w8a8|quantized|17b-\d+e|v\d[.-]\d|\d{4})(?=[-.]|$)"
)
_FAMILY = re.compile(r"^(llama|qwen|yi|opt|mistral)-?(?=\d)")
"""``llama3.1-8b`` and ``qwen-2.5-14b`` as the catalog spells them: Llama, Yi, OPT and Mistral with a dash, Qwen without."""
_PRECISIONS = {
    **dict.fromkeys(("", "org", "bf16", "fp16", "float16", "bfloat16"), "fp16"),
    **dict.fromkeys(("w8a8", "fp8", "fp8_block", "fp8_static", "fp8_dynamic", "fp8_ootb"), "fp8-kv16"),
    **dict.fromkeys(("fp4", "nvfp4"), "nvfp4"),
    **dict.fromkeys(("awq", "int4_wo", "int4_awq", "w4a16", "w4a16_awq"), "awq"),
    **{"fp8_kv8": "fp8", "qoq": "qoq"},
}


class UnsupportedRow(ValueError):
    """No case can stand for a row. The text is the reason under which the row is counted."""


def model_named(name: str) -> ModelSpec:
    """Find the model of a checkpoint name such as ``meta-llama/Llama-3.1-8B-Instruct``. Raises UnsupportedRow."""
    short = str(name).rsplit("/", 1)[-1].lower().replace("_", "-").removeprefix("meta-")
    plain = _FAMILY.sub(lambda found: found[1] if found[1] == "qwen" else f"{found[1]}-", _SUFFIXES.sub("", short))
    try:
        return model(plain)
    except CatalogError:
        raise UnsupportedRow("model not in the catalog") from None


def gpu_named(name: str) -> GpuSpec:
    """Find a GPU by the name that a benchmark prints. Raises UnsupportedRow for a GPU that the catalog lacks."""
    key = str(name).lower()
    try:
        return gpu(_GPUS.get(key, key))
    except CatalogError:
        raise UnsupportedRow(f"GPU {name} not in the catalog") from None


def precision_named(name: str) -> PrecisionSpec:
    """Find the precision of a quantisation name; an empty one is 16-bit. Raises UnsupportedRow."""
    try:
        return precision(_PRECISIONS.get(str(name).lower(), str(name)))
    except CatalogError:
        raise UnsupportedRow(f"precision {name}") from None


def stored(model: ModelSpec, format_: PrecisionSpec) -> PrecisionSpec:
    """The 4-bit format of a model's checkpoint, under the catalog's name; other precisions as they are."""
    own = precision(model.checkpoint)
    return own if own.weight_bits == format_.weight_bits == 4 else format_


def supported(serving: Serving) -> Serving:
    """Return ``serving`` when the simulator can serve it.

    Raises UnsupportedRow when the model does not split over its TP degree or does not fit into the GPU's memory. Raises it,
    too, when precision, TP degree or deployment have no rates there.
    """
    try:
        check_tp(serving.model, serving.tp)
        resolve(serving.gpu, serving.precision, serving.tp, serving.model.experts is not None)
        serving.deployment.floor(serving.precision.name)
    except (CatalogError, ValueError) as error:
        raise UnsupportedRow(str(error)) from None
    if kv_bytes(serving) < block_bytes(serving):
        raise UnsupportedRow(f"does not fit into the memory of {serving.gpu.name} at TP {serving.tp}")
    return serving


def cases_of(
    rows: Iterable[T],
    case_of: Callable[[T], Case],
    engine: Callable[[T], tuple[str, str]],
    size: Callable[[T], int] = lambda row: 1,
) -> tuple[tuple[Case, ...], Counter[tuple[str, str, str]]]:
    """Make a case of every row or run, and count the rows that no case can stand for by (backend, model, reason).

    ``engine`` says backend and model, ``size`` the number of rows.
    """
    cases, unsupported = [], Counter[tuple[str, str, str]]()
    for row in rows:
        try:
            cases.append(case_of(row))
        except UnsupportedRow as reason:
            unsupported[*engine(row), str(reason)] += size(row)
    return tuple(cases), unsupported
