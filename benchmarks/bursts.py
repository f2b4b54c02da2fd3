"""How long do bursts of real traces last, and how many are there?

    python benchmarks/bursts.py ../shared/data/traces/azure2023_conv.csv.gz ...  [--times 2]

The rate is a moving mean over a window, beside its median over the trace. A burst is a stay above halfway between the median
and ``times`` the median that reaches ``times`` the median. A line a trace and window: bursts an hour, their median and longest
length in seconds. Bursts have no length of their own where it grows with the window.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fineserve_traces import Trace, read_trace

WINDOWS_S = (5, 10, 20, 40)


def bursts(trace: Trace, window_s: int, times: float) -> np.ndarray:
    """Seconds that each burst lasts, shape (bursts,). Windows lie inside the trace."""
    arrivals = np.bincount((trace.arrival_s - trace.arrival_s.min()).astype(np.int64))
    rate_per_s = np.convolve(arrivals, np.full(window_s, 1 / window_s), "valid")
    usual = float(np.median(rate_per_s))
    above = np.concatenate(([False], rate_per_s > usual * (1 + times) / 2, [False]))
    edges = np.flatnonzero(np.diff(above.astype(np.int8))).reshape(-1, 2)
    return np.array([end - start for start, end in edges if rate_per_s[start:end].max() >= times * usual], dtype=int)


def lines(paths: list[Path], times: float) -> Iterator[str]:
    for path in paths:
        trace = read_trace(path)
        hours = float(np.ptp(trace.arrival_s)) / 3600
        for window_s in WINDOWS_S:
            lengths_s = bursts(trace, window_s, times)
            found = f"median {np.median(lengths_s):g} s, longest {lengths_s.max()} s" if len(lengths_s) else "none"
            yield f"{path.name}, {window_s} s: {len(lengths_s) / hours:.1f} an hour, {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--times", type=float, default=2.0)
    options = parser.parse_args()
    print("\n".join(lines(options.traces, options.times)))


if __name__ == "__main__":
    main()
