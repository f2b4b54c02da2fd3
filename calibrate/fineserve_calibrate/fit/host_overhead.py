"""What the host adds to a decode step: ``tpot = overhead + max(device, floor)``.

The device's time comes from the simulator's step model without a host, everything else from the rows. Rows of one GPU often
stand on one side of the ``max``: below the floor, overhead and floor show only as a sum; above it, the floor does not
show at all. The full curve is then refused, and the two halves of it, each with one parameter, say which side it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from fineserve_calibrate.fit.least_squares import Fit, Floats, Unknown, fit_curve, with_held_out
from fineserve_sim.catalog import Deployment, GpuSpec, Quantity, model, precision
from fineserve_sim.latency import StepModel

NO_HOST = Deployment(name="no host", overhead_s=Quantity(value=0.0, kind="assumed", source="device time alone"))

_STARTS_S = (0.001, 0.003, 0.01)
_OVERHEAD = Unknown("overhead", "s", _STARTS_S)
_FLOOR = Unknown("floor", "s", (*_STARTS_S, 0.005, 0.007, 0.015))

CURVES: Mapping[str, tuple[tuple[Unknown, ...], Callable[[Floats, Floats], Floats]]] = MappingProxyType(
    {
        "overhead + max(device, floor)": ((_OVERHEAD, _FLOOR), lambda p, device: p[0] + np.maximum(device, p[1])),
        "overhead + device": ((_OVERHEAD,), lambda p, device: p[0] + device),
        "max(device, floor)": ((_FLOOR,), lambda p, device: np.maximum(device, p[0])),
    }
)


def device_s(decodes: pd.DataFrame, gpu: GpuSpec) -> Floats:
    """Seconds of each row's decode step on the device alone, shape (n,); columns as ``read_decodes`` gives them.

    Raises ValueError when the step model cannot price a model, precision or TP degree on the GPU.
    """
    seconds = np.empty(len(decodes))
    steps: dict[tuple[str, str, int], StepModel] = {}
    for place, row in enumerate(decodes.to_dict("records")):
        key = (str(row["model"]), str(row["precision"]), int(row["tp"]))
        if key not in steps:
            steps[key] = StepModel(model(key[0]), precision(key[1]), key[2], gpu, NO_HOST)
        batch = int(row["batch"])
        seconds[place] = steps[key].step_s(batch, round(batch * row["context_tokens"]), 0, 0, 0, batch)
    return seconds


def fit_host_overhead(decodes: pd.DataFrame, gpu: GpuSpec) -> list[Fit]:
    """Three fits a precision, one a curve; rows as ``read_decodes`` gives them, all measured on ``gpu``."""
    fits = []
    for name, rows in decodes.groupby("precision", sort=False):
        seen, unseen = rows[~rows.held_out], rows[rows.held_out]
        device, unseen_device = device_s(seen, gpu), device_s(unseen, gpu)
        tpot_s = seen.tpot_s.to_numpy(dtype=np.float64)
        for formula, (unknowns, curve) in CURVES.items():
            fit = fit_curve(f"{name}: {formula}", _bound(curve, device), unknowns, tpot_s, seen.row.tolist())
            fits.append(with_held_out(fit, () if fit.refused else curve(fit.values, unseen_device), unseen.tpot_s))
    return fits


def _bound(curve: Callable[[Floats, Floats], Floats], device: Floats) -> Callable[[Floats], Floats]:
    return lambda parameters: curve(parameters, device)
