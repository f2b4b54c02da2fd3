"""Two cost models of a step: KunServe's prefill chunks, and the host's part of a decode step.

A chunk of c tokens after a prefix of p costs ``alpha (p c + (c^2 + c) / 2) + beta c + gamma`` (systems.md 7.4, eq. 1 and 3).
A step of k chunks costs their sum less ``(k - 1) lambda``, for the weights that all chunks of a step share. Here, alpha is
attention, beta the matrix products, gamma the cost of any step. The curve is linear in the four parameters, so
the fit has one minimum.

A decode step takes ``tpot = overhead + max(device, floor)``. The device's time comes from the simulator's step model without
a host, everything else from the rows. Rows of one GPU often stand on one side of the ``max``: below the floor, overhead and
floor show only as a sum; above it, the floor does not show. The full curve is then refused. The two halves of it, each with
one parameter, say which side it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd

from fineserve_calibrate.fit.least_squares import Fit, Floats, Unknown, fit_curve, with_held_out
from fineserve_calibrate.fit.rows import CHUNKS, RowError, checked, read_csv
from fineserve_sim.catalog import Deployment, GpuSpec, Quantity, model, precision
from fineserve_sim.latency import StepModel

SIMULATED_CHUNKS = (512, 1024, 2048, 4096)
SIMULATED_PREFIXES = (0, 2048, 8192, 16384)
SIMULATED_COUNTS = (1, 2, 4)


def read_chunks(path: Path) -> pd.DataFrame:
    """Read rows ``chunk_tokens, prefix_tokens, seconds`` and, where steps hold several chunks, ``step``.

    Rows of one step carry the seconds of the whole step. Raises RowError.
    """
    frame = read_csv(path)
    return checked(frame, [*CHUNKS, "step"] if "step" in frame else CHUNKS, str(path))


def simulated_chunks(step: StepModel) -> pd.DataFrame:
    """Make rows as ``read_chunks`` gives them, from a step model: 1, 2 and 4 equal chunks on the same prefix."""
    rows = []
    cases = product(SIMULATED_COUNTS, SIMULATED_CHUNKS, SIMULATED_PREFIXES)
    for number, (chunks, tokens, prefix) in enumerate(cases):
        pairs = chunks * (tokens * prefix + tokens * (tokens + 1) / 2)
        seconds = step.step_s(0, 0, chunks * tokens, pairs, chunks * prefix, chunks)
        rows += [(number, tokens, prefix, seconds)] * chunks
    return pd.DataFrame(rows, columns=["step", *CHUNKS]).assign(row=np.arange(len(rows)))


def fit_chunk_cost(chunks: pd.DataFrame, what: str = "chunk cost") -> Fit:
    """Fit alpha (s a pair), beta (s a token), gamma and, given a column ``step``, lambda (s).

    ``chunks`` are rows as ``read_chunks`` gives them. One measurement is one step; the fit's ``rows`` hold the first row of
    each. With a ``step`` column, the fit is refused when every step has one chunk. Raises RowError when the rows of a step
    disagree on its seconds.
    """
    shared = "step" in chunks
    steps = _steps(chunks if shared else chunks.assign(step=np.arange(len(chunks))))
    features = steps[["pairs", "tokens", "chunks"] + (["sharing"] if shared else [])].to_numpy(dtype=np.float64)
    measured_s = steps.seconds.to_numpy(dtype=np.float64)
    names = (("alpha", "s/pair"), ("beta", "s/token"), ("gamma", "s"), ("lambda", "s"))
    unknowns = [
        Unknown(name, unit, (_magnitude(column, measured_s),))
        for (name, unit), column in zip(names, features.T, strict=False)
    ]

    def curve(parameters: Floats) -> Floats:
        seconds: Floats = features @ parameters
        return seconds

    return fit_curve(what, curve, unknowns, measured_s, steps.row.tolist())


def _steps(chunks: pd.DataFrame) -> pd.DataFrame:
    """One row a step: pairs, tokens, chunks, ``sharing`` (minus the chunks after the first), seconds, first row."""
    tokens, prefix = chunks.chunk_tokens, chunks.prefix_tokens
    groups = chunks.assign(pairs=tokens * prefix + tokens * (tokens + 1) / 2).groupby("step", sort=False)
    torn = groups.seconds.nunique() > 1
    if torn.any():
        raise RowError(
            f"step {torn[torn].index[0]}: its chunks give different seconds; each must give those of the whole step"
        )
    steps = groups.agg(
        pairs=("pairs", "sum"),
        tokens=("chunk_tokens", "sum"),
        chunks=("row", "size"),
        seconds=("seconds", "first"),
        row=("row", "first"),
    )
    return steps.assign(sharing=1 - steps.chunks)


def _magnitude(feature: Floats, measured_s: Floats) -> float:
    largest = float(np.abs(feature).max(initial=0.0))
    return float(np.median(measured_s)) / largest if largest else 1.0


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
    """Predict the seconds of each row's decode step on the device alone, shape (n,); columns as ``read_decodes`` gives them.

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
    """Fit three curves a precision; rows as ``read_decodes`` gives them, all measured on ``gpu``."""
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
