"""What only the authors' profile records, fitted on its rows with 256 input tokens (8B models, one GPU).

* Host time: ``tpot = overhead + max(device, floor)``, one overhead for all precisions, one floor a precision (FP16, whose
  device time hides its floor, shares AWQ's). All SMs.
* Compute rates of formats without a table (AWQ, QoQ): TTFT is linear in 1 / rate. All SMs, 2048 tokens or more, where the
  matrix products make the time.
* SM shares: the compute rate of each share on TTFT of 2048 tokens or more, the saturation of memory on TPOT, in turn.

All fits are least squares of log ratios. The results stand in the catalog and in ``sm_shares.yaml``; a test fits them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares, minimize_scalar

from fineserve_calibrate.fit.host_overhead import NO_HOST
from fineserve_calibrate.validate.authors import TOKEN_BUDGET, WHOLE
from fineserve_calibrate.validate.cases import Floats
from fineserve_calibrate.validate.names import model_named, precision_named
from fineserve_calibrate.validate.predict import StepFactory
from fineserve_calibrate.validate.sm_share import SmShare
from fineserve_sim.catalog import Deployment, GpuSpec, deployment, gpu, kernel_rates, linears
from fineserve_sim.latency import StepModel, batch_prefill_s

FLOORS = {"W16A16": "W4A16", "W4A16": "W4A16", "W8A8KV8": "W8A8KV8", "W4A8KV4": "W4A8KV4"}
"""Precision: whose floor it shares."""
LEAST_TOKENS = 2048
ROUNDS = 3
HOST = "vllm-0.9.1-authors"
"""The host time beside which rates and shares are fitted: the one in which the papers' experiments use them."""


class Profile:
    """The rows that constants are fitted on, and the step models that predict them."""

    def __init__(self, rows: pd.DataFrame, make_step: StepFactory) -> None:
        self.rows = rows.assign(precision=[precision_named(name).name for name in rows.qformat])
        self._make_step = make_step

    def step(self, row: Any, device: GpuSpec, host: Deployment) -> StepModel:
        """The step model of a row's engine."""
        return self._make_step(model_named(row.model), precision_named(row.qformat), int(row.tp), device, host)

    def tpot_s(self, rows: pd.DataFrame, device: GpuSpec, host: Deployment) -> Floats:
        """Predicted decode seconds a token, shape (rows,); all rows of one precision."""
        step = self.step(rows.iloc[0], device, host)
        batches = rows[["batch_size", "input_len", "output_len"]].to_numpy(np.int64).tolist()
        return np.array([float(step.decode_steps_s(b, b * tokens, out - 1).mean()) for b, tokens, out in batches])

    def ttft_s(self, rows: pd.DataFrame, device: GpuSpec, host: Deployment) -> Floats:
        """Predicted mean TTFT: the first prompt alone, then the others together."""
        step = self.step(rows.iloc[0], device, host)
        batches = rows[["batch_size", "input_len"]].to_numpy(np.int64).tolist()
        return np.array([_mean_ttft_s(step, batch, tokens) for batch, tokens in batches])


def _mean_ttft_s(step: StepModel, batch: int, tokens: int) -> float:
    first_s = batch_prefill_s(step, 1, tokens, TOKEN_BUDGET)
    rest = batch - 1
    if not rest:
        return first_s
    rest_s = step.step_s(1, tokens, rest * tokens, rest * tokens * (tokens + 1) / 2, 0, batch)
    return first_s + rest / batch * rest_s


def _loss(predicted: Floats, measured: Any) -> float:
    return float((np.log(predicted / measured.to_numpy(np.float64)) ** 2).mean())


def _least(loss: Callable[[float], float], low: float, high: float) -> float:
    """The positive number between ``low`` and ``high`` with the least loss."""
    found = minimize_scalar(
        lambda log: loss(float(np.exp(log))),
        bounds=(np.log(low), np.log(high)),
        method="bounded",
        options={"xatol": 1e-3},
    )
    return float(np.exp(found.x))


