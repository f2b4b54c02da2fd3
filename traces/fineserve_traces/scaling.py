"""More (or fewer) requests in the same time, with the temporal pattern kept.

Compressing the clock (`arrivals.scale_rate`) also compresses the waves of a day. `upscale` keeps the clock and copies
requests, after the idea of TraceUpscaler (EuroSys 2024). Request i gets k_i copies, where the sums of k_i follow
``factor`` times the count (systematic rounding), so any run of m requests becomes ``factor * m`` requests within one.
The first copy keeps its time; the others fall uniformly within half the shorter of the two gaps beside it. The shorter
gap, so that the edge of a burst does not bleed into the silence next to it: on/off traces stay on/off. Below the scale
of a gap copies cluster, so the cv of inter-arrival times grows: measured at factor 2, Poisson arrivals (cv 1.00) get
1.56, azure2023_conv (1.09) gets 1.67, while the cv of its per-minute counts stays 0.220.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.random import Generator

from fineserve_traces.schema import FloatArray, IntArray, Trace, TraceError, hash_range


def upscale(trace: Trace, factor: float, rng: Generator) -> Trace:
    """``factor`` times the requests (within one; factor may be a fraction) in the same span, each copy with the model
    and the lengths of its original.

    Copy c of every request lives in its own space of prefix hashes. So copies share prefixes among themselves as the originals
    do, and never hit the cache of their original. The last copies of a fractional factor are a sample of the requests, and
    share less. Raises TraceError when nothing is left, ValueError for a factor that is not positive.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"factor is {factor}; give a finite number > 0")
    copies = _copies(len(trace), factor, rng)
    origin = np.repeat(np.arange(len(trace)), copies)
    if origin.size == 0:
        raise TraceError(f"{trace.source}: scaled by {factor:g}, no request is left")
    copy = np.arange(origin.size) - np.repeat(np.cumsum(copies) - copies, copies)
    arrival_s = trace.arrival_s[origin]
    extra = copy > 0
    low, high = _neighbourhood(trace.arrival_s)
    arrival_s[extra] = rng.uniform(low[origin[extra]], high[origin[extra]])
    order = np.argsort(arrival_s, kind="stable")
    return replace(
        trace,
        arrival_s=arrival_s[order],
        model=trace.model[origin[order]],
        prompt_tokens=trace.prompt_tokens[origin[order]],
        output_tokens=trace.output_tokens[origin[order]],
        prefix_hashes=_copied_hashes(trace, origin[order], copy[order]),
        prefix_tokens=None if trace.prefix_tokens is None else trace.prefix_tokens[origin[order]],
        source=f"{trace.source}, {factor:g} times the requests",
    )


def _copies(requests: int, factor: float, rng: Generator) -> IntArray:
    """Copies of each request; all partial sums are within one of ``factor`` times the count."""
    steps = np.floor(np.arange(requests + 1) * factor + rng.uniform())
    copies: IntArray = np.diff(steps).astype(np.int64)
    return copies


def _neighbourhood(arrival_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The interval in which copies of each request may fall, never outside the span of the trace."""
    gaps = np.diff(arrival_s)
    before = np.concatenate([gaps[:1], gaps])
    after = np.concatenate([gaps, gaps[-1:]])
    reach = np.minimum(before, after) / 2 if gaps.size else np.zeros(1)
    return np.maximum(arrival_s - reach, arrival_s[0]), np.minimum(arrival_s + reach, arrival_s[-1])


def _copied_hashes(trace: Trace, origin: IntArray, copy: IntArray) -> tuple[tuple[int, ...], ...] | None:
    if trace.prefix_hashes is None:
        return None
    low, high = hash_range(trace.prefix_hashes)
    space = high - low + 1
    shifts = (copy * space).tolist()
    hashes = trace.prefix_hashes
    return tuple(
        tuple(block + shift for block in hashes[row]) for row, shift in zip(origin.tolist(), shifts, strict=True)
    )
