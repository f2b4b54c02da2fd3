"""A results folder as pandas DataFrames, with the metrics' own names and units (docs/experiments.md has them)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fineserve_sim.experiment.run.store import Store, read_table

_COUNTS = ("requests", "finished", "dropped", "rejected", "unfinished", "preemptions")
Summary = Mapping[str, Any]
"""summary.json of a results folder."""


def cells_frame(summary: Summary) -> pd.DataFrame:
    """A row a cell: its place, counts, each metric and the half-width of its 95 % interval."""
    return pd.DataFrame([_cell_row(cell) for cell in summary["cells"]])


def _cell_row(cell: Mapping[str, Any]) -> dict[str, Any]:
    row = {"sweep": cell["sweep"], "system": cell["system"], "title": cell["title"], **cell["axes"]}
    row |= {"seeds": cell["seeds"], **{name: cell[name] for name in _COUNTS}}
    for metric, found in cell["metrics"].items():
        row |= {metric: found["mean"], f"{metric}_half_width": found["half_width"]}
    return row


def requests_frame(folder: Path) -> pd.DataFrame:
    """A row a request of every run, with its TTFT, time per token after the first and end-to-end latency in seconds (NaN where
    it has none)."""
    found = pd.read_parquet(folder / "requests.parquet")
    later = (found["output_tokens"] - 1).where(found["output_tokens"] > 1)
    return found.assign(
        ttft_s=found["first_token_s"] - found["arrival_s"],
        tpot_s=(found["finish_s"] - found["first_token_s"]) / later,
        e2e_s=found["finish_s"] - found["arrival_s"],
    )


def placements_frame(summary: Summary) -> pd.DataFrame:
    """A row an instance of a model in each cell's first placement, with its ``gpus``. ``status``: placed, unplaced (the model
    fits nowhere and has no GPUs), or infeasible (placed, though no operating point meets its SLO)."""
    return pd.DataFrame([row for entry in summary["placements"] for row in _placement_rows(entry)])


def _placement_rows(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    place = {key: value for key, value in entry.items() if key not in ("instances", "unplaced", "infeasible")}
    for instance in entry["instances"]:
        found = {"model": instance["model"], "replica": instance["replica"], "gpus": tuple(instance["gpus"])}
        yield place | found | {"status": "infeasible" if instance["model"] in entry["infeasible"] else "placed"}
    for model in entry["unplaced"]:
        yield place | {"model": model, "replica": -1, "gpus": (), "status": "unplaced"}


def timeline_frame(folder: Path, summary: Summary) -> pd.DataFrame:
    """A row a sample and engine (a model, where engines come and go) of every run: requests waiting and running, bytes of KV
    memory in use. Runs that two cells share are listed once."""
    runs: dict[str, dict[str, Any]] = {}
    for cell in summary["cells"]:
        for seed, key in enumerate(cell["runs"]):
            runs.setdefault(key, {"system": cell["system"], **cell["axes"], "seed": seed})
    parts = [frame for key, place in runs.items() for frame in _samples(folder, key, place)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _samples(folder: Path, key: str, place: Mapping[str, Any]) -> Iterator[pd.DataFrame]:
    path = folder / "cells" / f"{key}.timeline.parquet"
    if path.is_file():
        samples = read_table(path)
        for engine, model in enumerate(Store(folder).meta(key)["engine_models"]):
            columns = {
                name: samples.column(f"{name}.{engine}").to_numpy() for name in ("waiting", "running", "kv_used_bytes")
            }
            time_s = samples.column("time_s").to_numpy()
            yield pd.DataFrame({**place, "time_s": time_s, "engine": engine, "model": model, **columns})
