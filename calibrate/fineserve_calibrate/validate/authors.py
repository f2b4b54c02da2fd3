"""The FineServe authors' profile of 8B models under SM shares (vLLM 0.9.1, one H100 SXM5; QoQ on OmniServe).

What no other set records is taken from the rows with 256 input tokens: host floors (TPOT of small batches with all SMs) and
the two numbers of ``SmShare`` a precision. Only the rows with 512 input tokens are cases.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fineserve_calibrate.validate.cases import Case, Label, MeasuredSet, Sensitivity, Serving, StaticBatch
from fineserve_calibrate.validate.changes import with_budget
from fineserve_calibrate.validate.errors import relative
from fineserve_calibrate.validate.names import model_named, precision_named
from fineserve_calibrate.validate.predict import StepFactory, predict_set, remembered
from fineserve_calibrate.validate.sm_share import SmShare, fit_sm_share
from fineserve_calibrate.validate.tables import LayoutError, check_positive
from fineserve_sim.catalog import Deployment, Quantity, gpu

COLUMNS = ("model", "qformat", "tp", "mps_percentage", "batch_size", "input_len", "output_len", "ttft", "tpot")
FITTED_INPUT, REPORTED_INPUT = 256, 512
HOST_BOUND_BATCH = 8
"""Up to here an 8B model's decode keeps an H100 busy for less than the measured step."""
TOKEN_BUDGET = 16384
WHOLE = "h100-sxm"


def read_authors(frame: pd.DataFrame, path: Path, make_step: StepFactory) -> MeasuredSet:
    """Raises LayoutError when the rows to fit on are missing or a number is not positive."""
    check_positive(frame, COLUMNS[2:], path)
    fitted = frame[frame.input_len == FITTED_INPUT]
    if fitted.empty:
        raise LayoutError(
            f"{path}: no rows with input_len {FITTED_INPUT}; the constants of this set are fitted on them"
        )
    make_step = remembered(make_step)  # the fit asks for the same slices of the GPU again and again
    deployment = _host_floors(fitted, path)
    shares = {
        str(name): _fit(rows, deployment, make_step, path.name) for name, rows in fitted.groupby("qformat", sort=False)
    }
    reported = frame[frame.input_len == REPORTED_INPUT]
    cases = _cases(reported[reported.qformat.isin(shares)], deployment, shares, _stem(path))
    return MeasuredSet(
        name=_stem(path),
        cases=cases,
        assumptions=(
            f"host floors and SM shares fitted on input {FITTED_INPUT}, reported on input {REPORTED_INPUT}",
            *(
                f"{name}: compute as share^{share.compute_exponent}, memory from {share.memory_saturation:.0%} of the SMs on"
                for name, share in shares.items()
            ),
            f"token budget {TOKEN_BUDGET} (vLLM 0.9.1, offline, H100); static batches",
        ),
        sensitivities=(Sensitivity("token budget 8192", with_budget(8192)),),
        kind="fitted on part of the set",
    )


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def _host_floors(fitted: pd.DataFrame, path: Path) -> Deployment:
    """Median TPOT of small batches with all SMs, by precision: the floor of a step. Raises LayoutError where no row tells."""
    floors = {}
    for name, rows in fitted.groupby("qformat"):
        small = rows[(rows.batch_size <= HOST_BOUND_BATCH) & (rows.mps_percentage == 100)]
        if small.empty:
            raise LayoutError(
                f"{path}: {name} has no row with input_len {FITTED_INPUT}, batch <= {HOST_BOUND_BATCH}, all SMs (host floor)"
            )
        source = f"median TPOT of batches up to {HOST_BOUND_BATCH}, input {FITTED_INPUT}, all SMs; {path.name}"
        floors[precision_named(str(name)).name] = Quantity(
            value=float(small.tpot.median()), kind="fitted", source=source
        )
    overhead = Quantity(value=0.0, kind="assumed", source="inside the floors")
    return Deployment(name=f"{_stem(path)}, input {FITTED_INPUT}", overhead_s=overhead, host_floors=floors)


def _fit(fitted: pd.DataFrame, deployment: Deployment, make_step: StepFactory, name: str) -> SmShare:
    partial = fitted[fitted.mps_percentage < 100]
    if partial.empty:
        return SmShare(1.0, 1.0)

    def errors(share: SmShare, column: str) -> list[float]:
        shares = dict.fromkeys(partial.qformat, share)
        predicted = predict_set(MeasuredSet(name, _cases(partial, deployment, shares, name)), make_step)
        pairs = [(getattr(p, column), getattr(p.case, column)) for p in predicted]
        return [float(relative(guess, truth)[0]) for guess, truth in pairs]

    return fit_sm_share(lambda share: errors(share, "ttft_s"), lambda share: errors(share, "tpot_s"))


def _cases(rows: pd.DataFrame, deployment: Deployment, shares: dict[str, SmShare], name: str) -> tuple[Case, ...]:
    whole = gpu(WHOLE)
    cases = []
    for row in rows.to_dict("records"):
        percent = int(row["mps_percentage"])
        label = Label(
            f"{name}, input {row['input_len']}, {percent}% SMs",
            "omniserve" if row["qformat"] == "qoq" else "vllm",
            str(row["model"]),
            precision_named(str(row["qformat"])).name,
            int(row["tp"]),
        )
        serving = Serving(
            model_named(label.model),
            precision_named(str(row["qformat"])),
            label.tp,
            shares[row["qformat"]].slice_of(whole, percent / 100),
            deployment,
            TOKEN_BUDGET,
            256,
        )
        load = StaticBatch(int(row["batch_size"]), int(row["input_len"]), int(row["output_len"]))
        cases.append(Case(label, serving, load, np.array([row["ttft"]]), np.array([row["tpot"]])))
    return tuple(cases)
