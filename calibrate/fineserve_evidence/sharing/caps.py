"""Engines alone under a cap of their SMs: MuxServe's profile (LLaMA of four sizes on A100s) and the FineServe authors'.

Nothing of the law was fitted on the authors' profile (Llama-3.1-8B on H100s). The law takes an engine's demand: the step
model's busy seconds over the measured time with all SMs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from fineserve_calibrate.fit.step_costs import NO_HOST
from rich.table import Table
from scipy.optimize import minimize_scalar

from fineserve_evidence.validate.authors import HOST
from fineserve_evidence.validate.cases import Floats
from fineserve_evidence.validate.predict import StepFactory
from fineserve_evidence.validate.rows import model_named, precision_named
from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency.sharing import MEMORY_SATURATION, Demand, under_cap

FILE = "muxserve_sm_profile_a100.csv.gz"
MODELS = {"llama-7b": "llama-2-7b", "llama-13b": "llama-2-13b", "llama-30b": "llama-30b", "llama-65b": "llama-65b"}
"""Names in the catalog. LLaMA and Llama 2 of 7B and 13B have the same layers."""
FITTED = ("llama-7b", "llama-13b")
DEVICE = "a100-80gb"
AUTHORS_FILES = ("fineserve_authors_h100_8b.csv", "fineserve_authors_h100_8b_tp2.csv")
AUTHORS_DEVICE = "h100-sxm"
OMNISERVE = "qoq"
LONG_PROMPTS = 2048
COLUMNS = ["model", "tp", "phase", "share", "compute", "bandwidth", "slowdown"]
Row = tuple[object, ...]
Load = tuple[int, int, int, float, int, int]


class CapErrors(NamedTuple):
    """Relative errors of the time under a cap, for one model, TP degree and phase."""

    model: str
    tp: int
    phase: str
    held_out: bool
    n: int
    median_abs: float
    p90_abs: float
    bias: float


def read_caps(path: Path, make_step: StepFactory) -> pd.DataFrame:
    """Read one row a cap below 100 %: model, tp, phase, share, compute and bandwidth needs, and the measured slowdown."""
    frame, rows = pd.read_csv(path), list[Row]()
    for (name, tp), group in frame.groupby(["model", "tp"], sort=False):
        step = make_step(model(MODELS[str(name)]), precision("fp16"), int(str(tp)), gpu(DEVICE), NO_HOST)
        for (batch, tokens), times in group.groupby(["batch", "seq_len"], sort=False):
            b, n = int(str(batch)), int(str(tokens))
            shares = times.mps_percentage.to_numpy(np.float64) / 100
            for phase, load in {"prefill": _prefill(b, n), "decode": (b, b * n, 0, 0, 0, b)}.items():
                seconds = times[f"{phase}_ms"].to_numpy(np.float64) / 1e3
                alone_s = float(seconds[shares == 1.0].sum())
                if alone_s > 0:
                    needs = np.minimum(step.demand(*load, alone_s)[:2], 1.0).tolist()
                    rows += _slowdowns((name, tp, phase), shares, seconds, needs)
    return pd.DataFrame(rows, columns=COLUMNS)


def read_authors_caps(path: Path, make_step: StepFactory) -> pd.DataFrame:
    """Read a profile in the authors' layout as ``read_caps`` does: TPOT, and TTFT of 2,048 tokens or more."""
    frame, rows = pd.read_csv(path), list[Row]()
    frame = frame[frame.qformat != OMNISERVE]
    for (name, fmt, tp), group in frame.groupby(["model", "qformat", "tp"], sort=False):
        served, spec = model_named(str(name)), precision_named(str(fmt))
        step = make_step(served, spec, int(str(tp)), gpu(AUTHORS_DEVICE), deployment(HOST))
        for (batch, tokens), times in group.groupby(["batch_size", "input_len"], sort=False):
            b, n = int(str(batch)), int(str(tokens))
            shares = times.mps_percentage.to_numpy(np.float64) / 100
            phases: list[tuple[str, str, Load]] = [("decode", "tpot", (b, b * (n + 128), 0, 0, 0, b))]
            phases += [("prefill", "ttft", _prefill(b, n))] if b * n >= LONG_PROMPTS else []
            for phase, column, load in phases:
                label = (f"{served.name} {spec.name}", tp, phase)
                rows += _slowdowns(label, shares, times[column].to_numpy(np.float64), step.demand(*load)[:2])
    return pd.DataFrame(rows, columns=COLUMNS)


def _prefill(batch: int, tokens: int) -> Load:
    """A step that prefills equal prompts, as the arguments of a step model."""
    return 0, 0, batch * tokens, batch * tokens * (tokens + 1) / 2, 0, batch


def _slowdowns(label: Sequence[object], shares: Floats, seconds: Floats, needs: Sequence[float]) -> Iterator[Row]:
    """A row for each measured cap below 100 %."""
    alone_s = float(seconds[shares == 1.0].sum())
    there = (seconds > 0) & (shares < 1)
    for share, slowdown in zip(shares[there], seconds[there] / alone_s, strict=True):
        yield (*label, share, *needs, slowdown)


def predicted(rows: pd.DataFrame, saturation: float = MEMORY_SATURATION) -> Floats:
    """Predict the slowdowns by the law, shape (rows,)."""
    needs = rows[["compute", "bandwidth", "share"]].to_numpy(np.float64).tolist()
    return np.array(
        [under_cap(Demand(compute, bandwidth, 1.0, share), saturation) for compute, bandwidth, share in needs]
    )


def fit_saturation(rows: pd.DataFrame) -> float:
    """Fit the share of SMs that saturates memory on ``FITTED``: least squares of log ratios, large errors weighing less."""
    seen = rows[rows.model.isin(FITTED)]
    measured = seen.slowdown.to_numpy(np.float64)

    def loss(saturation: float) -> float:
        logs = np.log(predicted(seen, saturation) / measured)
        return float(np.sum(np.sqrt(1 + (logs / 0.1) ** 2) - 1))

    return float(minimize_scalar(loss, bounds=(0.2, 1.0), method="bounded", options={"xatol": 1e-3}).x)


def cap_errors(rows: pd.DataFrame) -> list[CapErrors]:
    """Summarise the errors, one row a model, TP degree and phase."""
    rows = rows.assign(error=predicted(rows) / rows.slowdown - 1)
    found = []
    for (name, tp, phase), group in rows.groupby(["model", "tp", "phase"], sort=True):
        size = group.error.abs()
        numbers = (len(group), float(size.median()), float(size.quantile(0.9)), float(group.error.median()))
        found.append(CapErrors(str(name), int(str(tp)), str(phase), name not in FITTED, *numbers))
    return found


def cap_table(caps: list[CapErrors]) -> Table:
    """Show the errors of the predicted slowdowns, a row a model, TP degree and phase."""
    table = Table(title="One engine under a thread cap: slowdown against all SMs", box=None)
    for header in ("model", "TP", "phase", "", "n", "median", "p90", "bias"):
        table.add_column(header, justify="left" if header in ("model", "phase", "") else "right")
    for one in caps:
        numbers = (str(one.n), f"{one.median_abs:.1%}", f"{one.p90_abs:.1%}", f"{one.bias:+.1%}")
        table.add_row(one.model, str(one.tp), one.phase, "held out" if one.held_out else "fitted", *numbers)
    return table
