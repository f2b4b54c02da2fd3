"""The chunk cost that lookahead plans with, profiled from the step model as a system would profile its engine
(KunServe eq. 1)."""

from __future__ import annotations

from itertools import product

import numpy as np

from fineserve_sim.latency import StepModel
from fineserve_sim.policy.groups.microbatch import ChunkCost

CHUNKS = (256, 512, 1024, 2048, 4096)
PREFIXES = (0, 2048, 8192, 16384)
COUNTS = (1, 2, 4)


def fit_chunk_cost(step: StepModel) -> ChunkCost:
    """alpha, beta, gamma and the shared part by least squares of relative errors, over steps of 1, 2 and 4 equal
    chunks."""
    rows, seconds = [], []
    for count, chunk, prefix in product(COUNTS, CHUNKS, PREFIXES):
        pairs = chunk * prefix + chunk * (chunk + 1) // 2
        seconds.append(step.step_s(0, 0, count * chunk, count * pairs, count * prefix, count))
        rows.append((count * pairs, count * chunk, count, 1 - count))
    measured_s = np.array(seconds)
    scaled = np.array(rows, dtype=np.float64) / measured_s[:, None]
    found, *_ = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)
    alpha, beta, gamma, shared = (max(0.0, float(value)) for value in found)
    return ChunkCost(alpha, beta, gamma, min(shared, gamma))