def fit_host(profile: Profile) -> tuple[float, Mapping[str, float]]:
    """Overhead of a step, and the floor of each precision, in seconds."""
    rows = profile.rows[profile.rows.mps_percentage == 100].sort_values("precision", kind="stable")
    names = rows.precision.drop_duplicates().tolist()
    device = np.concatenate([profile.tpot_s(rows[rows.precision == name], gpu(WHOLE), NO_HOST) for name in names])
    own = list(dict.fromkeys(FLOORS[name] for name in rows.precision))
    place = np.array([own.index(FLOORS[name]) for name in rows.precision])
    measured = rows.tpot.to_numpy(np.float64)

    def residuals(x: Floats) -> Floats:
        logs: Floats = np.log((x[0] + np.maximum(device, x[1:][place])) / measured)
        return logs

    start = [0.0015, *(float(measured[place == i].min()) - 0.0015 for i in range(len(own)))]
    found = least_squares(residuals, start, x_scale=1e-3).x
    return float(found[0]), dict(zip(own, found[1:].tolist(), strict=True))


def fit_rate(profile: Profile, precision: str) -> float:
    """Compute rate of a precision's matrix products in FLOP/s, beside the catalog's other numbers."""
    rows = profile.rows[(profile.rows.precision == precision) & (profile.rows.mps_percentage == 100)]
    rows = rows[rows.batch_size * rows.input_len >= LEAST_TOKENS]
    used = kernel_rates().gemm[precision].flops_per_s.value
    predicted = profile.ttft_s(rows, gpu(WHOLE), deployment(HOST))
    served = model_named(rows.iloc[0].model)
    token_flops = 2 * served.layers * sum(shape.inputs * shape.outputs for shape in linears(served, 1).values())
    rest = rows.batch_size - 1
    flops = (rows.input_len * (1 + rest * rest / rows.batch_size)).to_numpy(np.float64) * token_flops
    return _least(lambda rate: _loss(predicted + flops * (1 / rate - 1 / used), rows.ttft), used / 2, used * 2)


def fit_shares(profile: Profile, precision: str) -> SmShare:
    """Both numbers of ``SmShare``, each fitted beside the other."""
    rows = profile.rows[(profile.rows.precision == precision) & (profile.rows.mps_percentage < 100)]
    groups = {int(percent) / 100: rows[rows.mps_percentage == percent] for percent in sorted(set(rows.mps_percentage))}
    found = SmShare({share: share for share in groups}, 0.3)
    for _ in range(ROUNDS):
        saturation = found.memory_saturation
        compute = {share: _fit_compute(profile, group, share, saturation) for share, group in groups.items()}
        found = SmShare(compute, _fit_saturation(profile, groups, compute))
    return found


def _fit_compute(profile: Profile, rows: pd.DataFrame, share: float, saturation: float) -> float:
    """Compute rate at one share, on prefills of ``LEAST_TOKENS`` or more."""
    long = rows[rows.batch_size * rows.input_len >= LEAST_TOKENS]

    def loss(rate: float) -> float:
        device = SmShare({share: rate}, saturation).slice_of(gpu(WHOLE), share)
        return _loss(profile.ttft_s(long, device, deployment(HOST)), long.ttft)

    return _least(loss, share / 2, 1.0)


def _fit_saturation(profile: Profile, groups: Mapping[float, pd.DataFrame], compute: Mapping[float, float]) -> float:
    """Share that saturates memory, on the decodes of all shares."""

    def loss(saturation: float) -> float:
        law = SmShare(compute, saturation)
        losses = [
            _loss(profile.tpot_s(rows, law.slice_of(gpu(WHOLE), share), deployment(HOST)), rows.tpot)
            for share, rows in groups.items()
        ]
        return float(np.sum(losses))

    return _least(loss, 0.05, 1.0)
