"""The column layouts of measured files, and the reader of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fineserve_evidence.validate import (
    aegaeon,
    authors,
    gpustack,
    inferencex,
    kvcached,
    lmbench,
    many_models,
    open_loops,
    servingsim,
    silicon,
)
from fineserve_evidence.validate.cases import MeasuredSet
from fineserve_evidence.validate.predict import StepFactory
from fineserve_evidence.validate.rows import LayoutError, read_columns

__all__ = ["KNOWN_FILES", "LAYOUTS", "OWN_FILES", "Layout", "LayoutError", "read_set"]

KNOWN_FILES = (
    "fineserve_authors_h100_8b.csv",
    "aic_silicon_hopper.csv.gz",
    "blis_vllm_h100_groundtruth.csv",
    "llmd_lmbench_requests.csv.gz",
    "kvcached_multi_llm_summary.csv.gz",
    "distserve_opt13b_a100_requests.csv.gz",
    "fineserve_authors_h100_8b_tp2.csv",
    "aic_silicon_qwen3_32b_tp4.csv.gz",
    "aegaeon_static_qwen2.5_7b.csv",
)
"""The measured sets, by name in their folder."""

OWN_FILES = (many_models.FILE,)
"""The measured sets that are part of this package."""


class Layout(NamedTuple):
    """A column layout and its reader."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[pd.DataFrame, Path, StepFactory], MeasuredSet]


LAYOUTS = (
    Layout("FineServe profile", authors.COLUMNS, lambda frame, path, _: authors.read_authors(frame, path)),
    Layout("aiconfigurator silicon", silicon.COLUMNS, lambda frame, path, _: silicon.read_silicon(frame, path)),
    Layout("BLIS", open_loops.BLIS_COLUMNS, lambda frame, path, _: open_loops.read_blis(frame, path)),
    Layout("llm-d LMBench", lmbench.COLUMNS, lambda frame, path, _: lmbench.read_lmbench(frame, path)),
    Layout("kvcached", kvcached.COLUMNS, lambda frame, path, _: kvcached.read_kvcached(frame, path)),
    Layout("Aegaeon", aegaeon.COLUMNS, lambda frame, path, _: aegaeon.read_aegaeon(frame, path)),
    Layout("NVIDIA many models", many_models.COLUMNS, lambda frame, path, _: many_models.read_many_models(frame, path)),
    Layout("InferenceX sweep", inferencex.COLUMNS, lambda frame, path, _: inferencex.read_inferencex(frame, path)),
    Layout(
        "BLIS residency",
        open_loops.RESIDENCY_COLUMNS,
        lambda frame, path, _: open_loops.read_residency(frame, path),
    ),
    Layout("GPUStack performance lab", gpustack.COLUMNS, lambda frame, path, _: gpustack.read_gpustack(frame, path)),
    Layout("LLMServingSim bench", servingsim.COLUMNS, lambda frame, path, _: servingsim.read_servingsim(frame, path)),
    Layout("DistServe", open_loops.DISTSERVE_COLUMNS, lambda frame, path, _: open_loops.read_distserve(frame, path)),
)


def read_set(path: Path, make_step: StepFactory) -> MeasuredSet:
    """Read the measured set in ``path``, a CSV (gzip'd or plain; ``.tsv``: with tabs; ``.jsonl``: a JSON object a line) of one
    of the known layouts.

    Raises LayoutError for an unknown layout or an unreadable value.
    """
    frame = read_columns(path)
    for layout in LAYOUTS:
        if set(layout.columns) <= set(frame.columns):
            if frame.empty:
                raise LayoutError(f"{path}: columns of the layout of {layout.name}, but no rows")
            return layout.read(frame, path, make_step)
    raise LayoutError(f"{path}: {_what_is_missing(set(map(str, frame.columns)))}")


def _what_is_missing(columns: set[str]) -> str:
    """The columns that the nearest layout would have; all layouts where none has half of its columns there."""
    nearest = max(LAYOUTS, key=lambda layout: len(columns & set(layout.columns)) / len(layout.columns))
    missing = [name for name in nearest.columns if name not in columns]
    if 2 * len(missing) <= len(nearest.columns):
        return f"no column {', '.join(missing)}; the layout of {nearest.name} has {', '.join(nearest.columns)}"
    known = "; ".join(f"{layout.name} ({', '.join(layout.columns[:3])}, ...)" for layout in LAYOUTS)
    return f"unknown column layout ({', '.join(sorted(columns)[:4])}, ...); known: {known}"
