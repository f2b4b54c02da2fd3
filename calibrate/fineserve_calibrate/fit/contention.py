"""The slowdown of a step under a share of the SMs, beside what processor sharing predicts.

Memory-bound work slows when too few SMs are left to keep the memory busy. The host bounds the step measured with all SMs, so
nothing shows until the slower device time outgrows that step:

    decode(share)  = max(decode(1), device * max(1, saturation / share))

Compute-bound work slows in proportion. A prefill step is compute for a part of its time. Launches, memory, and clocks that fall
when all SMs are busy make up the rest:

    prefill(share) = prefill(1) * (1 - compute + compute / share)

``compute`` is thus the measured counterpart of the share ``uc`` that processor sharing (systems.md 1.3) takes from the step
model. Prefills under 2048 tokens are left out: with all SMs their time does not grow in proportion to their tokens.

Both curves start from the row's own time with all SMs, in the rows held out too: errors are errors of the slowdown.
Residuals of one batch size share that measurement, so intervals are somewhat narrower than repeats would give.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import pandas as pd

from fineserve_calibrate.fit.least_squares import Fit, Floats, Unknown, fit_curve, with_held_out
from fineserve_calibrate.fit.rows import FITTED_INPUT, REPORTED_INPUT, RowError
from fineserve_calibrate.fit.step_costs import device_s
from fineserve_sim.catalog import Deployment, GpuSpec, model, precision
from fineserve_sim.latency import StepModel

SHORTEST_PREFILL_TOKENS = 2048
HALF = 0.5

Phase = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class ContentionFit:
    """A fit of one phase of one precision. The rows with 512 input tokens are held out."""

    precision: str
    phase: Phase
    fit: Fit

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class HalfShare:
    """Slowdown of a batch against its time with all SMs.

    ``measured`` is the batch alone on half of the SMs, ``fitted`` the curve's value. ``processor_sharing`` is the simulator's
    prediction for two equal engines: max(1, 2 uc, 2 um), with the step model's shares ``compute`` and ``bandwidth``.
    """

    precision: str
    phase: Phase
    batch: int
    input_tokens: int
    measured: float
    fitted: float
    processor_sharing: float
    compute: float
    bandwidth: float

    @property
    def disagreement(self) -> float:
        """processor_sharing / measured - 1."""
        return self.processor_sharing / self.measured - 1

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "disagreement": self.disagreement}


def with_references(profile: pd.DataFrame, gpu: GpuSpec) -> pd.DataFrame:
    """Add ``device_s`` (decode) and the times with all SMs, ``full_tpot_s`` and ``full_prefill_s``, to the profile's rows.

    Precisions measured with all SMs only are dropped. Raises RowError when a row has no counterpart with all SMs, or several.
    """
    profile = profile[profile.groupby("precision").share.transform("min") < 1]
    key = ["model", "precision", "tp", "batch", "input_tokens"]
    full = profile.loc[profile.share == 1, [*key, "tpot_s", "prefill_s"]]
    if full.duplicated(key).any():
        raise RowError(
            f"row {profile.row[full[full.duplicated(key)].index[0]]}: measured twice with all SMs; one row is expected"
        )
    full = full.rename(columns={"tpot_s": "full_tpot_s", "prefill_s": "full_prefill_s"})
    joined = profile.merge(full, on=key, how="left", validate="many_to_one")
    lonely = joined.full_tpot_s.isna()
    if lonely.any():
        raise RowError(
            f"row {joined.row[lonely].iloc[0]}: no row of the same batch and input with all SMs to compare with"
        )
    return joined.assign(device_s=device_s(joined, gpu))


def fit_contention(profile: pd.DataFrame) -> list[ContentionFit]:
    """Fit both phases of every precision on the rows with 256 input tokens; rows with 512 report the errors.

    ``profile`` has rows as ``with_references`` gives them. Rows with all SMs are references, neither fitted nor reported.
    """
    partial = profile[profile.share < 1]
    return [
        _fit_phase(str(name), phase, _of_phase(rows, phase))
        for name, rows in partial.groupby("precision", sort=False)
        for phase in ("decode", "prefill")
    ]


def half_shares(
    profile: pd.DataFrame, fits: list[ContentionFit], gpu: GpuSpec, deployment: Deployment
) -> list[HalfShare]:
    """Compare the held-out rows at half of the SMs with the fit and with the simulator's processor sharing.

    Precisions and phases whose fit was refused are left out.
    """
    found = []
    for fitted in fits:
        if fitted.fit.refused:
            continue
        rows = rows_of(profile[profile.share == HALF], fitted)
        rows = rows[rows.input_tokens == REPORTED_INPUT]
        fitted_s = curve_s(rows, fitted.phase, fitted.fit.values)
        for seconds, row in zip(fitted_s, rows.to_dict("records"), strict=True):
            step = StepModel(model(row["model"]), precision(fitted.precision), int(row["tp"]), gpu, deployment)
            batch, tokens = int(row["batch"]), int(row["input_tokens"])
            compute, bandwidth = _shares(step, fitted.phase, batch, tokens, row["context_tokens"])
            alone_s, half_s = (row[name] for name in columns_of(fitted.phase))
            slowdown = max(1.0, 2 * compute, 2 * bandwidth)
            ratios = (half_s / alone_s, float(seconds) / alone_s, slowdown)
            found.append(HalfShare(fitted.precision, fitted.phase, batch, tokens, *ratios, compute, bandwidth))
    return found


def _fit_phase(name: str, phase: Phase, rows: pd.DataFrame) -> ContentionFit:
    seen, unseen = (rows[rows.input_tokens == tokens] for tokens in (FITTED_INPUT, REPORTED_INPUT))
    unknown = (
        Unknown("saturation", "share", (0.4, 0.05, 0.25, 0.6, 0.9))
        if phase == "decode"
        else Unknown("compute", "share", (0.8,))
    )
    measured = columns_of(phase)[1]

    def curve(parameters: Floats) -> Floats:
        return curve_s(seen, phase, parameters)

    fit = fit_curve(f"{name} {phase}", curve, [unknown], seen[measured].to_numpy(dtype=np.float64), seen.row.tolist())
    predicted_s = () if fit.refused else curve_s(unseen, phase, fit.values)
    return ContentionFit(name, phase, with_held_out(fit, predicted_s, unseen[measured]))


def rows_of(profile: pd.DataFrame, fitted: ContentionFit) -> pd.DataFrame:
    """Select the rows of the fit's precision that its phase uses."""
    return _of_phase(profile[profile.precision == fitted.precision], fitted.phase)


