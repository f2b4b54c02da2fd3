"""What KunServe's evaluators read of experiments/kunserve_*.yaml.

The burst of the 128 s window starts at 45 s and lasts 30 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fineserve_sim.experiment.file.plan import Cell
from fineserve_sim.experiment.reproduce.finished import Results
from fineserve_sim.experiment.results.stats import Estimate, over_runs
from fineserve_sim.experiment.run.run_data import Floats, RunData

BASELINES = ("vllm-dp", "vllm-pp", "infercept", "llumnix")
WORKLOADS = ("burstgpt", "sharegpt", "longbench")
SLO_SCALE = 5
"""Runs of fig13 differ by their SLO scale alone, and these systems ignore it: one scale has them all."""

BURST_S = (45.0, 75.0)
WINDOW_S = 2.0


def cells(results: Results, system: str) -> Iterator[Cell]:
    for sweep in WORKLOADS:
        yield results.cell("kunserve_fig13", system, sweep=sweep, slo_scale=SLO_SCALE)


def per_run(results: Results, name: str, cell: Cell, number: Callable[[RunData], float]) -> Estimate:
    return over_runs([number(run) for run in results.runs(name, cell)])


def known(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def windowed_ttft(run: RunData) -> Floats:
    """Mean TTFT of the requests that arrived in each window of 2 s; NaN for an empty one."""
    window = (run.arrival_s // WINDOW_S).astype(int)
    known = np.isfinite(run.ttft_s)
    sums = np.bincount(window[known], run.ttft_s[known], window.max() + 1)
    counts = np.bincount(window[known], minlength=window.max() + 1)
    means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means
