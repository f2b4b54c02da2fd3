"""Published slowdowns of engines that share a GPU, each beside the prediction of the laws."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from rich.table import Table

from fineserve_evidence.validate.predict import StepFactory
from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency.profile import profile
from fineserve_sim.latency.sharing import Demand, Slice, mig, mps, time_slice

PAIRS, REPLICAS = "pairs_measured.csv", "rtx2000ada_vllm_timeslicing_hami.csv"
FITTED = {("N", "mps (10 GB each)"): 7, ("S1", "timeslice"): 2}
"""Rows on which a demand was chosen: source and mode, up to this number of engines. These are the vision model's compute under
MPS, and the residents of a host-bound engine."""
NO_ENGINES = re.compile("micro-kernel|sleep kernel|DRAM copy")
SHARED_OUT = re.compile("same total load|total concurrency")
HOPPER_SMS, MEMORY_SLICES = 132, 8
FP8_PAIR = {"prompt_tokens": 248, "output_tokens": 325, "token_budget": 2048, "sequences": 256}
"""FineServe section 3.3 says two engines at saturation: vLLM's most sequences, ShareGPT's first turns."""


class Compared(NamedTuple):
    """The slowdown of each engine against alone; None where the source or the laws do not say."""

    source: str
    gpu: str
    mode: str
    engines: int
    workload: str
    beside: str
    metric: str
    measured: float | None
    predicted: float | None
    fitted: bool
    note: str


def compare_pairs(path: Path, make_step: StepFactory) -> list[Compared]:
    """Compare every row of engines. Micro-kernels are left out."""
    rows = pd.read_csv(path).to_dict("records")
    engines = [row for row in rows if not NO_ENGINES.search(str(row["workload_a"]))]
    return [_fp8_pair(row, make_step) if row["src"] == "D" else _compared(row) for row in engines]


def _compared(row: dict[Any, Any]) -> Compared:
    beside = "" if pd.isna(row["workload_b"]) else str(row["workload_b"])
    predicted, note = _predicted(row, beside)
    return Compared(
        row["src"], row["gpu"], row["mode"], int(row["n_procs"]), row["workload_a"], beside, row["metric"],
        _measured(row), predicted, int(row["n_procs"]) <= FITTED.get((row["src"], row["mode"]), 0), note,
    )  # fmt: skip


def _measured(row: dict[Any, Any]) -> float | None:
    """The slowdown of one engine. An aggregate covers all engines; its "solo" may be capped engines, or two GPUs."""
    alone, shared, metric = row["solo"], row["shared"], str(row["metric"])
    if pd.isna(alone) or "cap" in str(row["mode"]):
        return None
    if re.search("time|latency|TTFT|TPOT", metric):
        return float(shared / alone)
    return float(row["n_procs"] * alone / shared) if metric == "aggregate" else float(alone / shared)


@cache
def _workloads() -> list[dict[str, Any]]:
    text = files("fineserve_evidence.sharing").joinpath("workloads.yaml").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = yaml.safe_load(text)
    return found


def _demand(workload: str) -> tuple[Demand, str] | None:
    for entry in _workloads():
        if re.search(entry["match"], workload):
            return Demand(entry["compute"], entry["bandwidth"], entry["resident"]), str(entry["note"])
    return None


def _predicted(row: dict[Any, Any], beside: str) -> tuple[float | None, str]:
    mine = _demand(str(row["workload_a"]))
    other = mine if beside in ("same", "") else _demand(beside)
    if SHARED_OUT.search(f"{row['workload_a']} {row['note']}") and "latency" in str(row["metric"]):
        return None, "one load shared out over the engines: what each takes alone is not the same load"
    if mine is None or other is None:
        return None, "no demand stated"
    demands = [mine[0], *[other[0]] * (int(row["n_procs"]) - 1)]
    pace = _pace(str(row["mode"]), demands, reverse="10 % threads" in str(row["workload_a"]))
    return pace, mine[1] if pace is not None else "no law for this mode"


def _pace(mode: str, demands: list[Demand], reverse: bool) -> float | None:
    """Of the first engine; ``reverse``: it is the second that the mode's text names."""
    if mode.startswith("timeslice"):
        return time_slice(demands)[0]
    if mode.startswith("mig"):
        return _sliced(mode, demands[0])
    if caps := re.match(r"mps(\d+)/(\d+)", mode):
        first, *rest = sorted((int(caps[1]), int(caps[2])), reverse=not reverse)
        shares = [first / 100, *[rest[0] / 100] * (len(demands) - 1)]
        return mps([need._replace(sm_share=share) for need, share in zip(demands, shares, strict=True)])[0]
    return mps(demands)[0] if mode.startswith("mps") and "cap" not in mode else None


