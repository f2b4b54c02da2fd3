"""Engines alone under a cap of their SMs: MuxServe's profile (LLaMA of four sizes on A100s), and the FineServe authors'
(Llama-3.1-8B on H100s), on which nothing of the law was fitted.

The law takes an engine's demand, and its time with all SMs as measured: the step model's busy seconds over that time.
"""

from __future__ import annotations

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
"""As the catalog spells them; LLaMA and Llama 2 of 7B and 13B have the same layers."""
FITTED = ("llama-7b", "llama-13b")
DEVICE = "a100-80gb"
AUTHORS_FILES = ("fineserve_authors_h100_8b.csv", "fineserve_authors_h100_8b_tp2.csv")
AUTHORS_DEVICE = "h100-sxm"
OMNISERVE = "qoq"
LONG_PROMPTS = 2048


class CapErrors(NamedTuple):
    """Relative errors of the time under a cap, by model, TP degree and phase."""

    model: str
    tp: int
    phase: str
    held_out: bool
    n: int
    median_abs: float
    p90_abs: float
    bias: float


def read_caps(path: Path, make_step: StepFactory) -> pd.DataFrame:
    """One row a cap below 100 %: model, tp, phase, share, compute and bandwidth needs, and the measured slowdown."""
    frame = pd.read_csv(path)
    rows: list[tuple[object, ...]] = []
    for (name, tp), group in frame.groupby(["model", "tp"], sort=False):
        step = make_step(model(MODELS[str(name)]), precision("fp16"), int(str(tp)), gpu(DEVICE), NO_HOST)
        for (batch, tokens), times in group.groupby(["batch", "seq_len"], sort=False):
            b, n = int(str(batch)), int(str(tokens))
            loads = {"prefill": (0, 0, b * n, b * n * (n + 1) / 2, 0, b), "decode": (b, b * n, 0, 0, 0, b)}
            shares = times.mps_percentage.to_numpy(np.float64) / 100
            for phase, load in loads.items():
                seconds = times[f"{phase}_ms"].to_numpy(np.float64) / 1e3
                alone_s = float(seconds[shares == 1.0].sum())
                if alone_s <= 0:
                    continue
                needs = np.minimum(step.demand(*load, alone_s)[:2], 1.0).tolist()
                there = (seconds > 0) & (shares < 1)
                under = zip(shares[there], seconds[there] / alone_s, strict=True)
                rows += [(name, tp, phase, share, *needs, slowdown) for share, slowdown in under]
    return pd.DataFrame(rows, columns=["model", "tp", "phase", "share", "compute", "bandwidth", "slowdown"])


def read_authors_caps(path: Path, make_step: StepFactory) -> pd.DataFrame:
    """As ``read_caps``, of a profile in the authors' layout: TPOT, and TTFT of 2,048 tokens or more."""
    frame = pd.read_csv(path)
    frame = frame[frame.qformat != OMNISERVE]
    rows: list[tuple[object, ...]] = []
    for (name, fmt, tp), group in frame.groupby(["model", "qformat", "tp"], sort=False):
        served, spec = model_named(str(name)), precision_named(str(fmt))
        step = make_step(served, spec, int(str(tp)), gpu(AUTHORS_DEVICE), deployment(HOST))
        for (batch, tokens), times in group.groupby(["batch_size", "input_len"], sort=False):
            b, n = int(str(batch)), int(str(tokens))
            loads = {"decode": (b, b * (n + 128), 0, 0, 0, b), "prefill": (0, 0, b * n, b * n * (n + 1) / 2, 0, b)}
            columns = {"decode": "tpot"} | ({"prefill": "ttft"} if b * n >= LONG_PROMPTS else {})
            shares = times.mps_percentage.to_numpy(np.float64) / 100
            for phase, column in columns.items():
                needs, seconds = step.demand(*loads[phase])[:2], times[column].to_numpy(np.float64)
                alone_s = float(seconds[shares == 1.0].sum())
                under = zip(shares[shares < 1], seconds[shares < 1] / alone_s, strict=True)
                rows += [
                    (f"{served.name} {spec.name}", tp, phase, share, *needs, slowdown) for share, slowdown in under
                ]
    return pd.DataFrame(rows, columns=["model", "tp", "phase", "share", "compute", "bandwidth", "slowdown"])


def predicted(rows: pd.DataFrame, saturation: float = MEMORY_SATURATION) -> Floats:
    """The law's slowdowns, shape (rows,)."""
    needs = rows[["compute", "bandwidth", "share"]].to_numpy(np.float64).tolist()
    return np.array(
        [under_cap(Demand(compute, bandwidth, 1.0, share), saturation) for compute, bandwidth, share in needs]
    )


def fit_saturation(rows: pd.DataFrame) -> float:
    """The share of SMs that saturates memory: least squares of log ratios, large errors weighing less, on ``FITTED``."""
    seen = rows[rows.model.isin(FITTED)]
    measured = seen.slowdown.to_numpy(np.float64)

    def loss(saturation: float) -> float:
        logs = np.log(predicted(seen, saturation) / measured)
        return float(np.sum(np.sqrt(1 + (logs / 0.1) ** 2) - 1))

    return float(minimize_scalar(loss, bounds=(0.2, 1.0), method="bounded", options={"xatol": 1e-3}).x)


def cap_errors(rows: pd.DataFrame) -> list[CapErrors]:
    """One row a model, TP degree and phase."""
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