def curve_s(rows: pd.DataFrame, phase: Phase, parameters: Floats) -> Floats:
    """Compute the rows' seconds, shape (n,). ``parameters`` has shape (1,): the saturation or the compute share."""
    share = rows.share.to_numpy(dtype=np.float64)
    alone_s = rows[columns_of(phase)[0]].to_numpy(dtype=np.float64)
    if phase == "decode":
        device = rows.device_s.to_numpy(dtype=np.float64)
        decode: Floats = np.maximum(alone_s, device * np.maximum(1.0, parameters[0] / share))
        return decode
    prefill: Floats = alone_s * (1 - parameters[0] + parameters[0] / share)
    return prefill


def columns_of(phase: Phase) -> tuple[str, str]:
    """Name the columns with the seconds of all SMs, and of the row's share."""
    return ("full_tpot_s", "tpot_s") if phase == "decode" else ("full_prefill_s", "prefill_s")


def _of_phase(rows: pd.DataFrame, phase: Phase) -> pd.DataFrame:
    return rows if phase == "decode" else rows[rows.batch * rows.input_tokens >= SHORTEST_PREFILL_TOKENS]


def _shares(step: StepModel, phase: Phase, batch: int, tokens: int, context: float) -> tuple[float, float]:
    """The step model's (uc, um) of the batch: a decode step at its mean context, or all prompts prefilled in one step."""
    if phase == "decode":
        need = step.demand(batch, round(batch * context), 0, 0, 0, batch)
    else:
        need = step.demand(0, 0, batch * tokens, batch * tokens * (tokens + 1) / 2, 0, batch)
    return need.compute, need.bandwidth