def _sliced(mode: str, need: Demand) -> float | None:
    """A profile's SMs are in the mode's text; of memory it has 1, 2, 4, 4 and 8 eighths for 1g, 2g, 3g, 4g and 7g. Pods that
    are all in slices are no slower for each other."""
    found = re.search(r"(\d)g\.\d+gb \((\d+) SM\)", mode)
    if found is None:
        return 1.0
    slices = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}[int(found[1])]
    return mig([Slice(int(found[2]) / HOPPER_SMS, slices / MEMORY_SLICES)])([need])[0]


def _fp8_pair(row: dict[Any, Any], make_step: StepFactory) -> Compared:
    """Summed throughput of two FP8 engines against one in FP16."""
    tokens = (FP8_PAIR["prompt_tokens"], FP8_PAIR["output_tokens"])
    batch = FP8_PAIR["sequences"]
    steps = {
        name: make_step(model("llama-3.1-8b"), precision(name), 1, gpu("h100-sxm"), deployment("vllm-v1-eager"))
        for name in ("fp16", "fp8")
    }
    points = {name: profile(step, *tokens, FP8_PAIR["token_budget"], batch)[-1] for name, step in steps.items()}
    load = (batch, batch * (tokens[0] + tokens[1] // 2), 0, 0, 0, batch)
    need = steps["fp8"].demand(*load)
    ratio = 2 / mps([need, need])[0] * points["fp8"].throughput_per_s / points["fp16"].throughput_per_s
    note = f"{batch} sequences an engine of {tokens[0]} tokens in and {tokens[1]} out, by the step model"
    return Compared(
        row["src"], row["gpu"], row["mode"], 2, row["workload_a"], "", row["metric"], float(row["shared"]), ratio, False, note
    )  # fmt: skip


def compare_replicas(path: Path) -> list[Compared]:
    """Compare two replicas on the RTX 2000 Ada, one request each at a time. Resident is the utilisation of one alone."""
    frame = pd.read_csv(path)
    found = []
    for mode, rows in frame.groupby("mode", sort=True):
        alone = rows[(rows.replicas == 1) & (rows.total_concurrency == 1)]
        both = rows[(rows.replicas == 2) & (rows.total_concurrency == 2)]
        if both.empty:
            continue
        resident = float(alone.gpu_util_pct.mean()) / 100
        measured = float(both.e2e_avg_ms.mean() / alone.e2e_avg_ms.mean())
        pace = time_slice([Demand(0.0, 0.0, resident)] * 2)[0]
        note = f"GPU {resident:.0%} busy with one"
        workload = "Qwen2.5-0.5B, vLLM 0.8.5"
        found.append(
            Compared("RTX", "RTX 2000 Ada", str(mode), 2, workload, "same", "E2E", measured, pace, False, note)
        )
    return found


def compared_table(compared: list[Compared]) -> Table:
    """Show measured beside predicted, a row a published slowdown."""
    table = Table(
        title="Engines that share a GPU: how many times slower than alone (FP8 pair: throughput ratio)", box=None
    )
    for header in ("source", "GPU", *Compared._fields[2:7], "measured", "predicted", "error", ""):
        table.add_column(header, overflow="fold")
    for one in compared:
        numbers = (_number(one.measured), _number(one.predicted), _error(one), "fitted" if one.fitted else "")
        table.add_row(*(str(value) for value in one[:7]), *numbers)
    return table


def _error(one: Compared) -> str:
    if one.measured is None or one.predicted is None:
        return "-"
    return f"{one.predicted / one.measured - 1:+.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
