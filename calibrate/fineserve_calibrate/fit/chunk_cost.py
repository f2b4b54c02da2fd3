"""KunServe's cost of a prefill step (systems.md 7.4, eq. 1 and 3).

A chunk of c tokens after a prefix of p costs ``alpha (p c + (c^2 + c) / 2) + beta c + gamma``; a step of k chunks costs
their sum less ``(k - 1) lambda``, for the weights that all chunks of a step share. alpha is attention, beta the matrix
products, gamma what a step costs however short. The curve is linear in the four: the fit has one minimum.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from fineserve_calibrate.fit.least_squares import Fit, Floats, Unknown, fit_curve
from fineserve_calibrate.fit.rows import CHUNKS, RowError, checked, read_csv
from fineserve_sim.latency import StepModel

SIMULATED_CHUNKS = (512, 1024, 2048, 4096)
SIMULATED_PREFIXES = (0, 2048, 8192, 16384)
SIMULATED_COUNTS = (1, 2, 4)


def read_chunks(path: Path) -> pd.DataFrame:
    """Rows ``chunk_tokens, prefix_tokens, seconds`` and, where steps hold several chunks, ``step``: rows of one step carry the
    seconds of the whole step. Raises RowError."""
    frame = read_csv(path)
    return checked(frame, [*CHUNKS, "step"] if "step" in frame else CHUNKS, str(path))


def simulated_chunks(step: StepModel) -> pd.DataFrame:
    """Rows as ``read_chunks`` gives them, from a step model: 1, 2 and 4 equal chunks on the same prefix."""
    rows = []
    cases = product(SIMULATED_COUNTS, SIMULATED_CHUNKS, SIMULATED_PREFIXES)
    for number, (chunks, tokens, prefix) in enumerate(cases):
        pairs = chunks * (tokens * prefix + tokens * (tokens + 1) / 2)
        seconds = step.step_s(0, 0, chunks * tokens, pairs, chunks * prefix, chunks)
        rows += [(number, tokens, prefix, seconds)] * chunks
    return pd.DataFrame(rows, columns=["step", *CHUNKS]).assign(row=np.arange(len(rows)))


def fit_chunk_cost(chunks: pd.DataFrame, what: str = "chunk cost") -> Fit:
    """alpha (s a pair), beta (s a token), gamma and, given a column ``step``, lambda (s).

    ``chunks``: as ``read_chunks`` gives them. One measurement is one step; the fit's ``rows`` hold the first row of each.
    Refused, with a ``step`` column, when every step has one chunk. Raises RowError when the rows of a step disagree on its
    seconds.
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
