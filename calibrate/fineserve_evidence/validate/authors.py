"""The FineServe authors' profile under SM shares (vLLM 0.9.1, one H100 SXM5; QoQ on OmniServe).

The rows of the 8B models with 256 input tokens at TP 1 and 2 gave what no other set records. It stands in the catalog (host
time, compute rates of AWQ and QoQ) and in ``sm_shares.yaml``. Those rows are no cases. The 8B rows with other inputs are, and
every row of another model or TP degree, for which nothing was fitted.

The set's ``prefill_time`` falls short of a prefill of the whole batch, and ``ttft`` exceeds it by about one prompt's prefill.
Requests reach the engine one after another, so the first is prefilled alone while the others wait.

An engine under an MPS share of the SMs is an engine on a smaller GPU (``SmShare``). Matrix products and attention run at a
measured part of their rate, not in proportion to the share. Power limits the whole GPU, and the library picks other tiles for
other numbers of SMs. Memory-bound kernels run at ``min(1, share / memory_saturation)``. Few SMs keep memory busy, so decode
hardly slows until then. Launches and host time do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fineserve_evidence.validate.cases import (
    Case,
    Label,
    MeasuredSet,
    Sensitivity,
    Serving,
    StaticBatch,
    with_load,
    with_serving,
)
from fineserve_evidence.validate.rows import (
    UnsupportedRow,
    cases_of,
    check_positive,
    model_named,
    precision_named,
    stem,
    supported,
)
from fineserve_sim.catalog import GpuSpec, deployment, gpu

COLUMNS = ("model", "qformat", "tp", "mps_percentage", "batch_size", "input_len", "output_len", "ttft", "tpot")
FITTED_INPUT = 256
FITTED_MODELS = ("llama-3-8b", "llama-3.1-8b")
FITTED_TP = (1, 2)
TOKEN_BUDGET = 16384
HOST = "vllm-v1-eager"
WHOLE = "h100-sxm"


def fitted_on(frame: pd.DataFrame) -> pd.Series:
    """Mark the rows on which the constants of this engine were fitted."""
    eight = frame.model.str.lower().isin(FITTED_MODELS) & frame.tp.isin(FITTED_TP)
    return eight & (frame.input_len == FITTED_INPUT)


def read_authors(frame: pd.DataFrame, path: Path) -> MeasuredSet:
    """Make one case a row. Raises LayoutError when a number is not positive."""
    check_positive(frame, COLUMNS[2:], path, may_miss=("ttft", "tpot"))
    fitted = fitted_on(frame)
    records = frame[~fitted].to_dict("records")
    return MeasuredSet(
        stem(path),
        *cases_of(records, lambda row: _case(row, stem(path)), lambda row: (_backend(row), str(row["model"]))),
        assumptions=(
            f"host time, SM shares, AWQ and QoQ rates fitted on 8B rows with input {FITTED_INPUT}: "
            f"{int(fitted.sum())} here, not reported",
            f"token budget {TOKEN_BUDGET} (vLLM 0.9.1, offline, H100); requests reach the engine one after another",
        ),
        sensitivities=(
            Sensitivity("token budget 8192", with_serving(token_budget=8192)),
            Sensitivity("a batch reaches the engine whole", with_load(StaticBatch, together=True)),
        ),
        fitted=int(fitted.sum()),
    )


def _backend(row: dict[Any, Any]) -> str:
    return "omniserve" if row["qformat"] == "qoq" else "vllm"


def _gpu(precision: str, percent: int) -> GpuSpec:
    """The GPU with this share of its SMs. Raises UnsupportedRow where the precision was not measured under shares."""
    if percent == 100:
        return gpu(WHOLE)
    if precision not in sm_shares():
        raise UnsupportedRow(f"no measured SM shares of {precision}")
    return sm_shares()[precision].slice_of(gpu(WHOLE), percent / 100)


def _case(row: dict[Any, Any], name: str) -> Case:
    percent, tp = int(row["mps_percentage"]), int(row["tp"])
    served, precision = model_named(str(row["model"])), precision_named(str(row["qformat"]))
    label = Label(
        f"{name}, input {row['input_len']}, {percent}% SMs", _backend(row), str(row["model"]), precision.name, tp
    )
    serving = supported(
        Serving(served, precision, tp, _gpu(precision.name, percent), deployment(HOST), TOKEN_BUDGET, 256)
    )
    load = StaticBatch(int(row["batch_size"]), int(row["input_len"]), int(row["output_len"]))
    return Case(label, serving, load, np.array([row["ttft"]]), np.array([row["tpot"]]))


@dataclass(frozen=True, slots=True)
class SmShare:
    """Rates of one precision under a share: compute rate by share, against all SMs, and the share that saturates memory."""

    compute: Mapping[float, float]
    memory_saturation: float

    def compute_at(self, share: float) -> float:
        """Find the part of the compute rate at ``share`` in (0, 1]: log-log between measured shares, in proportion below."""
        points = dict(self.compute) | {1.0: 1.0}
        shares = np.array(sorted(points))
        rates = np.array([points[at] for at in shares.tolist()])
        inside = np.exp(np.interp(np.log(share), np.log(shares), np.log(rates)))
        return float(inside * min(1.0, share / shares[0]))

    def slice_of(self, whole: GpuSpec, share: float) -> GpuSpec:
        """Make the GPU that an engine with this share (0, 1] sees: ``whole`` itself where nothing binds."""
        compute, memory = self.compute_at(share), min(1.0, share / self.memory_saturation)
        if compute == memory == 1.0:
            return whole
        peaks = {
            name: peak * compute
            for name in ("bf16_flops_per_s", "fp8_flops_per_s", "int8_flops_per_s")
            if (peak := getattr(whole, name)) is not None
        }
        rates = {**peaks, "memory_bytes_per_s": whole.memory_bytes_per_s * memory}
        return whole.model_copy(
            update={**rates, "name": f"{whole.name} {share:.0%} SMs", "efficiency": "roofline-scaled"}
        )


@cache
def sm_shares() -> Mapping[str, SmShare]:
    """Read the fitted laws by precision."""
    text = files("fineserve_evidence.validate").joinpath("sm_shares.yaml").read_text(encoding="utf-8")
    return {name: SmShare(**fields) for name, fields in yaml.safe_load(text).items()}
